"""What plots read of a run: curves, groups of seeds, and files of many runs, which are read like their directories."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from apex_jax.config.load import load
from apex_jax.host.errors import UsageError
from apex_jax.plotting.curves import grouped, held, read_packed, read_run, steps
from apex_jax.plotting.plot import groups_of
from apex_jax.run.metrics import MetricsWriter
from results.publish import pack
from tests.rigs.runs import RETURN, START, make_run, plain_run, write_lines


def test_evaluation_has_the_frames_of_its_weights_and_the_minutes_of_its_end(tmp_path: Path) -> None:
    make_run(tmp_path, [])
    write_lines(tmp_path / "metrics" / "evaluator.jsonl", [(90.0, 0.9, {RETURN: -20.0}), (120.0, 1.5, {RETURN: None})])
    read = read_run(tmp_path)
    assert read.task == "Pong-v5"
    assert [list(values) for values in read.evaluation] == [[900_000.0], [1.5], [-20.0]]


def test_training_games_are_one_curve_for_each_band_of_epsilon(tmp_path: Path) -> None:
    make_run(tmp_path, [1.0])
    tag = "charts/episodic_return_epsilon_"
    lines = [(6.0, 0.1, {f"{tag}below_0.01": -21.0, f"{tag}above_0.2": -20.0}), (12.0, 0.2, {f"{tag}above_0.2": -19.0})]
    write_lines(tmp_path / "metrics" / "replay.jsonl", lines)
    training = read_run(tmp_path).training
    returns = {band: list(curve.returns) for band, curve in training.items()}
    assert returns == {"epsilon_below_0.01": [-21.0], "epsilon_above_0.2": [-20.0, -19.0]}
    assert list(training["epsilon_above_0.2"].minutes) == pytest.approx([0.1, 0.2])


def test_pause_between_two_starts_takes_no_minutes(tmp_path: Path) -> None:
    make_run(tmp_path, [], starts=(START, START + 1000))
    lines = [(60.0, 1.0, {RETURN: 1.0}), (120.0, 1.0, {}), (1060.0, 2.0, {RETURN: 2.0})]
    write_lines(tmp_path / "metrics" / "evaluator.jsonl", lines)
    assert list(read_run(tmp_path).evaluation.minutes) == pytest.approx([1.0, 3.0])


def test_updates_lost_with_a_killed_start_are_not_in_the_curve(tmp_path: Path) -> None:
    make_run(tmp_path, [])
    points = zip((1.0, 2.0, 3.0, 2.2, 2.5), (-20.0, -10.0, 0.0, -9.0, -5.0), strict=True)
    lines = [(60.0 * i, frames, {RETURN: value}) for i, (frames, value) in enumerate(points, 1)]
    write_lines(tmp_path / "metrics" / "evaluator.jsonl", lines)
    curve = read_run(tmp_path).evaluation
    assert list(curve.returns) == [-20.0, -10.0, -9.0, -5.0]
    assert list(curve.minutes) == [1.0, 2.0, 4.0, 5.0]


def test_run_without_starts_or_config_is_read_from_its_first_line_on(tmp_path: Path) -> None:
    make_run(tmp_path, [1.0, 2.0])
    for name in ("starts.jsonl", "config.yaml"):
        (tmp_path / name).unlink()
    read = read_run(tmp_path)
    assert (read.task, dict(read.settings), list(read.evaluation.minutes)) == ("?", {}, [0.0, 1.0])


def test_runs_that_differ_in_their_seed_are_one_group_and_others_are_named_by_what_differs(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path / name, [1.0], overrides))
        for name, overrides in {
            "a1": ("seed=1",),
            "a2": ("seed=2",),
            "b1": ("seed=1", "replay.priority_exponent=0", "evaluator.checkpoint=x"),
            "b2": ("seed=2", "replay.priority_exponent=0", "addresses.weights=ipc://y"),
        }.items()
    ]
    groups = grouped(runs)
    assert [group.label for group in groups] == ["priority_exponent=0.6", "priority_exponent=0.0"]
    assert [list(group.runs) for group in groups] == [runs[:2], runs[2:]]
    assert [group.label for group in grouped(runs[:2])] == ["all runs"]
    assert [group.label for group in grouped(runs[:1])] == [str(tmp_path / "a1")], "one run is not all runs"
    other_game = read_run(make_run(tmp_path / "c", [1.0], ("environment.task=Boxing-v5",)))
    assert [list(group.runs) for group in grouped([runs[0], other_game])] == [[runs[0], other_game]]


def test_value_of_a_curve_is_valid_until_the_next_one(tmp_path: Path) -> None:
    curve, late = plain_run([1.0, 2.0, 3.0]).evaluation, plain_run([5.0, 6.0]).evaluation
    late = late._replace(minutes=np.array([1.5, 2.5]))
    grid = steps([curve, late], "minutes")
    assert list(grid) == [1.5, 2.0, 2.5]
    assert list(held(curve, "minutes", grid)) == [1.0, 2.0, 2.0]
    assert list(held(late, "minutes", grid)) == [5.0, 5.0, 6.0]
    assert list(steps([curve, late], "minutes", most=2)) == [1.5, 2.5]
    assert steps([curve, curve._replace(minutes=np.array([9.0, 9.5, 10.0]))], "minutes").size == 0


def test_run_with_settings_that_are_now_refused_is_drawn(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", [1.0, 2.0])
    config = directory / "config.yaml"
    config.write_text(config.read_text().replace("frame_size: 84", "frame_size: 85"))
    with pytest.raises(UsageError, match="frame_size=84 or 92"):
        load(config)
    assert read_run(directory).settings["environment.frame_size"] == 85


@pytest.mark.parametrize("jumps", [{5: -3600.0}, {5: 3600.0}, {3: -3600.0, 5: 3600.0}], ids=["back", "forward", "both"])
def test_clock_that_is_set_during_a_run_moves_no_point_of_its_curve(
    jumps: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for name, jumps_of_run in (("steady", {}), ("set", jumps)):
        clock = SimpleNamespace(wall=START, passed=0.0)
        monkeypatch.setattr("time.time", lambda clock=clock: clock.wall)
        monkeypatch.setattr("time.monotonic", lambda clock=clock: clock.passed)
        writer = MetricsWriter(str(tmp_path / name), "evaluator")
        for minute in range(1, 10):
            clock.passed += 60
            clock.wall += 60 + jumps_of_run.get(minute, 0.0)
            writer.write(1000 * minute, {RETURN: float(minute)})
        monkeypatch.undo()
        runs.append(read_run(tmp_path / name).evaluation)
    for steady, moved in zip(*runs, strict=True):
        np.testing.assert_allclose(moved, steady)


# Packed runs ------------------------------------------------------------------------------------------------------


def test_packed_runs_equal_the_runs_of_their_directories(tmp_path: Path) -> None:
    made = [make_run(tmp_path / name, [1.0, float(seed)], (f"seed={seed}",)) for seed, name in enumerate("ab")]
    line = (START + 1, 4.0, {"charts/episodic_return_epsilon_below_0.01": 3.0})
    write_lines(made[1] / "metrics" / "actor-0.jsonl", [line])
    pack(made, tmp_path / "both.jsonl")
    for packed, directory in zip(read_packed(tmp_path / "both.jsonl"), made, strict=True):
        expected = read_run(directory)
        assert packed.directory == directory.name
        assert (packed.task, packed.settings, packed.method) == (expected.task, expected.settings, expected.method)
        curves = [[run.evaluation, *run.training.values()] for run in (packed, expected)]
        for curve, other in zip(*curves, strict=True):
            np.testing.assert_array_equal(curve, other)
    [group] = groups_of([str(tmp_path / "both.jsonl")])
    assert len(group.runs) == 2
    [named] = groups_of([f"x={tmp_path / 'both.jsonl'}"])
    assert named.label == "x"


@pytest.mark.parametrize("line", [
    "{}", "[]", "", "{", "[" * 2000, '{"name":"a","config":3,"starts":[],"changes":[],"metrics":{}}',
])  # fmt: skip
def test_invalid_line_of_a_packed_file_is_a_one_line_error(tmp_path: Path, line: str) -> None:
    pack([make_run(tmp_path / "a", [1.0, 2.0])], tmp_path / "x.jsonl")
    with open(tmp_path / "x.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError, match=r"x\.jsonl: line 2 "):
        read_packed(tmp_path / "x.jsonl")


def test_file_without_a_run_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"x\.jsonl"):
        read_packed(tmp_path / "x.jsonl")
