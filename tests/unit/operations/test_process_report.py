"""The report of a process: what it does, how far it is and what is wrong; in files, over HTTP and in its log."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import AddressConfig, Config, LearnerConfig
from apex_jax.operations import process_report
from apex_jax.operations.diagnosis import PATIENCE_SECONDS
from apex_jax.operations.process_report import Heartbeats, ProcessReport
from apex_jax.operations.records import ProcessStatus, read_report, report_path
from apex_jax.process import SUPERVISED, StopSignal
from apex_jax.transport.http_link import StatusError, fetch
from tests.rigs.links import free_address, wait_until
from tests.rigs.processes import Programs, catch

CONFIG = Config(learner=LearnerConfig(batch_size=10))


def report_of(role: str = "learner", stop: StopSignal | None = None, **described: Any) -> ProcessReport:
    report = ProcessReport(CONFIG, role, role, stop or StopSignal())
    report.describe = lambda: described
    return report


def cells(report: ProcessReport, now: float) -> tuple[str, str, str]:
    return ProcessStatus("x", "x", json.loads(json.dumps(report.make(now))), "").cells


# What it shows ----------------------------------------------------------------------------------------------------

LEARNS = {"charts/updates_per_second": 277.125}
LOST = {"replay": "lost"}


def test_a_learner_shows_its_work_its_speed_its_progress_and_the_ages_of_what_it_saved() -> None:
    counts = {"updates": 12_345}
    report = report_of(
        counts=counts,
        metrics=LEARNS | {"storage/copy_age_seconds": 90.0},
        checkpoint={"updates": 12_000, "age_seconds": 61.5},
    )
    report.make(0.0)
    counts["updates"] += 1
    report.make(1.0)
    progress = "updates 12,346, 2 s ago; copy 90 s old; checkpoint 62 s old"
    assert cells(report, 3.0) == ("learns", "277.1 updates/s", progress)


def test_numbers_are_those_of_json() -> None:
    content = report_of(bad=np.int64(3), rates={"x": float("nan"), "y": np.float32(0.5)}).make(0.0)
    assert (content["bad"], content["rates"]) == (3, {"x": None, "y": 0.5})
    assert (content["role"], content["pid"]) == ("learner", os.getpid())
    assert content["versions"].keys() == {"apex_jax", "protocol", "jax", "pyzmq", "envpool"}
    assert all(content[name] > 0 for name in ("memory_bytes", "file_descriptors", "threads"))


# What is wrong ----------------------------------------------------------------------------------------------------


def test_every_problem_is_listed() -> None:
    keys = {"actor": "Permission denied"}
    content = report_of(peers=LOST, unreadable_keys=keys, errors=["runs/x was not saved"]).make(0.0)
    assert content["problems"] == [
        "is not connected to replay (lost)",
        "keys of actor cannot be read: Permission denied",
        "runs/x was not saved",
    ]
    assert report_of("replay", peers={"learner": None, "actors": [{}]}).make(0.0)["problems"] == ["has no learner"]


@pytest.mark.parametrize(("grown_at", "now", "problem"), [
    ({"updates": 10.0, "segments": 60.0}, 69.0, ""),
    ({"updates": 10.0, "segments": 80.0}, 85.0, "no updates for 75 s"),
    ({"updates": None, "segments": 10.0}, 85.0, "no segments for 75 s"),  # the replay no longer fills
    ({"updates": None, "segments": 90.0}, 91.0, ""),  # the replay fills
    ({"updates": None, "segments": None}, 90.0, ""),  # it starts
    ({"updates": None}, 301.0, "no updates since its start, 301 s ago"),
    ({"evaluations": 1.0}, 5000.0, ""),  # games are long
])  # fmt: skip
def test_counts_that_no_longer_grow_are_a_problem(grown_at: dict[str, float | None], now: float, problem: str) -> None:
    counts = dict.fromkeys(grown_at, 500)  # of a resumed run
    stop = StopSignal()
    report = report_of(stop=stop, counts=counts)
    report.make(0.0)
    for name, seconds in sorted(grown_at.items(), key=lambda each: each[1] or 0.0):
        if seconds is not None:
            counts[name] += 1
            report.make(seconds)
    assert report.make(now)["problems"] == ([problem] if problem else [])


def test_process_whose_main_loop_stands_still_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopSignal()
    report, started = report_of(stop=stop), time.monotonic()
    monkeypatch.setattr(process_report, "STUCK_SECONDS", 0.05)
    assert report.make(started)["healthy"], "it may compile in its first minutes"
    monkeypatch.setattr(process_report, "STARTING_SECONDS", 0.0)
    wait_until(lambda: not report.make(started)["healthy"])
    assert "no progress for 0 s" in report.make(started)["problems"]
    stop.beat()
    assert report.make(started)["healthy"]


def warnings_after(role: str, metrics: dict[str, float], counts: dict[str, int]) -> list[str]:
    """Returns the warnings once counts and metrics have grown for a while."""
    report = report_of(role, counts=counts, metrics=metrics)
    for now in (0.0, 1.0, 2 * PATIENCE_SECONDS):
        warnings = report.make(now)["warnings"]
        counts |= {name: number + 1 for name, number in counts.items()}
        metrics |= {tag: number + 1000 for tag, number in metrics.items() if tag == "ledger/stored"}
    return list(warnings)


def test_each_role_has_the_warnings_of_a_local_run() -> None:
    [warning] = warnings_after("learner", {"learner/wait_seconds_share": 0.9}, {"updates": 0})
    assert "the learner waits for batches 90% of the time" in warning
    metrics = {"ledger/stored": 0.0, "replay/samples_per_second": 20.0}
    [warning] = warnings_after("replay", metrics, {"batches": 0})
    assert "the learner is outrun" in warning
    assert "at 2 updates per second" in warning


# Where it goes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_report, "REPORT_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
def test_report_is_in_the_run_directory_from_the_first_turn_of_the_loop_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, path = StopSignal(), report_path(tmp_path, "learner-2")
    made = threading.Semaphore(0)
    with ProcessReport(Config(run_directory=str(tmp_path)), "learner", "learner-2", stop) as report:
        report.describe = lambda: made.release() or {"counts": {"updates": 7}}  # type: ignore[func-returns-value]
        for _ in range(3):
            assert made.acquire(timeout=10)
        assert list(tmp_path.iterdir()) == [], "a start may still be refused"
        stop.beat()
        wait_until(lambda: (read_report(path) or {}).get("progress", {}).get("updates", {}).get("count") == 7)
        path.unlink()
        path.with_suffix(".half").mkdir()  # nothing can be written
        wait_until(path.exists)
        assert read_report(path) is None
        monkeypatch.setattr(process_report, "STARTING_SECONDS", 0.0)
        monkeypatch.setattr(process_report, "STUCK_SECONDS", 0.0)  # the loop hangs while there is no room
        wait_until(lambda: not report.make(time.monotonic())["healthy"])
        path.unlink()
        for _ in range(6):
            assert made.acquire(timeout=10)
        assert not path.exists(), "its supervisor finds it silent"
        path.with_suffix(".half").rmdir()
        wait_until(lambda: read_report(path) is not None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("host", "warnings"), [("127.0.0.1", 0), ("*", 1), ("0.0.0.0", 1)])
def test_report_is_served_and_an_address_that_other_machines_can_reach_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, warnings: int
) -> None:
    port = free_address().rpartition(":")[2]
    config = Config(addresses=AddressConfig(status=f"tcp://{host}:{port}"), run_directory=str(tmp_path))
    with ProcessReport(config, "learner", "learner", StopSignal()) as report:
        assert fetch(f"tcp://127.0.0.1:{port}", 5.0)[0]
        report.describe = lambda: {"errors": ["full disk"]}
        wait_until(lambda: "full disk" in fetch(f"tcp://127.0.0.1:{port}", 5.0)[1]["problems"])
    assert len(caplog.records) == caplog.text.count(f"tcp://{host}:{port}") == warnings


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("supervised", [False, True])
def test_a_role_of_a_fleet_logs_its_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, supervised: bool
) -> None:
    monkeypatch.setattr(process_report, "LINE_SECONDS", 0.02)
    monkeypatch.setenv(SUPERVISED, "1" if supervised else "")
    counts, looks = {"frames": 1000}, []

    def read() -> dict[str, Any]:
        looks.append(counts["frames"])
        counts["frames"] += 1
        return {"counts": counts}

    with caplog.at_level(logging.INFO), report_of() as report:
        report.describe = read
        wait_until(lambda: len(looks) > 20)
    lines = [record.message for record in caplog.records]
    assert bool(lines) != supervised
    assert all(" 1,0" in line and " frames (+" in line and "(+0)" not in line for line in lines)


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

        local.wait_until(
            lambda: is_complete(found := reports()) and found["learner"]["progress"]["updates"]["count"] > 0
        )
        found = reports()
        assert all(report["healthy"] and report["memory_bytes"] > 2**20 for report in found.values())
        assert {report["role"] for report in found.values()} == {"replay", "learner", "actor", "evaluator"}
        asked = programs.start("status", address)
        assert asked.exit_code() == 0
        named = [line.split()[0] for line in asked.stdout.splitlines()[1:6]]
        assert named == ["local", *(f"local/{name}" for name in found)]


# Heartbeats of systemd --------------------------------------------------------------------------------------------


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
        yield end


def received(end: socket.socket) -> list[bytes]:
    end.settimeout(0.05)
    messages = []
    while True:
        try:
            messages.append(end.recv(100))
        except TimeoutError:
            return messages


def test_heartbeats_shorten_the_limit_once_are_sent_every_ten_seconds_and_give_the_limit_back(
    manager: socket.socket,
) -> None:
    heartbeats = Heartbeats()
    for now in (100.0, 101.0, 109.0, 110.0, 125.0):
        heartbeats.send(now)
    assert received(manager) == [FIRST, b"WATCHDOG=1", b"WATCHDOG=1"]
    heartbeats.close()
    assert received(manager) == [b"WATCHDOG_USEC=300000000\nWATCHDOG=1"], "the limit that the unit has"


@pytest.mark.usefixtures("quick")
def test_a_process_whose_loop_stands_still_sends_no_heartbeat(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_report, "STARTING_SECONDS", 0.0)
    monkeypatch.setattr(process_report, "STUCK_SECONDS", 0.2)
    stop = StopSignal()
    wait_until(lambda: stop.idle_seconds > 0.2)
    with report_of("replay", stop):
        assert received(manager) == []
        stop.beat()  # as the loop does at each turn
        manager.settimeout(10)
        assert manager.recv(100) == FIRST


@pytest.mark.parametrize(("name", "value"), [("NOTIFY_SOCKET", ""), ("WATCHDOG_USEC", ""), ("WATCHDOG_PID", "1")])
def test_a_process_that_systemd_does_not_watch_sends_nothing(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    heartbeats = Heartbeats()
    heartbeats.send(1.0)
    heartbeats.close()
    assert received(manager) == []
