"""Faults 27 to 29: what strangers send to the ports of a replay server, and who is kept out, with real processes."""

from __future__ import annotations

import os
import random
import shutil
import socket as tcp
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.transport import keys, sockets
from apex_jax.transport.messages import ActorHello, ActorWelcome, Goodbye, LearnerHello, LearnerWelcome, Rejoin
from apex_jax.transport.security import link_context
from tests.rigs.links import Peer
from tests.rigs.processes import ROOT, Program, Programs, catch, free_tcp_addresses, values

NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(55, b"\0")  # ZMTP 3.0, whole
GROWTH_BYTES = 48 * 2**20  # that a server's memory may move by on its own

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts open files with /proc")


class Served:
    """A replay server process, and peers of it by hand."""

    def __init__(self, programs: Programs, directory: Path, keys_directory: str) -> None:
        self.directory = directory
        settings = [*free_tcp_addresses(), *([f"security.keys={keys_directory}"] if keys_directory else [])]
        self.config: Config = load(ROOT / "configs" / "catch.yaml", settings)
        self.program = programs.start("--role", "replay", *catch(directory, *settings))
        self.program.wait_until(lambda: "replay of " in self.program.stderr, 90)  # Python and its libraries are loaded
        self._contexts = {role: link_context(self.config, role) for role in ("actor", "learner")}
        self._peer_id = 0
        self.is_sound()

    def address(self, link: str) -> str:
        return self.config.addresses.of_link(link)[0]

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
            actor.send(Goodbye(self._peer_id))
            learner.send(LearnerHello(self._peer_id, self.config.compatibility_key, 0, 1, 8))
            learner.receive(LearnerWelcome)
            learner.send(Goodbye(self._peer_id))
        finally:
            actor.socket.close()
            learner.socket.close()

    def connection(self, link: str) -> tcp.socket:
        host, _, port = self.address(link).removeprefix("tcp://").rpartition(":")
        return tcp.create_connection((host, int(port)), timeout=20)

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.program.process.pid}/fd"))

    def resident_bytes(self) -> int:
        statm = Path(f"/proc/{self.program.process.pid}/statm").read_text()
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def dropped(self, reason: str) -> float:
        return max(values(self.directory, "replay", f"replay/dropped_{reason}"), default=0.0)

    def close(self) -> None:
        for context in self._contexts.values():
            context.term()

    def _lives(self) -> None:
        assert self.program.process.poll() is None, self.program.stderr


