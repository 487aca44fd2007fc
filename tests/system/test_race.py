"""The race against other packages: its clock, its files and its table, without the packages themselves."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import yaml

from apex_jax.config.command_line import parse
from benchmarks import race, race_peer


def run_with(folder: Path, evaluations: list[tuple[float, int, float]], began: float) -> Path:
    """Returns the directory of a peer's run with these evaluations: seconds, steps, mean return."""
    folder.mkdir(parents=True)
    (folder / "began.txt").write_text(str(began))
    (folder / "starts.jsonl").write_text(json.dumps({"time": began + 3.0, "task": "Other-v5", "seed": 1}) + "\n")
    (folder / "metrics").mkdir()
    lines = [
        {"time": began + seconds, "seconds": seconds, "step": step, "eval/episodic_return": mean}
        for seconds, step, mean in evaluations
    ]
    (folder / "metrics" / "evaluator.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_clock_stands_still_during_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    clock = race_peer.Clock(tmp_path, began=90.0)
    for _ in range(2):
        now[0] += 5  # of training
        clock.stop()
        now[0] += 60  # of the evaluation
        clock.write(1_000, 12.5)
    lines = [json.loads(line) for line in (tmp_path / "metrics" / "evaluator.jsonl").read_text().splitlines()]
    assert [line["seconds"] for line in lines] == [15.0, 20.0], "ten seconds of start-up count"
    assert [line["time"] - 90.0 for line in lines] == [15.0, 20.0]
    assert clock.seconds() == 20.0


def test_table_has_when_each_run_had_the_mark_and_where_the_runs_ended(tmp_path: Path) -> None:
    first = run_with(tmp_path / "a", [(5.0, 10, 1.0), (30.0, 90, 480.0), (60.0, 200, 400.0)], began=1_000.0)
    second = run_with(tmp_path / "b", [(6.0, 10, 1.0), (40.0, 100, 300.0)], began=2_000.0)
    path = tmp_path / "race.jsonl"
    path.write_text("".join(race.packed("sbx.PPO", run, "CartPole-v1") for run in (first, second)))
    [group] = race.groups_of(path)
    assert {run.task for run in group.runs} == {"CartPole-v1"}, "the peer's own name of the task does not matter"
    assert race.seconds_to(group.runs, 475) == [30.0, race.NEVER]
    assert race.table([group], 475).splitlines()[2] == "| sbx.PPO | 2 | 30, never | 350 (300 to 400) | 50 | 150 |"


def test_a_finished_run_is_not_repeated_and_a_failed_one_ends_the_race(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for _ in range(2):
        race.train(tmp_path / "run", [sys.executable, "-c", f"open({str(ran)!r}, 'a').write('x')"], "x", 1)
    assert ran.read_text() == "x"
    with pytest.raises(SystemExit, match="exit code 3"):
        race.train(tmp_path / "other", [sys.executable, "-c", "raise SystemExit(3)"], "x", 1)


def test_every_task_has_a_mark_our_command_and_peers_of_known_families() -> None:
    settings = yaml.safe_load((race.FOLDER / "race.yaml").read_text())
    families = {family for its in settings["environments"].values() for family in its["families"]}
    for task in (settings["defaults"] | values for values in settings["tasks"].values()):
        assert {"mark", "every", "apex_jax", "peers"} <= task.keys()
        assert {name.partition(".")[0] for name in task["peers"]} <= families
        for words in task["apex_jax"].values():
            parse(words)


def test_rates_of_the_zoo_that_fall_are_functions_of_the_remaining_share() -> None:
    assert race_peer.falling("lin_0.002")(0.25) == 0.0005
    assert race_peer.falling(0.002) == 0.002
