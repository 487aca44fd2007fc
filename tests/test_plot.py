"""What a plot of runs shows: lines that agree with each other, axes that can be read, minutes of learning only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from apex_jax.errors import UsageError
from apex_jax.metrics import MetricsWriter
from apex_jax.plotting.curves import Curve, Group, Run, read_run
from apex_jax.plotting.plot import draw_groups
from apex_jax.plotting.plot_command import run

START = 1_000_000.0  # unix seconds
RETURN = "eval/episodic_return"
UPDATES = "learner/updates"


@st.composite
def run_with_few_evaluations(draw: st.DrawFn) -> Run:
    """A run of 2 to 12 evaluations from -21 to 21, at any frames."""
    frames = sorted(draw(st.sets(st.integers(1, 100), min_size=2, max_size=12)))
    returns = draw(st.lists(st.integers(-21, 21), min_size=len(frames), max_size=len(frames)))
    return run_of([frame * 1e5 for frame in frames], [float(value) for value in returns])


def run_of(frames: Sequence[float], returns: Sequence[float], task: str = "Pong-v5") -> Run:
    """A run whose minutes are its tenths of a million frames."""
    return Run("runs/x", task, Curve(np.array(frames), np.array(frames) / 1e5, np.array(returns)), {}, {})


def drawn(groups: Sequence[Group], folder: Path) -> Figure:
    """Returns the figure behind the picture."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        draw_groups(groups, folder / "x.svg")
    [figure] = figures
    return figure


def heights(line: Line2D, positions: np.ndarray) -> np.ndarray:
    """Returns what a drawn line shows at these positions; NaN outside of it."""
    x, y = (np.asarray(values, np.float64) for values in line.get_data())
    if line.get_drawstyle() == "default":
        return np.interp(positions, x, y, left=np.nan, right=np.nan)
    assert line.get_drawstyle() == "steps-post"
    shown = y[np.searchsorted(x, positions, side="right") - 1]
    return np.where((positions < x[0]) | (positions > x[-1]), np.nan, shown)


@settings(max_examples=12, deadline=None)
@given(runs=st.lists(run_with_few_evaluations(), min_size=2, max_size=5))
def test_mean_and_median_are_drawn_between_the_lowest_and_the_highest_run_at_every_position(
    tmp_path_factory: pytest.TempPathFactory, runs: list[Run]
) -> None:
    figure = drawn([Group("x", runs)], tmp_path_factory.getbasetemp())
    for panel in figure.axes:
        *of_runs, median, mean = panel.get_lines()
        assert len(of_runs) in (len(runs), len(runs) - 1), "runs without a common time have no mean"
        for line in (median, mean) if len(of_runs) == len(runs) else ():
            first, last = np.asarray(line.get_xdata())[[0, -1]]
            ends = np.concatenate([np.asarray(run.get_xdata(), np.float64) for run in of_runs])
            positions = np.concatenate([np.linspace(first, last, 1_000), ends, np.nextafter(ends, 0)])
            positions = positions[(positions >= first) & (positions <= last)]
            values = np.stack([heights(run, positions) for run in of_runs])
            shown = heights(line, positions)
            assert (values.min(0) - 1e-9 <= shown).all()
            assert (shown <= values.max(0) + 1e-9).all()


def test_ticks_are_whole_numbers_without_an_offset_beside_the_axis(tmp_path: Path) -> None:
    runs = [run_of([9e9, 9e9 + 4e4], [-29_981.2, -29_980.9 + i], "Skiing-v5") for i in range(2)]
    figure = drawn([Group("x", runs)], tmp_path)
    figure.canvas.draw()
    axes = figure.findobj(lambda part: hasattr(part, "yaxis"))
    assert len(axes) == 3, "two panels, and the human-normalised scores beside them"
    scales = [scale for part in axes for scale in (part.xaxis, part.yaxis)]  # type: ignore[attr-defined]
    offsets = [scale.get_major_formatter().get_offset() for scale in scales]
    assert [offset for offset in offsets if offset] == []
    assert any("29981" in label.get_text().replace(",", "") for label in figure.axes[0].get_yticklabels())


