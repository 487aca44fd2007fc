"""Faults 27 to 29: what strangers send to the ports of a replay server, and who is kept out, with real processes."""

from __future__ import annotations

import random
import re
import shutil
import socket as tcp
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.transport import keys, sockets
from apex_jax.transport.messages import ActorHello, ActorWelcome, Goodbye, LearnerHello, LearnerWelcome, Rejoin
from apex_jax.transport.security import LinkContext, security_of
from tests.fuzz.tcp import GREETING, frame, ready
from tests.rigs.links import Peer
from tests.rigs.processes import ROOT, Program, Programs, Resources, catch, free_tcp_addresses, resources_of, wait_until

GROWTH_BYTES = 48 * 2**20  # that a server's memory may move by on its own

GIVEN_UP_SECONDS = 15
LOADED_SECONDS = 120.0  # on such a machine, with nothing compiled


class Served:
    """A replay server process, and peers of it by hand."""

    def __init__(self, programs: Programs, directory: Path, keys_directory: Path) -> None:
        self.directory = directory
        settings = [*free_tcp_addresses(), f"security.keys={keys_directory}"]
        self.config: Config = load(ROOT / "configs" / "catch.yaml", settings)
        self.program = programs.start("--role", "replay", *catch(directory, *settings))
        self.program.wait_until(lambda: "replay of " in self.program.stderr, LOADED_SECONDS)
        self._contexts = {role: LinkContext.of(security_of(self.config, role)) for role in ("actor", "learner")}
        self._peer_id = 0
        self.is_sound()

    def address(self, link: str) -> str:
        return getattr(self.config.addresses, link)

    def peer(self, link: str) -> Peer:
        connect = {"experience": sockets.connect_experience, "sampling": sockets.connect_sampling}[link]
        role = {"experience": "actor", "sampling": "learner"}[link]
        return Peer(connect(self._contexts[role], self.address(link)), self._lives)

    def is_sound(self) -> None:
        """Fails unless the next good message on either link is answered."""
        self._peer_id += 1
        actor, learner = self.peer("experience"), self.peer("sampling")
        try:
            actor.send(ActorHello(self._peer_id, self.config.compatibility_key, num_environments=1))
            actor.receive(ActorWelcome)
            actor.send(Goodbye())
            learner.send(LearnerHello(self._peer_id, self.config.compatibility_key, 0, 1, 8))
            learner.receive(LearnerWelcome)
            learner.send(Goodbye())
        finally:
            actor.socket.close()
            learner.socket.close()

    def connection(self, link: str) -> tcp.socket:
        host, _, port = self.address(link).removeprefix("tcp://").rpartition(":")
        return tcp.create_connection((host, int(port)), timeout=20)

    def resources(self) -> Resources:
        resources = resources_of(self.program.process.pid)
        assert resources is not None, self.program.stderr
        return resources

    def close(self) -> None:
        for context in self._contexts.values():
            context.term()

    def _lives(self) -> None:
        assert self.program.process.poll() is None, self.program.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    keys.create(folder / "keys")
    with Programs(folder) as programs:
        served = Served(programs, folder / "run", folder / "keys")
        yield served
        served.close()


# Fault 27: connections that are none ------------------------------------------------------------------------------


def test_fault_27_garbage_and_http_do_not_change_a_server(served: Served) -> None:
    rng = random.Random(27)
    served.is_sound()
    before = served.resources()
    for number in range(600):
        with served.connection(("experience", "sampling")[number % 2]) as stranger:
            http = b"GET / HTTP/1.1\r\nHost: replay\r\n\r\n"
            with suppress(ConnectionError):  # it may be closed already
                stranger.sendall(http if number % 3 == 0 else rng.randbytes(rng.choice((1, 64, 4096))))
                if number % 5 == 0:
                    stranger.recv(4096)
    served.is_sound()
    served.program.wait_until(lambda: served.resources().fds <= before.fds)
    assert served.resources().memory_bytes - before.memory_bytes < GROWTH_BYTES


# Fault 28: messages that are too large ----------------------------------------------------------------------------


def test_fault_28_message_of_two_gigabytes_is_refused_before_it_arrives(served: Served) -> None:
    before = served.resources()
    for number in range(20):
        with served.connection(("experience", "sampling")[number % 2]) as stranger, suppress(ConnectionError):
            stranger.sendall(GREETING + ready(b"DEALER") + frame(bytes(1000), announced_bytes=2**31))
            while stranger.recv(4096):
                pass
    assert served.resources().memory_bytes - before.memory_bytes < GROWTH_BYTES
    served.is_sound()


@pytest.mark.parametrize("link", ["experience", "sampling"])
def test_fault_28_authorized_peer_cannot_send_larger_messages_than_the_run_has(served: Served, link: str) -> None:
    before, peer = served.resources(), served.peer(link)
    peer.send(Rejoin())
    with peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as events:
        peer.send_frames(bytes(2**20))  # a segment of Catch has some 7 kB at most, the priorities of a draw less
        assert events.poll(20_000), "the server cuts the connection"
        peer.socket.disable_monitor()
    peer.socket.close()
    served.is_sound()
    assert served.resources().memory_bytes - before.memory_bytes < GROWTH_BYTES


# Fault 29: keys ---------------------------------------------------------------------------------------------------


def check_refused(program: Program, hint: str) -> None:
    """Checks that a process logs a hint soon, and ends with it within GIVEN_UP_SECONDS."""
    wait_until(lambda: hint in program.stderr, LOADED_SECONDS)
    assert program.exit_code() == 1
    tried = re.search(r"^error: .* \(tried for (\d+) s\)$", program.stderr, re.MULTILINE)
    assert tried is not None, program.stderr
    assert int(tried[1]) <= GIVEN_UP_SECONDS
    assert program.stderr.count(hint) == 2, "when it was first known, and at the end"
    assert "Traceback" not in program.stderr


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_fault_29_actor_whose_keys_do_not_fit_the_server_has_a_hint_soon_and_ends(
    programs: Programs, tmp_path: Path
) -> None:
    sound, foreign = tmp_path / "sound", tmp_path / "foreign"
    keys.create(sound)
    keys.create(foreign)
    with_keys, without = free_tcp_addresses(), free_tcp_addresses()
    servers = [
        programs.start("--role", "replay", *catch(tmp_path / name, *addresses, f"security.keys={given}"))
        for name, addresses, given in (("with", with_keys, sound), ("without", without, ""))
    ]
    wait_until(lambda: all("replay of " in server.stderr for server in servers), LOADED_SECONDS)
    unknown = shutil.copytree(sound, tmp_path / "unknown")
    for kind in ("secret", "public"):
        shutil.copy(foreign / f"actor.{kind}", unknown)
    for addresses, given, hint in (
        (with_keys, "", "set security.keys=DIR here"),
        (with_keys, str(foreign), "copy replay.public from there"),
        (with_keys, str(unknown), "put its public key into actor.public there"),
        (without, str(sound), "set security.keys=DIR there too"),
    ):
        directory = tmp_path / f"actor of {hint}"
        actor = programs.start("--role", "actor", *catch(directory, *addresses, f"security.keys={given}"))
        check_refused(actor, hint)
