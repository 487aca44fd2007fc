"""A process's status page and its heartbeats to systemd: it is healthy as long as its loop iterates."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import AddressConfig, Config
from apex_jax.config.command_line import parse
from apex_jax.operations import status_page
from apex_jax.operations.status_page import StatusPage, Watchdog
from apex_jax.process import StopSignal
from apex_jax.transport.status_link import StatusError, fetch
from tests.rigs.links import free_address, wait_until
from tests.rigs.processes import Programs, catch, free_tcp_addresses

# The page of a process --------------------------------------------------------------------------------------------


def page_at(address: str, stop: StopSignal) -> StatusPage:
    config = Config(addresses=AddressConfig(status=address), run_directory="runs/x")
    return StatusPage(config, "learner", "learner", stop)


def test_page_has_the_identity_and_the_state_of_the_process() -> None:
    address = free_address()
    with page_at(address, StopSignal()) as page:
        page.report = lambda: {"counters": {"bad": np.int64(3)}, "rates": {"x": float("nan"), "y": np.float32(0.5)}}
        healthy, content = fetch(address, 5.0)
    assert healthy
    assert (content["role"], content["name"], content["run"], content["pid"]) == (
        "learner", "learner", "runs/x", os.getpid(),
    )  # fmt: skip
    assert content["versions"].keys() == {"apex_jax", "protocol", "jax", "pyzmq", "envpool"}
    assert content["counters"] == {"bad": 3}
    assert content["rates"] == {"x": None, "y": 0.5}
    for name in ("memory_bytes", "file_descriptors", "threads"):
        assert content[name] > 0


def test_process_whose_main_loop_stands_still_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, address = StopSignal(), free_address()
    monkeypatch.setattr(status_page, "STUCK_SECONDS", 0.05)
    with page_at(address, stop):
        assert fetch(address, 5.0)[0], "it may compile in its first minutes"
        monkeypatch.setattr(status_page, "STARTING_SECONDS", 0.0)
        wait_until(lambda: not fetch(address, 5.0)[0])
        before = fetch(address, 5.0)[1]["progress_age_seconds"]
        stop.beat()
        assert fetch(address, 5.0)[1]["progress_age_seconds"] < before


@pytest.mark.parametrize(("host", "warnings"), [("127.0.0.1", 0), ("*", 1), ("0.0.0.0", 1)])
def test_page_that_other_machines_can_reach_is_logged(
    caplog: pytest.LogCaptureFixture, host: str, warnings: int
) -> None:
    port = free_address().rpartition(":")[2]
    with page_at(f"tcp://{host}:{port}", StopSignal()):
        assert fetch(f"tcp://127.0.0.1:{port}", 5.0)[0]
    assert len(caplog.records) == caplog.text.count(f"tcp://{host}:{port}") == warnings


# Real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_whole_run_and_each_role_serve_their_status(tmp_path: Path) -> None:
    address, directory = free_address(), tmp_path / "run"
    with Programs(tmp_path) as programs:
        local = programs.start(*catch(directory, "total_updates=100000000", f"addresses.status={address}"))

        def reports() -> dict[str, Any]:
            try:
                return dict(fetch(address, 5.0)[1].get("reports", {}))
            except StatusError:
                return {}

        peers = {
            "replay": lambda peers: len(peers["actors"]) == 1 and peers["learner"] is not None,
            "learner": lambda peers: peers == {"replay": "joined", "weights_clients": 2},
            "actor-0": lambda peers: peers == {"replay": "joined", "learner": "joined"},
            "evaluator": lambda peers: peers == {"learner": "joined"},
        }

        def is_complete(found: dict[str, Any]) -> bool:
            reports_found = [found.get(name, {}) for name in peers]
            return all(map(lambda one: "peers" in one and any(one["metrics"].values()), reports_found)) and all(
                has_all(found[name]["peers"]) for name, has_all in peers.items()
            )

        local.wait_until(lambda: is_complete(found := reports()) and found["learner"]["updates"] > 0)
        found = reports()
        assert all(report["healthy"] and report["memory_bytes"] > 2**20 for report in found.values())
        assert {report["role"] for report in found.values()} == {"replay", "learner", "actor", "evaluator"}
        asked = programs.start("status", address)
        assert asked.exit_code() == 0
        assert [line.split()[0] for line in asked.stdout.splitlines()[1:6]] == [
            "local",
            *(f"local/{name}" for name in found),
        ]


@pytest.mark.long
def test_status_port_in_use_ends_the_role_in_one_line(tmp_path: Path) -> None:
    with Programs(tmp_path) as programs, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"addresses.status=tcp://127.0.0.1:{taken.getsockname()[1]}"
        program = programs.start("--role", "actor", *catch(tmp_path / "run", *free_tcp_addresses(), address))
        assert program.exit_code() == 1
        assert address in program.stderr
        assert "Traceback" not in program.stderr


# Heartbeats of systemd --------------------------------------------------------------------------------------------


FIRST = b"WATCHDOG_USEC=30000000\nWATCHDOG=1"


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The end of status_page, which asks this process for signs of life."""
    name = str(tmp_path / "notify") if request.param == "file" else f"@apex-jax-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(name.replace("@", "\0"))
        end.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        monkeypatch.setenv("WATCHDOG_USEC", "300000000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        monkeypatch.setattr(status_page, "INTERVAL_SECONDS", 0.02)
        yield end


def receives_nothing(end: socket.socket) -> bool:
    end.settimeout(0.3)
    try:
        end.recv(100)
    except TimeoutError:
        return True
    return False


def test_a_healthy_process_shortens_the_limit_once_and_keeps_sending_heartbeats(manager: socket.socket) -> None:
    page = Watchdog(lambda: True)
    page.start()
    assert [manager.recv(100) for _ in range(4)] == [FIRST, b"WATCHDOG=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    page.close()
    while (message := manager.recv(100)) == b"WATCHDOG=1":
        pass
    assert message == b"WATCHDOG_USEC=300000000\nWATCHDOG=1", "the limit that the unit has"


def test_a_process_whose_loop_stands_still_sends_no_heartbeat(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(status_page, "STARTING_SECONDS", 0.0)
    monkeypatch.setattr(status_page, "STUCK_SECONDS", 0.2)
    stop = StopSignal()
    wait_until(lambda: stop.idle_seconds > 0.2)
    with StatusPage(parse([f"run_directory={tmp_path}"]).config, "replay", "replay", stop):
        assert receives_nothing(manager)
        stop.beat()  # as the loop does at each turn
        manager.settimeout(10)
        assert manager.recv(100) == FIRST
        while not receives_nothing(manager):
            manager.settimeout(10)


@pytest.mark.parametrize(("name", "value"), [("NOTIFY_SOCKET", ""), ("WATCHDOG_USEC", ""), ("WATCHDOG_PID", "1")])
def test_a_process_without_a_watchdog_of_its_own_sends_nothing(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    page = Watchdog(lambda: True)
    page.start()
    assert receives_nothing(manager)
    page.close()
