"""What a run leaves to look at: where it came from, curves, groups of seeds, statistics, pictures, the plot command."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from apex_jax.command_line import load, to_yaml
from apex_jax.config import AddressConfig, Config
from apex_jax.errors import RunError, UsageError
from apex_jax.plotting import provenance
from apex_jax.plotting.curves import Curve, Group, Run, common_grid, grouped, held, read_run
from apex_jax.plotting.plot import draw_each_against_the_first, draw_groups, draw_run, running_mean, table
from apex_jax.plotting.plot_command import groups_of, run
from results import ablations

ROOT = Path(__file__).parent.parent
START = 1_000_000.0  # unix seconds
RETURN = "eval/episodic_return"


def make_run(
    directory: Path, returns: Sequence[float], overrides: tuple[str, ...] = (), starts: tuple[float, ...] = (START,)
) -> Path:
    """Writes a run whose evaluations come a minute and a million frames apart, the first after a minute."""
    (directory / "metrics").mkdir(parents=True)
    (directory / "config.yaml").write_text(to_yaml(load(None, [*overrides, f"run_directory={directory}"])))
    (directory / "starts.jsonl").write_text("".join(json.dumps({"time": t, "task": "Pong-v5"}) + "\n" for t in starts))
    write_lines(
        directory / "metrics" / "evaluator.jsonl", [(60.0 * i, i, {RETURN: r}) for i, r in enumerate(returns, 1)]
    )
    return directory


def write_lines(path: Path, lines: Sequence[tuple[float, float, Mapping[str, float | None]]]) -> None:
    """Writes (seconds after START, million frames, values)."""
    texts = [json.dumps({"time": START + s, "seconds": s, "step": int(m * 1e6), **values}) for s, m, values in lines]
    path.write_text("\n".join([*texts, ""]))


def plain_run(returns: list[float], task: str = "Pong-v5") -> Run:
    positions = np.arange(1.0, len(returns) + 1)
    return Run("", task, Curve(positions * 1e6, positions, np.array(returns)), {}, {})


# Where a run came from --------------------------------------------------------------------------------------------


def test_each_start_of_a_run_adds_what_somebody_needs_to_repeat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/a/checkout/main.py", "seed=7"])
    config = Config(run_directory=str(tmp_path / "new"), seed=7)
    provenance.record_start(config)
    provenance.record_start(config)
    first, second = provenance.read_starts(tmp_path / "new")
    assert first["time"] <= second["time"]
    assert (first["task"], first["seed"]) == ("Pong-v5", 7)
    assert first["versions"]["numpy"] == np.__version__
    assert first["processor"]
    assert first["cores"] >= 1
    assert first["command"] == f"{Path(sys.executable).name} main.py seed=7"


def test_commit_is_that_of_the_checkout_where_git_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_CHECKOUT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    config = Config(run_directory=str(tmp_path / "run"))
    provenance.record_start(config)
    for command in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m first"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    provenance.record_start(config)
    before, after = provenance.read_starts(tmp_path / "run")
    assert before["commit"] is None
    assert len(after["commit"]) == 40
    assert after["uncommitted_changes"] is False


def test_start_after_a_torn_line_is_kept(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").write_text('{"time": 1.5, "ta')
    provenance.record_start(Config(run_directory=str(tmp_path)))
    assert len(provenance.read_starts(tmp_path)) == 1


def test_torn_line_of_a_start_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").write_bytes(b'{"time": 1.5}\n{"ti\n[1]\n{"time": 2.5}\n\xff')
    assert [start["time"] for start in provenance.read_starts(tmp_path)] == [1.5, 2.5]
    assert provenance.read_starts(tmp_path / "nowhere") == []


# Curves -----------------------------------------------------------------------------------------------------------


def test_evaluation_stands_at_the_frames_of_its_weights_and_the_minutes_of_its_end(tmp_path: Path) -> None:
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
    assert {band: list(curve.returns) for band, curve in training.items()} == {
        "below_0.01": [-21.0],
        "above_0.2": [-20.0, -19.0],
    }
    assert list(training["above_0.2"].minutes) == pytest.approx([0.1, 0.2])


def test_pause_between_two_starts_takes_no_minutes(tmp_path: Path) -> None:
    make_run(tmp_path, [], starts=(START, START + 1000))
    lines = [(60.0, 1.0, {RETURN: 1.0}), (120.0, 1.0, {}), (1060.0, 2.0, {RETURN: 2.0})]
    write_lines(tmp_path / "metrics" / "evaluator.jsonl", lines)
    assert list(read_run(tmp_path).evaluation.minutes) == pytest.approx([1.0, 3.0])


def test_experience_that_was_lost_with_a_killed_start_is_no_part_of_the_curve(tmp_path: Path) -> None:
    make_run(tmp_path, [])
    points = zip((1.0, 2.0, 3.0, 2.2, 2.5), (-20.0, -10.0, 0.0, -9.0, -5.0), strict=True)
    lines = [(60.0 * i, frames, {RETURN: value}) for i, (frames, value) in enumerate(points, 1)]
    write_lines(tmp_path / "metrics" / "evaluator.jsonl", lines)
    curve = read_run(tmp_path).evaluation
    assert list(curve.returns) == [-20.0, -10.0, -9.0, -5.0]
    assert list(curve.minutes) == [1.0, 2.0, 4.0, 5.0]


def test_first_start_that_was_not_recorded_began_with_the_first_line(tmp_path: Path) -> None:
    make_run(tmp_path, [], starts=(START + 1000,))
    lines = [(60.0, 1.0, {}), (120.0, 2.0, {RETURN: 1.0}), (1060.0, 3.0, {RETURN: 2.0})]
    write_lines(tmp_path / "metrics" / "evaluator.jsonl", lines)
    assert list(read_run(tmp_path).evaluation.minutes) == pytest.approx([1.0, 2.0])


def test_files_of_something_else_are_no_traceback(tmp_path: Path) -> None:
    make_run(tmp_path, [1.0])
    odd = [
        '{"time": "x"}',
        '{"time": null, "seconds": 1, "step": 2}',
        "[" * 100_000,
        "7",
        "",
        '{"time": 1' + "0" * 400 + "}",
    ]
    whole = json.dumps({"time": START + 120, "seconds": 120, "step": 2_000_000, RETURN: 2.0, "eval/updates": [1]})
    strange = json.dumps({"time": START, "seconds": 1, "step": [1], RETURN: "x"})
    (tmp_path / "metrics" / "learner.jsonl").write_text("\n".join([*odd, strange, whole, ""]))
    (tmp_path / "starts.jsonl").write_text("\n".join([*odd, json.dumps({"time": START}), '{"time": NaN}', ""]))
    assert list(read_run(tmp_path).evaluation.returns) == [1.0, 2.0]
    assert list(read_run(tmp_path).evaluation.minutes) == [1.0, 2.0]


def test_run_without_starts_or_config_is_read_from_its_first_line_on(tmp_path: Path) -> None:
    make_run(tmp_path, [1.0, 2.0])
    for name in ("starts.jsonl", "config.yaml"):
        (tmp_path / name).unlink()
    read = read_run(tmp_path)
    assert (read.task, dict(read.settings), list(read.evaluation.minutes)) == ("?", {}, [0.0, 1.0])


def test_directory_without_metrics_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no metrics/\*\.jsonl; give the directory of a run"):
        read_run(tmp_path)


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


def test_labels_stay_short_and_tell_keys_of_one_name_apart(tmp_path: Path) -> None:
    overrides = ("actor.device=gpu", "learner.device=gpu", "learner.batch_size=64", "algorithm.n_step=1")
    runs = [read_run(make_run(tmp_path / "a", [1.0])), read_run(make_run(tmp_path / "b", [1.0], overrides))]
    assert [group.label for group in grouped(runs)] == [
        "n_step=3, actor.device=cpu, batch_size=512, 1 more",
        "n_step=1, actor.device=gpu, batch_size=64, 1 more",
    ]
    (tmp_path / "b" / "config.yaml").unlink()
    runs[1] = read_run(tmp_path / "b")
    assert [group.label for group in grouped(runs)] == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_no_two_groups_have_one_label() -> None:
    runs = [read_run(path) for path in sorted((ROOT / "results" / "ablations").glob("*-1"))]
    labels = [group.label for group in grouped(runs)]
    assert len(set(labels)) == len(runs) > 4
    assert {"baseline", "priority_exponent=0.0", "initial_priority=maximum", "n_step=1"} <= set(labels)


def test_games_of_one_method_are_one_group(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / task, [1.0], (f"environment.task={task}-v5",))) for task in ("Pong", "Boxing")]
    assert [list(group.runs) for group in grouped(runs)] == [runs]


def test_value_of_a_curve_holds_until_the_next(tmp_path: Path) -> None:
    curve, late = plain_run([1.0, 2.0, 3.0]).evaluation, plain_run([5.0, 6.0]).evaluation
    late = late._replace(minutes=np.array([1.5, 2.5]))
    grid = common_grid([curve, late], "minutes", points=3)
    assert list(grid) == [1.5, 2.0, 2.5]
    assert list(held(curve, "minutes", grid)) == [1.0, 2.0, 2.0]
    assert list(held(late, "minutes", grid)) == [5.0, 5.0, 6.0]


def test_runs_that_have_no_time_in_common_have_no_grid() -> None:
    early, late = plain_run([1.0]).evaluation, plain_run([1.0]).evaluation._replace(minutes=np.array([9.0]))
    assert common_grid([early, late], "minutes").size == 0


def test_run_that_would_be_refused_today_is_drawn(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", [1.0, 2.0])
    config = directory / "config.yaml"
    config.write_text(config.read_text().replace("frame_size: 84", "frame_size: 85"))
    with pytest.raises(UsageError, match="frame_size=84 or 92"):
        load(config)
    assert read_run(directory).settings["environment.frame_size"] == 85


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("**/starts.jsonl")), ids=lambda path: str(path.parent))
def test_published_run_is_one_that_plot_reads(path: Path) -> None:
    published = read_run(path.parent)
    assert published.evaluation.returns.size > 5
    assert published.task.endswith(("-v5", "-v0"))


# Pictures and table -----------------------------------------------------------------------------------------------


def test_picture_of_a_run_and_of_groups_is_written_whole(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [-20.0, 3.0])
    make_run(tmp_path / "b", [-20.0, 5.0], ("seed=2",))
    runs = [read_run(tmp_path / name) for name in "ab"]
    draw_run(runs[0], tmp_path / "curves.png")
    draw_groups(grouped(runs), tmp_path / "both.png")
    draw_groups([Group("x", [plain_run([1.0, 2.0]), plain_run([300.0], "Seaquest-v5")])], tmp_path / "games.png")
    for name in ("curves.png", "both.png", "games.png"):
        with Image.open(tmp_path / name) as image:
            assert image.size == (1100, 420)
            assert len(image.convert("RGB").getcolors(2**20) or ()) > 50, "something is drawn"
    assert not list(tmp_path.glob(".*"))


def test_published_ablations_are_those_of_the_published_runs(tmp_path: Path) -> None:
    folder, variants = ROOT / "results" / "ablations", ablations.VARIANTS
    seeds = sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("Ape-X-*"))
    runs = {name: [folder / f"{name.replace(' ', '_')}-{seed}" for seed in seeds] for name in variants}
    groups = groups_of([f"{name}={path}" for name, paths in runs.items() for path in paths])
    printed = ablations.table(groups)
    assert (folder / "table.md").read_text() == printed + "\n"
    assert printed in (ROOT / "results" / "README.md").read_text()
    assert [line.count("|") for line in printed.splitlines()] == [7] * (2 + len(variants))
    draw_each_against_the_first(groups, tmp_path / "ablations.png")
    with (
        Image.open(tmp_path / "ablations.png") as drawn,
        Image.open(folder / "ablations.png") as published,
    ):
        assert drawn.size == published.size == (1100, 620), "two rows of three panels"


def test_running_mean_looks_back_only() -> None:
    returns = np.arange(60.0)
    smooth = running_mean(plain_run(list(returns)).evaluation).returns
    np.testing.assert_allclose(smooth, [0.0, 0.5, *(returns[2:] - 1)])
    np.testing.assert_array_equal(running_mean(plain_run([3.0, 1.0]).evaluation).returns, [3.0, 1.0])
    assert running_mean(plain_run([]).evaluation).returns.size == 0


def test_run_without_evaluations_or_with_an_unknown_game_is_drawn(tmp_path: Path) -> None:
    draw_run(plain_run([], "Catch-v0"), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_table_has_a_row_for_each_group_with_raw_and_normalised_scores() -> None:
    text = table([Group("a", [plain_run([0.0, r]) for r in (14.6, 14.6, 14.6)]), Group("b", [plain_run([-20.7])])])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[0][:5] == ["runs", "n", "frames", "minutes", "last return: each"]
    assert rows[2] == ["a", "3", "2.00 M", "2.0", "14.6, 14.6, 14.6", "14.6", "14.6 [14.6, 14.6]", "100%"]
    assert rows[3] == ["b", "1", "1.00 M", "1.0", "-20.7", "-20.7", "-20.7 [-20.7, -20.7]", "0%"]


def test_table_of_several_games_has_only_normalised_statistics() -> None:
    text = table([Group("both", [plain_run([14.6]), plain_run([42054.7], "Seaquest-v5")])])
    assert [cell.strip() for cell in text.splitlines()[2].split("|")][5:9] == ["14.6, 42054.7", "", "", "100%"]


def test_plot_command_draws_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", [1.0, 2.0])
    make_run(tmp_path / "b=c", [3.0, 4.0])
    output = tmp_path / "out.svg"
    assert run([str(tmp_path / "a"), f"SB3={tmp_path / 'b=c'}", "--output", str(output)]) == 0
    assert "<svg" in output.read_text()
    printed = capsys.readouterr().out
    assert f"| {tmp_path / 'a'} | 1 |" in printed
    assert "| SB3 | 1 |" in printed


def test_label_is_taken_as_it_is_written(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [1.0, 2.0])
    assert run([rf"a$^$|b\bad={tmp_path / 'a'}", "--output", str(tmp_path / "x.png")]) == 0


def test_games_without_a_human_score_share_no_axis_with_others(tmp_path: Path) -> None:
    runs = [plain_run([1.0]), plain_run([400.0], "CartPole-v1")]
    with pytest.raises(UsageError, match="has no human score to share an axis with other games; plot it alone"):
        draw_groups([Group("x", runs)], tmp_path / "x.png")


def test_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [1.0, 2.0])
    (tmp_path / "x.png").mkdir()
    with pytest.raises(RunError, match=r"x.*\.png: Is a directory; choose another --output"):
        run([str(tmp_path / "a"), "--output", str(tmp_path / "x.png")])


def test_directory_may_hold_an_equals_sign(tmp_path: Path) -> None:
    make_run(tmp_path / "b=c", [3.0])
    assert [group.label for group in groups_of([str(tmp_path / "b=c")])] == [str(tmp_path / "b=c")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plot: the following arguments are required: .*; see python main.py plot --help"),
        (["{tmp}/nowhere"], "nowhere: no such directory; give the directory of a run"),
        (["{tmp}/empty"], "empty: has no evaluation yet"),
        (["{tmp}/a", "--output", "x.jpg"], r"--output x.jpg: give a file .* ends in .png, .svg or .pdf"),
        (["{tmp}/a", "--output", "{tmp}/nowhere/x.png"], "give a file in an existing folder"),
    ],
)
def test_wrong_use_of_plot_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    make_run(tmp_path / "a", [1.0])
    make_run(tmp_path / "empty", [])
    with pytest.raises(UsageError, match=message) as caught:
        run([argument.format(tmp=tmp_path) for argument in arguments])
    assert str(caught.value).isprintable()


def test_config_of_a_run_is_written_whole_and_without_the_addresses_of_a_start(tmp_path: Path) -> None:
    config = load(None, [f"run_directory={tmp_path}", "seed=7", "addresses.weights=ipc:///run/somewhere"])
    for _ in range(2):
        provenance.record_config(config)
    assert load(tmp_path / "config.yaml") == config.replace(addresses=AddressConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_start_of_a_run_with_other_settings_names_them_and_so_does_a_plot_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(run_directory=str(make_run(tmp_path / "run", [1.0, 2.0])))
    longer = config.replace(total_minutes=9.0, seed=1)
    for same in (config, longer):
        provenance.record_start(same)
        provenance.record_config(same)
    assert caplog.text == ""
    changed = config.replace(learner=dataclasses.replace(config.learner, batch_size=64))
    provenance.record_start(changed)
    change = f"learner.batch_size=64 (was {config.learner.batch_size})"
    assert f"{tmp_path}/run resumes with changed settings, {change}: to start afresh" in caplog.text
    assert read_run(tmp_path / "run").changed_settings == [], "it may yet be refused by its checkpoint"
    (tmp_path / "run" / "changes.jsonl").write_text('{"time": 1.5, "settings": 5}\n{"ti')  # not ours; torn by a kill
    provenance.record_config(changed)
    provenance.record_config(changed)
    assert read_run(tmp_path / "run").changed_settings == [change]
    assert run([str(tmp_path / "run"), "--output", str(tmp_path / "curves.png")]) == 0
    assert f"{tmp_path}/run went on with changed settings: {change}\n" in capsys.readouterr().out


def test_label_that_cannot_be_drawn_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use a label of printable characters"):
        groups_of([f"\udcff={tmp_path}"])
