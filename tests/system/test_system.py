"""The whole system: real processes that learn Catch, are interrupted, killed and restarted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from apex_jax.config.load import load
from apex_jax.process import SUPERVISED
from apex_jax.run.metrics import read_metrics
from apex_jax.run.provenance import read_starts
from tests.rigs.processes import ROOT, Program, Programs, catch, checkpoints, free_tcp_addresses, log, values

ROLES = ("replay", "learner", "actor-0", "evaluator")
UPDATES = 600  # of the finished run
ENDLESS = "total_updates=100000000"
LEAVING_SECONDS = 60  # 5 on a machine that is not busy; a role that takes 35 is killed, which is logged

pytestmark = pytest.mark.timeout(480)


class FinishedRun(NamedTuple):
    """The results of a run of configs/catch.yaml."""

    directory: Path
    exit_code: int
    stdout: str
    stderr: str
    left: dict[str, int]  # processes


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("finished")
    directory = folder / "run"
    with Programs(folder) as programs:
        program = programs.start(*catch(directory, f"total_updates={UPDATES}"))
        exit_code = program.exit_code()
        return FinishedRun(directory, exit_code, program.stdout, program.stderr, programs.living())


@pytest.fixture
def copy(finished: FinishedRun, tmp_path: Path) -> Path:
    """A run directory to resume in."""
    return Path(shutil.copytree(finished.directory, tmp_path / "run"))


def is_learning(directory: Path, name: str = "learner") -> bool:
    return any(updates > 0 for updates in values(directory, name, "charts/updates_per_second"))


# A run that nothing disturbs -------------------------------------------------------------------------------------


def test_run_ends_at_its_limit_with_a_checkpoint_an_evaluation_and_no_process(finished: FinishedRun) -> None:
    assert (finished.exit_code, finished.left) == (0, {})
    assert values(finished.directory, "learner", "learner/updates")[-1] == UPDATES
    assert values(finished.directory, "evaluator", "eval/updates")[-1] == UPDATES
    assert checkpoints(finished.directory)[-1] == UPDATES


@pytest.mark.parametrize(("name", "tags"), [
    ("replay", {"replay/size_transitions", "replay/actors", "charts/episodic_return", "replay/samples_per_insert"}),
    ("learner", {"losses/td_loss", "losses/q_values", "charts/updates_per_second", "replay/sample_age_seconds"}),
    ("actor-0", {"actor/steps_per_second", "actor/wait_seconds_share", "actor/weights_age_seconds"}),
    ("evaluator", {"eval/episodic_return", "eval/episodes", "eval/frames"}),
])  # fmt: skip
def test_each_process_writes_its_metrics(finished: FinishedRun, name: str, tags: set[str]) -> None:
    lines = read_metrics(finished.directory / "metrics" / f"{name}.jsonl")
    assert {tag for line in lines for tag in line} >= tags | {"system/resident_memory_bytes"}


def test_nothing_was_dropped(finished: FinishedRun) -> None:
    last = read_metrics(finished.directory / "metrics" / "replay.jsonl")[-1]
    dropped = {tag for tag, value in last.items() if tag.startswith("replay/dropped_") and value}
    assert dropped <= {"replay/dropped_stale_priority"}


def test_run_directory_has_the_configuration(finished: FinishedRun) -> None:
    kept = load(finished.directory / "config.yaml")
    given = load(ROOT / "configs" / "catch.yaml", ["processes=many"])
    changed = {"run_directory": str(finished.directory), "metrics_interval_seconds": 0.25, "total_updates": UPDATES}
    assert kept == given.replace(**changed, actor=replace(given.actor, processes=1))  # as the local run has chosen


def test_logs_have_info_lines_and_no_warning(finished: FinishedRun) -> None:
    assert finished.stderr == ""
    for name in ROLES:
        lines = log(finished.directory, name).splitlines()
        assert lines
        assert [line for line in lines if not re.match(rf"\d\d:\d\d:\d\d INFO {name}: ", line)] == []


def test_run_records_its_origin_and_is_plotted(finished: FinishedRun) -> None:
    (start,) = read_starts(finished.directory)
    assert (start["task"], start["seed"], start["accelerator"]) == ("Catch-v0", 1, None)
    assert (finished.directory / "curves.png").read_bytes()[:4] == b"\x89PNG"


def evaluations(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_finished_run_can_be_evaluated_again_and_records_each_game(copy: Path, programs: Programs) -> None:
    before = evaluations(copy)
    assert [statistics.fmean(each["returns"]) for each in before] == values(copy, "evaluator", "eval/episodic_return")
    program = programs.start("--role", "evaluator", f"checkpoint={copy}", "episodes=3")  # as the summary says
    assert program.exit_code() == 0
    result = re.match(r"Catch-v0: mean return ([\d.-]+), .* over 3 games", program.stdout)
    assert result is not None
    *old, again = evaluations(copy)
    assert old == before
    assert (again["updates"], len(again["returns"])) == (UPDATES, 3)
    assert statistics.fmean(again["returns"]) == pytest.approx(float(result[1]), abs=0.01)


# Started again ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_start_of_a_finished_run_makes_up_for_a_missing_last_evaluation_and_no_more(
    copy: Path, programs: Programs
) -> None:
    (copy / "metrics" / "evaluator.jsonl").unlink()
    for _ in range(2):
        program = programs.start(*catch(copy, f"total_updates={UPDATES}"))
        assert program.exit_code() == 0
        assert values(copy, "evaluator", "eval/updates") == [UPDATES]
    assert program.stdout.startswith(f"Finished:    {copy} has reached total_updates={UPDATES}")


@pytest.mark.ci
def test_catch_is_learned_until_an_evaluation_has_the_return_to_stop_at(programs: Programs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    program = programs.start(*catch(directory, ENDLESS, "evaluator.stop_at_return=0.9", "evaluator.interval_seconds=0"))
    assert program.exit_code() == 0
    assert "\nEnded:       evaluator.stop_at_return=0.9 " in program.stdout
    assert max(values(directory, "evaluator", "eval/episodic_return")) >= 0.9
    last = values(directory, "learner", "learner/updates")[-1]
    assert values(directory, "evaluator", "eval/updates")[-1] == checkpoints(directory)[-1] == last
    assert (directory / "curves.png").exists()


@pytest.mark.long
def test_diverged_run_ends_with_the_key_to_change_and_keeps_its_last_sound_checkpoint(
    copy: Path, programs: Programs
) -> None:
    diverging = programs.start(*catch(copy, "total_updates=100000", "learner.optimizer_epsilon=0"))
    assert diverging.exit_code() == 1
    assert "fatal: the loss is not finite" in diverging.stderr
    assert "raise learner.optimizer_epsilon (now 0" in diverging.stderr
    assert programs.living() == {}
    assert checkpoints(copy)[-1] == UPDATES


# Interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_run_goes_on_from_its_checkpoint_and_saves_when_it_is_interrupted(copy: Path, programs: Programs) -> None:
    def lines(name: str) -> int:
        return len(values(copy, name, "system/resident_memory_bytes"))

    before = {name: lines(name) for name in ROLES}
    program = programs.start(*catch(copy, ENDLESS))
    program.wait_until(lambda: all(lines(name) > before[name] for name in ROLES))  # all have loaded and compiled
    program.wait_until(lambda: values(copy, "learner", "learner/updates")[-1] > UPDATES)
    assert programs.living().keys() == {"local", *ROLES}
    program.send(signal.SIGINT)
    assert program.exit_code(LEAVING_SECONDS) == 130
    assert "did not end in time" not in program.stderr
    assert programs.living() == {}
    updates = values(copy, "learner", "learner/updates")
    assert min(updates[before["learner"] :]) >= UPDATES
    assert checkpoints(copy)[-1] == updates[-1] > UPDATES


@pytest.mark.ci
def test_fault_07_sigterm_to_every_process_loses_nothing(programs: Programs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    program = programs.start(*catch(directory, ENDLESS))
    program.wait_until(lambda: is_learning(directory))
    for process in programs.living().values():  # the supervisor as well, which then tells each role once more
        os.kill(process, signal.SIGTERM)
    assert program.exit_code(LEAVING_SECONDS) == 143
    assert "did not end in time" not in program.stderr
    assert programs.living() == {}
    assert checkpoints(directory) == [values(directory, "learner", "learner/updates")[-1]]


# Without a supervisor, and without films -------------------------------------------------------------------------


@pytest.mark.long
def test_fleet_without_a_supervisor_draws_curves_and_its_waiting_evaluator_names_the_alternative(
    programs: Programs, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    arguments = catch(directory, *free_tcp_addresses(), "total_updates=200")

    def start(role: str) -> Program:
        return programs.start("--role", role, *arguments, environment={SUPERVISED: ""})

    evaluator = start("evaluator")
    evaluator.wait_until(lambda: "give checkpoint=RUN_DIRECTORY" in evaluator.stderr)
    fleet = [evaluator, *(start(role) for role in ("replay", "learner", "actor"))]
    assert [program.exit_code(120.0) for program in fleet] == [0, 0, 0, 0]
    assert (directory / "curves.png").stat().st_size > 1000
    assert '"title": "Return over time"' in (directory / "report.html").read_text()