def write_run(
    folder: Path,
    starts: Sequence[float],
    evaluations: Sequence[tuple[float, float]],
    updates: Sequence[tuple[float, int]],
) -> Path:
    """Writes a run; all times in seconds after its first start, evaluations as (time, million frames)."""
    (folder / "metrics").mkdir(parents=True)
    lines: dict[str, list[tuple[float, float, dict[str, float]]]] = {
        "evaluator": [(seconds, millions, {RETURN: 1.0}) for seconds, millions in evaluations],
        "learner": [(seconds, 0.0, {UPDATES: count}) for seconds, count in updates],
        "replay": [(start + seconds, 0.0, {}) for start in starts for seconds in (5.0, 30.0)],
    }
    for name, of_process in lines.items():
        records = [{"time": START + s, "seconds": s, "step": int(m * 1e6), **v} for s, m, v in of_process]
        (folder / "metrics" / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "starts.jsonl").write_text("".join(json.dumps({"time": START + start}) + "\n" for start in starts))
    return folder


@pytest.mark.parametrize(
    ("runs", "picture"),
    [
        (["runs/a"], "runs/a/plot.png"),
        (["one=runs/a"], "runs/a/plot.png"),
        (["runs/a", "runs/b"], "runs/plot.png"),
        (["{folder}/runs/a/", "runs/b"], "{folder}/runs/plot.png"),
    ],
)
def test_picture_of_a_run_lies_in_its_directory_and_that_of_several_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: list[str], picture: str
) -> None:
    for name in "ab":
        write_run(tmp_path / "runs" / name, [0.0], [(300.0, 1.0), (600.0, 2.0)], [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a" / "curves.png").write_bytes(b"the picture of the run's end")
    assert run([text.format(folder=tmp_path) for text in runs]) == 0
    assert f"\n{picture.format(folder=tmp_path)}: thin lines are runs" in capsys.readouterr().out
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("plot.png")] == [
        Path(picture.format(folder=tmp_path)).relative_to(tmp_path) if "{" in picture else Path(picture)
    ]
    assert (tmp_path / "runs" / "a" / "curves.png").read_bytes() == b"the picture of the run's end"


def test_pictures_that_a_shell_names_beside_the_runs_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        write_run(tmp_path / "runs" / name, [0.0], [(300.0, 1.0), (600.0, 2.0)], [])
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the first call makes the picture that `runs/*` names the second time
        assert run(sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").glob("*"))) == 0
        assert "\nruns/plot.png: thin lines are runs" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"plot\.png: is a file; give the directory of a run"):
        run(["runs/plot.png"])


@pytest.mark.parametrize("twice", [["runs/a", "runs/a/"], ["A=runs/a", "A={folder}/runs/a"]])
def test_run_that_is_given_twice_in_one_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, twice: list[str]
) -> None:
    write_run(tmp_path / "runs" / "a", [0.0], [(300.0, 1.0), (600.0, 2.0)], [])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is given twice, as .*runs/a and .*runs/a/?; keep one"):
        run([text.format(folder=tmp_path) for text in twice])
    assert run(["before=runs/a", "after=runs/a"]) == 0  # two lines, each of one run


def test_second_start_of_a_finished_run_adds_no_minutes(tmp_path: Path) -> None:
    learned = [(60.0, 500), (600.0, 1_000)]
    once = [(300.0, 1.0), (620.0, 2.0)]
    run = write_run(tmp_path / "a", [0.0, 5_000.0], [*once, (5_040.0, 2.0)], [*learned, (5_010.0, 1_000)])
    assert list(read_run(run).evaluation.minutes) == pytest.approx([5.0, 620 / 60, 620 / 60])
    refused = write_run(tmp_path / "b", [0.0, 5_000.0], [*once, (5_040.0, 2.0)], learned)
    assert list(read_run(refused).evaluation.minutes) == pytest.approx([5.0, 620 / 60, 620 / 60])


def test_second_start_that_learns_on_adds_its_minutes(tmp_path: Path) -> None:
    evaluations = [(300.0, 1.0), (600.0, 2.0), (5_060.0, 3.0)]
    learned = [(60.0, 500), (600.0, 1_000), (5_005.0, 800), (5_060.0, 900)]
    run = write_run(tmp_path / "from an older checkpoint", [0.0, 5_000.0], evaluations, learned)
    assert list(read_run(run).evaluation.minutes) == pytest.approx([5.0, 10.0, 11.0])
    run = write_run(tmp_path / "one line", [0.0, 5_000.0], evaluations, [*learned[:2], (5_060.0, 1_100)])
    assert list(read_run(run).evaluation.minutes) == pytest.approx([5.0, 10.0, 11.0])


@pytest.mark.parametrize("jumps", [{5: -3600.0}, {5: 3600.0}, {3: -3600.0, 5: 3600.0}], ids=["back", "forward", "both"])
def test_clock_that_is_set_while_a_run_goes_on_moves_no_point_of_a_curve(
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
