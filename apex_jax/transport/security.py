"""Who may talk to whom: CURVE on every tcp link, and the keys that each server lets in.

A `LinkContext` carries the security of its process: what `apex_jax.transport.sockets` opens in it is encrypted where
there are keys, and refused where there are none and the address leaves this machine. ipc stays as it is: the file
system says who can enter.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import zmq

from apex_jax.config import Config
from apex_jax.errors import UsageError
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
    """What a process knows of keys; without any, its tcp links stay on this machine unless `is_insecure`."""

    role: str = ""
    directory: str = ""
    secret: bytes = field(default=b"", repr=False)  # Z85, as are all keys here
    servers: Mapping[str, bytes] = field(default_factory=dict)  # link -> the key of who serves it
    is_insecure: bool = False

    @property
    def has_keys(self) -> bool:
        """Tells whether tcp links are encrypted."""
        return self.secret != b""


NO_KEYS = Security()


class LinkContext(zmq.Context):
    """A ZMQ context whose links are as secure as `security` says; without a word of it they stay on this machine."""

    security: Security = NO_KEYS
    _authenticator: ThreadAuthenticator | None = None

    @classmethod
    def of(cls, security: Security) -> LinkContext:
        """Returns a context with this security."""
        context = cls()
        context.security = security
        return context

    def admit(self, link: str) -> None:
        """Has those who connect to a link checked by a thread that ends in `term`.

        With keys, against the public keys of its clients' roles. Without any, everybody is let in who speaks ZMQ's
        present protocol: its oldest has no handshake, any bytes at all would be a peer, for as long as it likes.
        """
        from zmq.auth.thread import ThreadAuthenticator  # not at the top: brings asyncio, which clients do not need

        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self)
            self._authenticator.start()
        if self.security.has_keys:
            allowed = AllowList(self.security.directory, LINKS[link].clients)
            self._authenticator.configure_curve_callback(link, allowed)

    def term(self) -> None:
        """Ends the context once its sockets are closed."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        super().term()


class AllowList:
    """Public keys of roles, read anew for each client: a key that is added or removed counts from then on."""

    def __init__(self, directory: str, roles: tuple[str, ...]):
        """Reads the keys. UsageError."""
        self._directory = directory
        self._roles = roles
        self._defect = ""
        self._keys = self._read()

    def callback(self, domain: str, key: bytes) -> bool:
        """Tells ZMQ's authenticator whether the owner of `key` is let in."""
        try:
            self._keys, self._defect = self._read(), ""
        except UsageError as error:  # half an edit: what held before holds on
            if str(error) != self._defect:
                self._defect = str(error)
                _log.warning("%s; until this is mended, the keys read before stay valid", error)
        return key in self._keys

    def _read(self) -> frozenset[bytes]:
        return frozenset(key for role in self._roles for key in keys.read_publics(self._directory, role))


def security_of(config: Config, role: str) -> Security:
    """Returns the security of the links that a role uses, every key read and checked.

    Raises UsageError for keys that are missing, malformed, readable by others or of another pair, and for an address
    beyond this machine where there are none.
    """
    addresses = {link: getattr(config.addresses, link) for link in links_of(role)}
    tcp_links = [link for link, address in addresses.items() if address.startswith("tcp://")]
    directory = config.security.keys
    if not tcp_links:
        return Security(role)
    if not keys.are_given(directory):
        exposed = [link for link in tcp_links if not is_loopback(addresses[link])]
        for link in exposed:
            check_exposure(addresses[link], config.security.insecure, f"addresses.{link}=")
        if exposed:
            _log.warning(
                "INSECURE: %s without keys: whoever reaches it can read and feed this run (security.insecure=true)",
                " and ".join(addresses[link] for link in exposed),
            )
        return Security(role, is_insecure=config.security.insecure)
    secret = keys.read_secret(directory, role)
    keys.check_pair(directory, role, secret)
    servers = {}
    for link in tcp_links:
        if LINKS[link].server != role:
            servers[link] = keys.read_publics(directory, LINKS[link].server)[0]
        else:
            AllowList(directory, LINKS[link].clients)  # for its errors, before anything starts
    _log.info("links over tcp are encrypted with the keys of %s", directory or "the environment")
    return Security(role, directory, secret, servers)


def links_of(role: str) -> list[str]:
    """Returns the links that a role serves or connects to."""
    return [name for name, link in LINKS.items() if role == link.server or role in link.clients]


def check_exposure(address: str, is_insecure: bool, prefix: str = "") -> None:
    """Raises UsageError for a tcp address beyond this machine, unless that is asked for."""
    if not is_loopback(address) and not is_insecure:
        raise UsageError(
            f"{prefix}{address} leaves this machine and there are no keys: run python main.py keys create DIR and set"
            " security.keys=DIR, or set security.insecure=true on a network where everybody may read and feed the run"
        )


def secure(socket: zmq.Socket, link: str, address: str, is_server: bool) -> None:
    """Sets what must be set before bind or connect, as the socket's context says. UsageError."""
    context = socket.context
    security = context.security if isinstance(context, LinkContext) else NO_KEYS
    if not address.startswith("tcp://"):
        return
    if is_server and isinstance(context, LinkContext):
        context.admit(link)
        socket.set(zmq.ZAP_DOMAIN, link.encode())  # the exact name: with another nobody is let in
    if not security.has_keys:
        check_exposure(address, security.is_insecure)
        return
    socket.set(zmq.CURVE_SECRETKEY, security.secret)
    socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(security.secret))
    if is_server:
        socket.set(zmq.CURVE_SERVER, 1)
    else:
        socket.set(zmq.CURVE_SERVERKEY, security.servers[link])


def link_context(config: Config, role: str) -> LinkContext:
    """Returns the context for the links of a role. UsageError, see `security_of`."""
    return LinkContext.of(security_of(config, role))
