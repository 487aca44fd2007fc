"""Specification of the sockets: their options, and what strangers on the network can do to them."""

from __future__ import annotations

import ctypes
import socket as raw_sockets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq

from apex_jax.transport import sockets
from apex_jax.transport.messages import Goodbye, Rejoin
from apex_jax.transport.security import LINKS
from apex_jax.transport.sockets import LocalLinks
from apex_jax.types import MAX_SEGMENT_BYTES, MAX_WEIGHTS_BYTES, SegmentRecord
from tests.rigs.links import free_address, wait_until

SERVE = {link: partial(sockets.serve, link) for link in LINKS}
CONNECT = {link: partial(sockets.connect, link) for link in LINKS}
Make = Callable[[zmq.Context, str], zmq.Socket]


class Opened:
    """Opens sockets, and closes them after the test."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._ends: list[zmq.Socket] = []

    def __call__(self, make: Make, address: str = "") -> zmq.Socket:
        self._ends.append(make(self.context, address or free_address()))
        return self._ends[-1]

    def close(self) -> None:
        for end in self._ends:
            end.close(linger=0)
        self.context.term()


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    opened.close()


@pytest.fixture
def router(opened: Opened) -> zmq.Socket:
    return opened(SERVE["experience"])


def option(end: zmq.Socket, name: int) -> int:
    value = end.get(name)
    assert isinstance(value, int)
    return value


def address_of(end: zmq.Socket) -> str:
    address = end.get(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


# Options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*SERVE.values(), *CONNECT.values()])
def test_every_socket_has_limits_against_dead_peers_and_large_messages(opened: Opened, make: Make) -> None:
    end = opened(make)
    assert 0 < option(end, zmq.MAXMSGSIZE) <= MAX_WEIGHTS_BYTES + sockets.ENCRYPTION_BYTES
    assert 5_000 <= option(end, zmq.HANDSHAKE_IVL) <= 10_000
    assert option(end, zmq.TCP_KEEPALIVE) == 1
    assert option(end, zmq.TCP_KEEPALIVE_IDLE) + 3 * option(end, zmq.TCP_KEEPALIVE_INTVL) <= 10
    assert 0 < option(end, zmq.LINGER) <= (2_000 if make is CONNECT["experience"] else 1_000)
    assert 0 < option(end, zmq.TCP_MAXRT) <= 10_000
    assert option(end, zmq.CONNECT_TIMEOUT) > 0
    assert option(end, zmq.RECONNECT_IVL) < option(end, zmq.RECONNECT_IVL_MAX)
    assert option(end, zmq.IPV6) == 1
    assert option(end, zmq.HEARTBEAT_IVL) == 0, "they can end a process, see tests/faults/test_links.py"
    assert option(end, zmq.BACKLOG) >= 1024


@pytest.mark.parametrize("serve", [SERVE["experience"], SERVE["sampling"]])
def test_little_memory_is_used_for_a_peer_that_is_not_read(opened: Opened, serve: Make) -> None:
    server = opened(serve)
    peer = opened.context.socket(zmq.DEALER)
    peer.set(zmq.SNDHWM, 1)
    peer.connect(address_of(server))
    sent = 0
    while sent < 2 * sockets.UNREAD_MESSAGES and peer.poll(500, zmq.POLLOUT):
        peer.send(bytes(400_000))
        sent += 1
    peer.close(linger=0)
    assert sent < 2 * sockets.UNREAD_MESSAGES, "what the queue holds, and the buffers of the kernel"


@pytest.mark.parametrize("serve", [SERVE["experience"], SERVE["sampling"]])
def test_routing_ids_are_unpredictable(opened: Opened, serve: Make) -> None:
    identities = set()
    for _ in range(2):
        ctypes.CDLL(None).srand(1)  # as each process begins: whoever claims the next routing id has libzmq abort it
        server = opened(serve)
        peer = opened(CONNECT["experience"], address_of(server))
        wait_until(partial(sockets.send, peer, Goodbye()))
        assert server.poll(10_000)
        identities.add(server.recv_multipart()[0])
    assert len(identities) == 2


def test_each_socket_accepts_the_largest_message_of_its_link_and_none_larger(opened: Opened) -> None:
    for make in (SERVE["experience"], CONNECT["sampling"]):
        assert option(opened(make), zmq.MAXMSGSIZE) >= MAX_SEGMENT_BYTES
    small = sockets.SMALL_MESSAGE_BYTES + sockets.ENCRYPTION_BYTES
    assert option(opened(CONNECT["weights"]), zmq.MAXMSGSIZE) == MAX_WEIGHTS_BYTES + sockets.ENCRYPTION_BYTES
    assert option(opened(CONNECT["experience"]), zmq.MAXMSGSIZE) == small
    assert option(opened(SERVE["weights"]), zmq.MAXMSGSIZE) == small
    for serve in (SERVE["experience"], SERVE["sampling"]):
        end = opened(partial(serve, max_message_bytes=200_000))
        assert option(end, zmq.MAXMSGSIZE) == 200_000 + sockets.ENCRYPTION_BYTES


@pytest.mark.parametrize(("serve", "link"), [(serve, link) for link, serve in SERVE.items()])
def test_address_of_a_living_process_or_a_file_is_not_taken_over(
    opened: Opened, serve: Make, link: str, tmp_path: Path
) -> None:
    tcp, path = free_address(), tmp_path / "link"
    opened(serve, tcp)
    path.write_text("a file")
    for address in (tcp, f"ipc://{path}"):
        with pytest.raises(sockets.BindError, match=rf"addresses\.{link}={address} .*choose a free address"):
            opened(serve, address)
    assert path.read_text() == "a file"
    path.unlink()
    with raw_sockets.socket(raw_sockets.AF_UNIX) as killed:
        killed.bind(str(path))
    opened(serve, f"ipc://{path}")
    with pytest.raises(sockets.BindError, match=rf"addresses\.{link}=ipc://{path} "):
        opened(serve, f"ipc://{path}")


@pytest.mark.parametrize("length", [20, 71, 72, 200])
def test_the_links_of_one_machine_are_private_whatever_tmpdir_is_and_leave_nothing_behind(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        directory = Path(short, "x" * max(1, length - len(short) - 1))
        directory.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        links = LocalLinks()
        folder = Path(links.weights.removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder.parent == directory) == (length <= 71)
        addresses = (links.experience, links.sampling, links.weights)
        for serve, address in zip(SERVE.values(), addresses, strict=True):
            opened(serve, address)
        links.close()
        assert not folder.exists()


# Sending ----------------------------------------------------------------------------------------------------------


def test_send_to_an_absent_peer_returns_false(opened: Opened, router: zmq.Socket) -> None:
    assert not sockets.send(opened(CONNECT["experience"]), Rejoin())
    assert not sockets.send(router, Rejoin(), b"nobody")
    peer = opened(CONNECT["experience"], address_of(router))
    wait_until(lambda: sockets.send(peer, Goodbye()))
    router.poll(10_000)
    received = sockets.receive_from(router, (Goodbye,), Counter())
    assert received is not None
    assert sockets.send(router, Rejoin(), received[0])
    peer.close()
    wait_until(lambda: not sockets.send(router, Rejoin(), received[0]))


def test_send_to_a_peer_that_does_not_read_returns_false_in_the_end(opened: Opened, router: zmq.Socket) -> None:
    peer = opened(CONNECT["experience"], address_of(router))
    wait_until(lambda: sockets.send(peer, Goodbye()))
    large = SegmentRecord(1, 1, produced=0, transitions=0, body=bytes(2**14), crc=0)
    assert any(not sockets.send(peer, large) for _ in range(100_000))  # 1.6 GB, far beyond what any buffer takes


# Strangers --------------------------------------------------------------------------------------------------------


def test_receive_loop_ends_after_a_time_and_a_number_of_messages() -> None:
    times = iter(100.0 + 0.4 * sockets.READING_TURN_SECONDS * np.arange(9))  # each message takes 0.4 of a turn
    assert sum(1 for _ in sockets.reading_turn(lambda: next(times))) == 3
    assert sum(1 for _ in sockets.reading_turn(lambda: 100.0)) == sockets.MESSAGES_AT_ONCE
