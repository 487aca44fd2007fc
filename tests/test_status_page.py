"""What a process tells at its status page, and what the supervisor makes of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import AddressConfig, Config
from apex_jax.config_rules import check
from apex_jax.errors import UsageError
from apex_jax.operations import status_page
from apex_jax.operations.status_page import StatusPage
from apex_jax.operations.watch import Watch
from apex_jax.process import StopSignal
from apex_jax.transport.status_link import StatusError, fetch
from tests.links import free_address, wait_until
from tests.processes import Programs, catch, free_tcp_addresses
from tests.test_status import Served


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(free_address())
    yield served
    served.server.close()


# The page of a process --------------------------------------------------------------------------------------------


def page_at(address: str, stop: StopSignal) -> StatusPage:
    config = Config(addresses=AddressConfig(status=address), run_directory="runs/x")
    return StatusPage(config, "learner", "learner", stop)


def test_page_tells_who_and_how_the_process_is() -> None:
    stop = StopSignal()
    with page_at(free_address(), stop) as page:
        page.report = lambda: {"counters": {"bad": np.int64(3)}, "rates": {"x": float("nan"), "y": np.float32(0.5)}}
        healthy, content = fetch(page._address, 5.0)
    assert healthy
    assert (content["role"], content["name"], content["run"], content["pid"]) == (
        "learner", "learner", "runs/x", os.getpid(),
    )  # fmt: skip
    assert content["versions"].keys() == {"apex_jax", "protocol", "jax", "pyzmq", "envpool"}
    assert content["counters"] == {"bad": 3}
    assert content["rates"] == {"x": None, "y": 0.5}
    for name in ("memory_bytes", "file_descriptors", "threads"):
        assert content[name] > 0


def test_process_whose_loop_does_not_turn_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_page, "STARTING_SECONDS", 0.0)
    stop = StopSignal()
    with page_at(free_address(), stop) as page:
        assert fetch(page._address, 5.0)[0]
        monkeypatch.setattr(status_page, "STUCK_SECONDS", 0.05)
        wait_until(lambda: not fetch(page._address, 5.0)[0])
        monkeypatch.setattr(status_page, "STUCK_SECONDS", 60.0)
        before = fetch(page._address, 5.0)[1]["progress_age_seconds"]
        stop.beat()
        assert fetch(page._address, 5.0)[1]["progress_age_seconds"] < before


def test_process_that_compiles_in_its_first_minutes_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_page, "STUCK_SECONDS", 0.0)
    with page_at(free_address(), StopSignal()) as page:
        assert fetch(page._address, 5.0)[0]


def test_without_an_address_there_is_no_page() -> None:
    with page_at("", StopSignal()) as page:
        assert page._server is None


@pytest.mark.parametrize(
    ("address", "is_told"), [("tcp://127.0.0.1", False), ("tcp://*", True), ("tcp://0.0.0.0", True)]
)
def test_page_that_others_can_reach_is_told(caplog: pytest.LogCaptureFixture, address: str, is_told: bool) -> None:
    port = free_address().rpartition(":")[2]
    with page_at(f"{address}:{port}", StopSignal()):
        assert fetch(f"tcp://127.0.0.1:{port}", 5.0)[0]
    assert ("is shown to whoever reaches that address" in caplog.text) == is_told


@pytest.mark.parametrize("address", ["http://127.0.0.1:80", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:5550"])
def test_status_address_is_checked_like_the_others(address: str) -> None:
    with pytest.raises(UsageError, match=r"addresses\.\w+=.*must|is used twice"):
        check(Config(addresses=AddressConfig(status=address)))


# The watch of the supervisor --------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("POLL_SECONDS", 0.02),
        ("ANSWER_SECONDS", 0.2),
        ("STARTING_SECONDS", 0.0),
        ("STUCK_SECONDS", 0.1),
    ):
        monkeypatch.setattr(f"apex_jax.operations.watch.{name}", seconds)


@pytest.mark.usefixtures("quick")
def test_watch_finds_the_role_that_is_silent_and_the_one_that_stands_still(served: Served) -> None:
    watch = Watch({"learner": served.address, "replay": free_address(), "actor-0": "", "evaluator": free_address()})
    watch.start()
    for name in ("learner", "replay", "actor-0"):
        watch.started(name)
    wait_until(lambda: watch.fault("replay")[0])
    assert "has not answered for" in watch.fault("replay")[0]
    assert watch.fault("replay")[1] > 0
    wait_until(lambda: "learner" in watch.reports)
    assert [watch.fault(name) for name in ("learner", "actor-0", "evaluator")] == 3 * [("", 0.0)]
    served.healthy, served.content = False, {"role": "learner", "progress_age_seconds": 77.0}
    wait_until(lambda: watch.fault("learner") == ("has made no progress for 77 s", 77.0))
    watch.ended("learner")
    assert watch.fault("learner") == ("", 0.0)
    served.healthy = True
    watch.started("learner")
    wait_until(lambda: "learner" in watch.reports)
    assert watch.fault("learner") == ("", 0.0)
    watch.close()


@pytest.mark.usefixtures("quick")
def test_time_in_which_the_supervisor_itself_stood_still_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apex_jax.operations.watch.STARTING_SECONDS", 1000.0)
    watch = Watch({"replay": free_address()})
    watch.started("replay")
    watch._ask("replay", 2.0, watch._started["replay"])
    assert watch._silent_seconds["replay"] == 2.0
    started = watch._started["replay"] = watch._started["replay"] - 5000.0  # as after a suspension
    watch.start()
    wait_until(lambda: watch._silent_seconds["replay"] > 2.0)
    assert watch._started["replay"] == started
    assert watch._silent_seconds["replay"] < 100.0
    assert watch.fault("replay") == ("", 0.0)
    watch.close()


# Real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_whole_run_and_each_role_tell_their_status(tmp_path: Path) -> None:
    address, directory = free_address(), tmp_path / "run"
    with Programs(tmp_path) as programs:
        local = programs.start(*catch(directory, "total_updates=100000000", f"addresses.status={address}"))

        def reports() -> dict[str, Any]:
            try:
                return dict(fetch(address, 5.0)[1].get("reports", {}))
            except StatusError:
                return {}

        peers = {
            "replay": lambda told: len(told["actors"]) == 1 and told["learner"] is not None,
            "learner": lambda told: told == {"replay": "joined", "weights_clients": 2},
            "actor-0": lambda told: told == {"replay": "joined", "learner": "joined"},
            "evaluator": lambda told: told == {"learner": "joined"},
        }

        def is_complete(found: dict[str, Any]) -> bool:
            told = [found.get(name, {}) for name in peers]
            return all(map(lambda one: "peers" in one and any(one["metrics"].values()), told)) and all(
                has_all(found[name]["peers"]) for name, has_all in peers.items()
            )

        local.wait_until(lambda: is_complete(reports()))
        found = reports()
        assert found["learner"]["updates"] > 0
        assert all(report["healthy"] and report["memory_bytes"] > 2**20 for report in found.values())
        assert {report["role"] for report in found.values()} == {"replay", "learner", "actor", "evaluator"}
        asked = programs.start("status", address)
        assert asked.exit_code() == 0
        assert "local (local, pid " in asked.stdout
        assert "reports.learner.updates" in asked.stdout


def test_command_says_in_one_line_that_nobody_answers(tmp_path: Path) -> None:
    with Programs(tmp_path) as programs:
        silent, wrong = programs.start("status", free_address()), programs.start("status", "nonsense")
        assert silent.exit_code() == 1
        assert silent.stderr.startswith("error: tcp://127.0.0.1:")
        assert silent.stderr.count("\n") == 1
        assert wrong.exit_code() == 2
        assert wrong.stderr.startswith("error: nonsense: give tcp://HOST:PORT")


def test_status_port_in_use_ends_the_role_in_one_line(tmp_path: Path) -> None:
    with Programs(tmp_path) as programs, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"addresses.status=tcp://127.0.0.1:{taken.getsockname()[1]}"
        program = programs.start("--role", "actor", *catch(tmp_path / "run", *free_tcp_addresses(), address))
        assert program.exit_code() == 1
        assert address in program.stderr
        assert "Traceback" not in program.stderr
