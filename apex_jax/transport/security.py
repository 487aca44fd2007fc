"""Authentication and encryption of the links: CURVE on every tcp link, and the keys that each server accepts.

A `LinkContext` holds the security of its process. tcp sockets that `apex_jax.transport.sockets` opens in it are
encrypted if there are keys, and rejected if there are none and the address is reachable from other machines. ipc links
are not encrypted: file permissions protect them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from apex_jax.config import Config
from apex_jax.host.errors import UsageError
from apex_jax.host.program import NAME
from apex_jax.transport import keys
from apex_jax.transport.addresses import is_loopback

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

_log = logging.getLogger(__name__)


class Link(NamedTuple):
    """The roles at the two ends of a link."""

    server: str
    clients: tuple[str, ...]


LINKS = {
    "experience": Link("replay", ("actor",)),
    "sampling": Link("replay", ("learner",)),
    "weights": Link("learner", ("actor", "evaluator")),
}


@dataclass(frozen=True)
class Security:
    """The keys of a process; without any, its tcp links stay on this machine unless `is_insecure`."""

    role: str = ""
    directory: str = ""
    secret: bytes = field(default=b"", repr=False)  # Z85, as are all keys here
    servers: Mapping[str, bytes] = field(default_factory=dict)  # link -> key of its server
    is_insecure: bool = False

    @property
    def has_keys(self) -> bool:
        """Returns whether tcp links are encrypted."""
        return self.secret != b""


NO_KEYS = Security()


class LinkContext(zmq.Context):
    """A ZMQ context whose links use `security`; by default, without keys, they stay on this machine."""

    security: Security = NO_KEYS
    _authenticator: ThreadAuthenticator | None = None
    _allow_lists: dict[str, AllowList]  # link -> keys of its clients

    @classmethod
    def of(cls, security: Security) -> LinkContext:
        """Returns a context with this security, such as `security_of` a role."""
        context = cls()
        context.security = security
        context._allow_lists = {}
        return context

    def admit(self, link: str) -> None:
        """Authenticates the clients of a link, on a thread that `term` ends.

        With keys, only the public keys of the link's client roles are accepted. Without keys, all clients that use the
        current ZMTP are accepted; the oldest ZMTP has no handshake, so any bytes at all would make a permanent peer.
        """
        from zmq.auth.thread import ThreadAuthenticator  # imported here: loads asyncio, which clients do not need

        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self)
            self._authenticator.start()
        if self.security.has_keys:
            self._allow_lists[link] = AllowList(self.security.directory, LINKS[link].clients)
            self._authenticator.configure_curve_callback(link, self._allow_lists[link])

    def report(self) -> dict[str, Any]:
        """Returns the key lists that cannot be read, {"unreadable_keys": {role: reason}}. Callable from any thread."""
        lists = list(self._allow_lists.values())
        return {"unreadable_keys": {role: why for allowed in lists for role, why in allowed.defects.copy().items()}}

    def term(self) -> None:
        """Terminates the context, whose sockets must be closed."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        super().term()


class AllowList:
    """Public keys of roles, read again for each new client, so that added and removed keys take effect at once.

    While a role's list cannot be read, no new client of that role is accepted: its key may have been removed.
    """

    def __init__(self, directory: str, roles: tuple[str, ...]):
        """Reads the keys. Raises UsageError."""
        self._directory = directory
        self._keys = {role: frozenset(keys.read_allowed(directory, role)) for role in roles}
        self.defects: dict[str, str] = {}  # role -> why its list cannot be read

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns, to ZMQ's authenticator, whether the owner of `key` is accepted."""
        for role in self._keys:
            self._read(role)
        return any(key in allowed for allowed in self._keys.values())

    def _read(self, role: str) -> None:
        try:
            self._keys[role] = frozenset(keys.read_allowed(self._directory, role))
        except UsageError as error:
            self._keys[role] = frozenset()
            if self.defects.get(role) != str(error):
                self.defects[role] = str(error)
                _log.warning("%s; until the list can be read, no new %s is let in", error, role)
        else:
            if self.defects.pop(role, None):
                _log.info("the public keys of role %s can be read again", role)


def security_of(config: Config, role: str) -> Security:
    """Returns the security of the links that a role uses, with all keys read and checked.

    Raises UsageError for keys that are missing, malformed or readable by others, and for an address reachable from
    other machines if there are no keys.
    """
    addresses = {link: getattr(config.addresses, link) for link in links_of(role)}
    tcp_links = [link for link, address in addresses.items() if address.startswith("tcp://")]
    directory = config.security.keys
    if not tcp_links:
        return Security(role)
    if not keys.are_given(directory):
        exposed = [(link, addresses[link]) for link in tcp_links if not is_loopback(addresses[link])]
        for link, address in exposed:
            check_exposure(address, config.security.insecure, f"addresses.{link}=")
        if exposed:
            _log.warning(
                "INSECURE: %s without keys: whoever reaches it can read and feed this run (security.insecure=true)",
                " and ".join(address for _, address in exposed),
            )
        return Security(role, is_insecure=config.security.insecure)
    secret = keys.read_secret(directory, role)
    servers = {}
    for link in tcp_links:
        if LINKS[link].server != role:
            servers[link] = keys.read_publics(directory, LINKS[link].server)[0]
        else:
            for client in LINKS[link].clients:
                if not keys.read_allowed(directory, client):  # legal: a warning; raises if unreadable
                    _log.warning("%s.public holds no key: no %s is let in until one is added", client, client)
    _log.info("links over tcp are encrypted with the keys of %s", directory or "the environment")
    return Security(role, directory, secret, servers)


def links_of(role: str) -> list[str]:
    """Returns the links that a role serves or connects to."""
    return [name for name, link in LINKS.items() if role == link.server or role in link.clients]


def check_exposure(address: str, is_insecure: bool, prefix: str = "") -> None:
    """Raises UsageError for a tcp address that is reachable from other machines, unless `is_insecure`."""
    if not is_loopback(address) and not is_insecure:
        raise UsageError(
            f"{prefix}{address} leaves this machine and there are no keys: run {NAME} keys create DIR and set"
            " security.keys=DIR, or set security.insecure=true on a network where everybody may read and feed the run"
        )


def secure(socket: zmq.Socket, link: str, address: str, is_server: bool) -> None:
    """Sets the security options, before bind or connect, from the socket's context. Raises UsageError."""
    context = socket.context
    security = context.security if isinstance(context, LinkContext) else NO_KEYS
    if not address.startswith("tcp://"):
        return
    if is_server and isinstance(context, LinkContext):
        context.admit(link)
        socket.set(zmq.ZAP_DOMAIN, link.encode())  # must equal the authenticator's domain, or all clients are refused
    if not security.has_keys:
        check_exposure(address, security.is_insecure)
        return
    socket.set(zmq.CURVE_SECRETKEY, security.secret)
    socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(security.secret))
    if is_server:
        socket.set(zmq.CURVE_SERVER, 1)
    else:
        socket.set(zmq.CURVE_SERVERKEY, security.servers[link])