@pytest.fixture(scope="module", params=["plain", "keys"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    keys.create(folder / "keys")
    with Programs(folder) as programs:
        served = Served(programs, folder / "run", str(folder / "keys") if request.param == "keys" else "")
        yield served
        served.close()


# Fault 27: connections that are none ------------------------------------------------------------------------------


@needs_proc
def test_fault_27_garbage_and_http_do_not_change_a_server(served: Served) -> None:
    rng = random.Random(27)
    served.is_sound()
    files, memory = served.open_files(), served.resident_bytes()
    for number in range(600):
        with served.connection(("experience", "sampling")[number % 2]) as stranger:
            http = b"GET / HTTP/1.1\r\nHost: replay\r\n\r\n"
            try:
                stranger.sendall(http if number % 3 == 0 else rng.randbytes(rng.choice((1, 64, 4096))))
                if number % 5 == 0:
                    stranger.recv(4096)
            except ConnectionError:
                continue  # already shown the door
    served.is_sound()
    served.program.wait_until(lambda: served.open_files() <= files)
    assert served.resident_bytes() - memory < GROWTH_BYTES


# Fault 28: messages that are too large ----------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["experience", "sampling"])
def test_fault_28_message_of_two_gigabytes_is_refused_before_it_arrives(served: Served, link: str) -> None:
    memory = served.resident_bytes()
    for _ in range(20):
        with served.connection(link) as stranger:
            ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
            announced = b"\x02" + struct.pack(">Q", 2**31) + bytes(1000)
            try:
                stranger.sendall(NULL_GREETING + b"\x04" + bytes([len(ready)]) + ready + announced)
                while stranger.recv(4096):
                    pass
            except ConnectionError:
                pass
    assert served.resident_bytes() - memory < GROWTH_BYTES
    served.is_sound()


@pytest.mark.parametrize("link", ["experience", "sampling"])
def test_fault_28_authorized_peer_cannot_send_larger_messages_than_the_run_has(served: Served, link: str) -> None:
    memory, peer = served.resident_bytes(), served.peer(link)
    peer.send(Rejoin())
    with peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as events:
        peer.send_frames(bytes(2**20))  # a segment of Catch has some 7 kB at most, the priorities of a draw less
        assert events.poll(20_000), "the server cuts the connection"
        peer.socket.disable_monitor()
    peer.socket.close()
    served.is_sound()
    assert served.resident_bytes() - memory < GROWTH_BYTES


# Fault 29: keys ---------------------------------------------------------------------------------------------------


class Folders:
    """Folders of keys: sound ones, and some with others in their place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        keys.create(folder / "sound")
        keys.create(folder / "foreign")

    def sound(self) -> str:
        return str(self._folder / "sound")

    def with_pair(self, role: str, source: str, source_role: str) -> str:
        """Where `role` has the key pair of another role, or of the same in another folder."""
        copy = shutil.copytree(self._folder / "sound", self._folder / f"{role}-as-{source}-{source_role}")
        for kind in ("secret", "public"):
            shutil.copy(self._folder / source / f"{source_role}.{kind}", copy / f"{role}.{kind}")
        return str(copy)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_run_over_encrypted_links_learns_to_its_end(programs: Programs, folders: Folders, tmp_path: Path) -> None:
    settings = [*free_tcp_addresses(), f"security.keys={folders.sound()}", "total_updates=200"]
    roles = [
        programs.start("--role", role, *catch(tmp_path / "run", *settings)) for role in ("learner", "replay", "actor")
    ]
    for program in roles:
        assert program.exit_code(100) == 0, program.stderr
        assert "links over tcp are encrypted" in program.stderr
        assert "WARNING" not in program.stderr


def error_of(program: Program) -> str:
    """Returns the reason that a process ended with, which must have been told before."""
    assert program.exit_code(100) == 1, program.stderr
    assert "Traceback" not in program.stderr
    last = program.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    hint = last.removeprefix("error: ").rpartition(" (tried for")[0]
    assert hint in program.stderr.partition(last)[0], "it was said when it was first known"
    return last


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_fault_29_learner_with_the_key_of_an_actor_draws_nothing(
    programs: Programs, folders: Folders, tmp_path: Path
) -> None:
    served = Served(programs, tmp_path / "run", folders.sound())
    addresses = [f"addresses.{link}={served.address(link)}" for link in ("experience", "sampling", "weights")]
    path = folders.with_pair("learner", "sound", "actor")
    learner = programs.start("--role", "learner", *catch(tmp_path / "false", *addresses, f"security.keys={path}"))
    assert "refused the key of this learner" in error_of(learner)
    served.program.wait_until(lambda: served.dropped("refused_key") > 0)
    served.is_sound()
    served.close()


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_fault_29_evaluator_that_the_learner_does_not_know_gets_no_weights(
    programs: Programs, folders: Folders, tmp_path: Path
) -> None:
    sound, addresses = f"security.keys={folders.sound()}", free_tcp_addresses()
    path = folders.with_pair("evaluator", "foreign", "evaluator")
    programs.start("--role", "replay", *catch(tmp_path / "replay", *addresses, sound))  # or there are no metrics
    learner = programs.start("--role", "learner", *catch(tmp_path / "run", *addresses, sound))
    evaluator = programs.start("--role", "evaluator", *catch(tmp_path / "x", *addresses, f"security.keys={path}"))
    assert "the learner at tcp://" in error_of(evaluator)
    assert "refused the key of this evaluator" in evaluator.stderr
    learner.wait_until(lambda: values(tmp_path / "run", "learner", "replay/dropped_refused_key"))
    assert "connections refused on the weights link" in learner.stderr


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_fault_29_actor_with_keys_refuses_a_server_without_keys(
    programs: Programs, folders: Folders, tmp_path: Path
) -> None:
    addresses = free_tcp_addresses()
    programs.start("--role", "replay", *catch(tmp_path / "run", *addresses))
    sound = f"security.keys={folders.sound()}"
    actor = programs.start("--role", "actor", *catch(tmp_path / "actor", *addresses, sound))
    assert "has no keys, this actor has: set security.keys=DIR there too" in error_of(actor)


def test_fault_29_secret_that_others_can_read_is_wrong_usage(
    programs: Programs, folders: Folders, tmp_path: Path
) -> None:
    secret = Path(folders.sound(), "actor.secret")
    secret.chmod(0o644)
    program = programs.start("--role", "actor", *catch(tmp_path / "run", f"security.keys={folders.sound()}"))
    assert program.exit_code() == 2
    assert program.stderr == f"error: {secret}: mode 0644 lets others read this secret; run: chmod 600 {secret}\n"


@pytest.mark.long
def test_fault_29_address_beyond_this_machine_without_keys_is_wrong_usage_or_a_warning_if_insecure(
    programs: Programs, tmp_path: Path
) -> None:
    addresses = free_tcp_addresses()
    everywhere = addresses[0].replace("127.0.0.1", "0.0.0.0")
    refused = programs.start("--role", "replay", *catch(tmp_path / "refused", *addresses, everywhere))
    assert refused.exit_code() == 2
    assert refused.stderr.startswith(f"error: {everywhere} leaves this machine and there are no keys")
    assert "python main.py keys create DIR" in refused.stderr
    insecure = "security.insecure=true"
    allowed = programs.start("--role", "replay", *catch(tmp_path / "run", *addresses, everywhere, insecure))
    allowed.wait_until(lambda: "replay of " in allowed.stderr)
    assert f"WARNING replay: INSECURE: {everywhere.partition('=')[2]} without keys" in allowed.stderr
