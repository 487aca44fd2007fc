"""What is logged, counted and tried again when the two ends of a link have other keys, and what strangers cost."""

from __future__ import annotations

import socket as tcp
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from apex_jax.host.errors import RunError, UsageError
from apex_jax.transport import keys, sockets
from apex_jax.transport.messages import Goodbye
from apex_jax.transport.security import LINKS, LinkContext, Security
from apex_jax.transport.sockets import ClientMonitor, ServerMonitor
from tests.rigs.links import free_address, wait_until

CLIENTS = {"experience": "actor", "sampling": "learner", "weights": "actor"}


class Links:
    """Ends of links with keys of a directory, or without; closes them after the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dropped: Counter[str] = Counter()
        self.client_monitor = ClientMonitor()
        self.server_monitor = ServerMonitor()
        self._contexts: list[LinkContext] = []
        self._opened: list[tuple[zmq.Socket, ClientMonitor | ServerMonitor]] = []
        keys.create(directory)

    def security(self, role: str, server: str = "replay") -> Security:
        secret = keys.read_secret(str(self.directory), role)
        public = keys.read_publics(str(self.directory), server)[0]
        return Security(role, str(self.directory), secret, dict.fromkeys(CLIENTS, public))

    def serve(self, link: str, address: str, security: Security | None = None) -> zmq.Socket:
        self._contexts.append(LinkContext.of(self.security(LINKS[link].server) if security is None else security))
        socket = sockets.serve(link, self._contexts[-1], address, self.server_monitor)
        self._opened.append((socket, self.server_monitor))
        return socket

    def connect(self, link: str, address: str, security: Security | None = None) -> zmq.Socket:
        own = self.security(CLIENTS[link], LINKS[link].server) if security is None else security
        self._contexts.append(LinkContext.of(own))
        socket = sockets.connect(link, self._contexts[-1], address, self.client_monitor)
        self._opened.append((socket, self.client_monitor))
        return socket

    def watch(self) -> None:
        self.client_monitor.check()
        self.server_monitor.count(self.dropped)

    def close(self) -> None:
        for socket, its_monitor in self._opened:
            its_monitor.close()
            socket.close(linger=0)
        for context in self._contexts:
            context.term()
        self._opened, self._contexts = [], []


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Links]:
    monkeypatch.setattr(sockets, "RECONNECT_SECONDS", 0.1)
    monkeypatch.setattr(sockets, "GIVE_UP_SECONDS", 0.8)
    links = Links(tmp_path / "keys")
    yield links
    links.close()


def until_joined(client: zmq.Socket, meanwhile: Callable[[], None]) -> None:
    wait_until(lambda: client.poll(0, zmq.POLLOUT), meanwhile)


# What a client logs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("server", "client", "reason"), [
    ("keys", "no keys", "failed_handshake"),
    ("no keys", "keys", "failed_handshake"),
    ("keys", "stale server key", "failed_handshake"),
    ("keys", "unknown key", "refused_key"),
])  # fmt: skip
def test_fault_29_wrong_key_is_logged_once_on_both_sides_and_ends_a_client_that_the_server_refuses(
    links: Links, caplog: pytest.LogCaptureFixture, server: str, client: str, reason: str
) -> None:
    caplog.set_level("WARNING", logger="apex_jax")
    sound, stranger = links.security("actor"), zmq.curve_keypair()
    securities = {
        "no keys": Security("actor"),
        "keys": sound,
        "stale server key": replace(sound, servers={"experience": stranger[0]}),
        "unknown key": replace(sound, secret=stranger[1]),
    }
    address = free_address()
    links.serve("experience", address, None if server == "keys" else Security("replay"))
    links.connect("experience", address, securities[client])
    if reason == "refused_key":
        with pytest.raises(RunError, match=f"^the replay server at {address}: wrong key: compare .*addresses.exp"):
            wait_until(lambda: False, links.watch)
    else:
        wait_until(lambda: links.dropped[reason] > 2, links.watch)
    assert links.client_monitor.cause == "wrong key"
    assert links.dropped.keys() == {reason}
    assert caplog.text.count(f"the replay server at {address}: wrong key") == 1
    assert caplog.text.count("connections refused on the experience link") == 1


def test_closed_port_and_silent_server_have_their_own_causes(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_MILLISECONDS", 200)
    address = free_address()
    links.connect("experience", address)
    wait_until(lambda: links.client_monitor.cause == "refused", links.watch)
    host, port = address.removeprefix("tcp://").split(":")
    with tcp.create_server((host, int(port))):  # accepts nothing; the system completes the connection
        wait_until(lambda: links.client_monitor.cause == "no answer", links.watch)
    wait_until(lambda: links.client_monitor.cause == "refused", links.watch)
    links.serve("experience", address)
    wait_until(lambda: links.client_monitor.is_connected, links.watch)
    assert links.client_monitor.cause == ""


@pytest.mark.parametrize("link", CLIENTS)
@pytest.mark.parametrize("role", keys.ROLES)
def test_each_link_accepts_only_its_roles(links: Links, link: str, role: str) -> None:
    address = free_address()
    links.serve(link, address)
    links.connect(link, address, links.security(role, LINKS[link].server))
    may_enter = {"experience": {"actor"}, "sampling": {"learner"}, "weights": {"actor", "evaluator"}}[link]
    wait_until(lambda: links.dropped or links.client_monitor.is_connected, links.watch)
    assert links.client_monitor.is_connected == (role in may_enter)
    assert links.dropped == ({} if role in may_enter else {"refused_key": 1})


def test_messages_travel_both_ways_and_none_in_plain_text(links: Links) -> None:
    address, secret_text = free_address(), b"nobody on the way shall read this"
    server, client = links.serve("experience", address), links.connect("experience", address)
    until_joined(client, links.watch)
    client.send(secret_text)
    assert server.poll(10_000)
    identity, text = server.recv_multipart()
    server.send_multipart([identity, text])
    assert client.poll(10_000)
    assert client.recv() == secret_text
    assert server.get(zmq.MECHANISM) == client.get(zmq.MECHANISM) == zmq.CURVE


def test_a_link_beyond_this_machine_is_not_opened_without_keys(links: Links) -> None:
    with pytest.raises(UsageError, match=r"leaves this machine"):
        links.serve("experience", "tcp://0.0.0.0:5550", Security())
    with pytest.raises(UsageError, match=r"leaves this machine"), zmq.Context() as context:
        sockets.connect("experience", context, "tcp://10.0.0.7:5550")


# What is waited for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "has_keys"), [
    (None, True), (b"", False), (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
], ids=["silence", "end", "HTTP"])  # fmt: skip
def test_absent_server_behind_a_proxy_is_joined_when_it_is_back(
    links: Links, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, has_keys: bool
) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_MILLISECONDS", 300)
    address = free_address()
    client = links.connect("experience", address, None if has_keys else Security("actor"))
    host, port = address.removeprefix("tcp://").split(":")
    kept, answered = [], threading.Event()
    with tcp.create_server((host, int(port))) as listener:

        def serve() -> None:
            while not answered.is_set():
                connection, _ = listener.accept()
                kept.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        wait_until(lambda: len(kept) >= 6, links.watch)
        answered.set()
        tcp.create_connection((host, int(port))).close()
        thread.join()
    for connection in kept:
        connection.close()
    links.serve("experience", address, None if has_keys else Security("replay"))
    until_joined(client, links.watch)


# What strangers cost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_keys", [False, True], ids=["plain", "keys"])
def test_server_with_an_unread_monitor_is_not_blocked_by_strangers(links: Links, has_keys: bool) -> None:
    address = free_address()
    server = links.serve("experience", address, None if has_keys else Security("replay"))
    host, port = address.removeprefix("tcp://").split(":")
    for _ in range(1_500):  # with ZMQ's limit of a thousand events, its own thread stood still at about 1,000
        with tcp.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(b"\xff" * 100)
    client = links.connect("experience", address, None if has_keys else Security("actor"))
    until_joined(client, links.client_monitor.check)
    sockets.send(client, Goodbye())
    assert server.poll(10_000)
    links.server_monitor.count(links.dropped)
    assert links.dropped == {"failed_handshake": 1_500}
