"""The race against other packages: its clock, its files and its table, without the packages themselves."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import yaml

from apex_jax.config.command_line import parse
from apex_jax.config.load import to_yaml
from apex_jax.plotting.curves import Group
from benchmarks import page, race, race_peer


def run_with(folder: Path, evaluations: list[tuple[float, int, float]], began: float, seed: int = 1) -> Path:
    """Returns the directory of a peer's run with these evaluations: seconds, steps, mean return."""
    folder.mkdir(parents=True)
    (folder / race.DONE).write_text(json.dumps({"began": began, "command": []}))
    (folder / "starts.jsonl").write_text(json.dumps({"time": began + 3.0, "task": "Other-v5", "seed": seed}) + "\n")
    (folder / "metrics").mkdir()
    lines = [
        {"time": began + seconds, "seconds": seconds, "step": step, "eval/episodic_return": mean, "eval/seconds": 2.0}
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


def test_clock_of_ours_in_one_process_stands_still_too(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a", [(10.0, 10, 1.0), (20.0, 20, 500.0)], began=1_000.0)
    for name in ("one", "many"):
        (run / "config.yaml").write_text(to_yaml(parse([f"processes={name}"]).config))
        race.publish(tmp_path / "race.jsonl", [(name, 1, run)], "CartPole-v1")
    seconds = [race.seconds_to(group.runs, 475) for group in race.groups_of(tmp_path / "race.jsonl")]
    assert seconds == [[16.0], [20.0]]


def test_table_has_when_each_run_had_the_mark_and_where_the_runs_ended(tmp_path: Path) -> None:
    first = run_with(tmp_path / "a", [(5.0, 10, 1.0), (30.0, 90, 480.0), (60.0, 200, 400.0)], began=1_000.0)
    second = run_with(tmp_path / "b", [(6.0, 10, 1.0), (40.0, 100, 300.5)], began=2_000.0, seed=2)
    path = tmp_path / "race.jsonl"
    race.publish(path, [("sbx.PPO", 1, first)], "CartPole-v1")
    race.publish(path, [("sbx.PPO", 2, second)], "CartPole-v1")  # of another call: the first run stays
    [group] = race.groups_of(path)
    assert {run.task for run in group.runs} == {"CartPole-v1"}, "the peer's own name of the task does not matter"
    assert race.seconds_to(group.runs, 475) == [30.0, race.NEVER]
    assert race.table([group], 475).splitlines()[2] == "| sbx.PPO | 2 | 30, never | 350.2 (300.5 to 400.0) | 50 | 150 |"


@pytest.mark.parametrize(("ours", "peer", "measured", "at_most", "met"), [
    ([20.0, 30.0], [50.0, 70.0], 25.0, 60.0, True),
    ([20.0, 30.0, 90.0], [25.0, 60.0, 26.0], 30.0, 26.0, False),
    ([race.NEVER, race.NEVER, 3.0], [9.0], None, 9.0, False),
    ([9.0], [race.NEVER], 9.0, None, True),
])  # fmt: skip
def test_target_is_the_fastest_peers_median_and_a_lost_race_is_missed(
    monkeypatch: pytest.MonkeyPatch,
    ours: list[float],
    peer: list[float],
    measured: float | None,
    at_most: float | None,
    met: bool,
) -> None:
    seconds = {f"{race.OURS}, one process": ours, "sb3.PPO": peer}
    monkeypatch.setattr(race, "seconds_to", lambda runs, _: seconds[runs])
    [target] = race.targets([Group(name, name) for name in seconds], 475).values()  # type: ignore[arg-type]
    assert target == {"measured": measured, "at_most": at_most, "met": met}
    assert "missed" in page.text_of(target) or met


def test_a_finished_run_is_not_repeated_a_failed_one_is_named_and_another_command_refused(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    command = [sys.executable, "-c", f"open({str(ran)!r}, 'a').write('x')"]
    assert all(race.train(tmp_path / "run", command, "x", 1) for _ in range(2))
    assert ran.read_text() == "x"
    assert not race.train(tmp_path / "other", [sys.executable, "-c", "raise SystemExit(3)"], "x", 1)
    with pytest.raises(SystemExit, match="of another command"):
        race.train(tmp_path / "run", [*command, "--minutes=2"], "x", 1)


def test_own_task_needs_our_settings_and_gets_the_limit_of_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["race", "gymnasium:my_file:MyEnv", "--ours", "--config cartpole", "--minutes", "5"]
    )
    task = yaml.safe_load((race.FOLDER / "race.yaml").read_text())["defaults"]
    [words] = race.ours(race.parsed(), task).values()
    assert {"environment.task=gymnasium:my_file:MyEnv", "total_minutes=5.0", "evaluator.episodes=20"} <= {*words}
    monkeypatch.setattr(sys, "argv", ["race", "gymnasium:my_file:MyEnv"])
    with pytest.raises(SystemExit, match="give --ours"):
        race.ours(race.parsed(), task)


def test_every_task_has_a_mark_our_command_and_peers_of_known_families() -> None:
    settings = yaml.safe_load((race.FOLDER / "race.yaml").read_text())
    families = {family for its in settings["environments"].values() for family in its["families"]}
    for task in settings["tasks"].values():
        assert {"mark", "every", "apex_jax", "peers"} <= task.keys()
        assert task["every"].keys() in ({"seconds"}, {"steps"})
        assert {name.partition(".")[0] for name in task["peers"]} <= families
        for words in task["apex_jax"].values():
            parse(words)


def test_rates_of_the_zoo_that_fall_are_functions_of_the_remaining_share() -> None:
    assert race_peer.falling("lin_0.002")(0.25) == 0.0005
    assert race_peer.falling(0.002) == 0.002
