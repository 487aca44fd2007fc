"""A process sends heartbeats to systemd as long as its loop iterates."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from apex_jax.config.command_line import parse
from apex_jax.operations import status_page, systemd
from apex_jax.operations.status_page import StatusPage
from apex_jax.operations.systemd import Watchdog
from apex_jax.process import StopSignal
from tests.rigs.processes import wait_until

FIRST = b"WATCHDOG_USEC=30000000\nWATCHDOG=1"


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The end of systemd, which asks this process for signs of life."""
    name = str(tmp_path / "notify") if request.param == "file" else f"@apex-jax-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(name.replace("@", "\0"))
        end.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        monkeypatch.setenv("WATCHDOG_USEC", "300000000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        monkeypatch.setattr(systemd, "INTERVAL_SECONDS", 0.02)
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
