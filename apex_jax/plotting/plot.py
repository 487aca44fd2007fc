"""Draws curves: one run with its training games by exploration rate, or several runs in one picture."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from apex_jax.host.disk import atomic_write
from apex_jax.host.errors import RunError, UsageError, short_repr
from apex_jax.host.program import NAME, Parser
from apex_jax.plotting.curves import (
    CONFIDENCE,
    FEWEST_RUNS,
    Curve,
    Group,
    Run,
    bootstrap_interval,
    grouped,
    held,
    interquartile_mean,
    is_packed,
    read_packed,
    read_run,
    steps,
)
from apex_jax.run.evaluations import return_text
from apex_jax.run.metrics import EPSILON_BANDS, NOISE_BANDS

AXES = {"frames": "million emulator frames", "minutes": "minutes"}
STAIRCASE = "steps-post"  # a value is valid until the next one
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")  # Okabe, Ito 2008
BAND_COLORS = ("#7A0177", "#C51B8A", "#F768A1", "#FBB4B9")  # from little exploration to much


def draw_run(run: Run, path: str | os.PathLike[str]) -> None:
    """Draws one run: evaluations, and training games by band of exploration, over frames and over minutes."""
    figure = _figure()
    panels = _panels(figure, f"{run.task} (training games: running mean)", run)
    for panel, axis in panels:
        bands = [*zip(EPSILON_BANDS.names, BAND_COLORS, strict=True), *zip(NOISE_BANDS.names, BAND_COLORS, strict=True)]
        for band, color in bands:
            if (curve := run.training.get(band)) is not None:
                _line(panel, axis, curve, color=color, lw=0.4, alpha=0.3)
                label = f"training, {band.replace('_', ' ')}"
                _line(panel, axis, running_mean(curve), label=label, color=color, lw=1.2)
        _line(panel, axis, run.evaluation, label="evaluation", color=COLORS[0], lw=2, marker="o", ms=3)
    _draw_legend(figure, panels[0][0])
    _save(figure, path)


def draw_groups(groups: Sequence[Group], path: str | os.PathLike[str]) -> None:
    """Draws the evaluations of groups of runs in one picture, below each other if they have no common axis.

    Runs, means and intervals are staircases: an evaluation is valid until the next one, so a mean lies between its
    runs. Thin lines are the runs of a group, thick ones their interquartile mean (or the only run), dotted ones the
    median; the shaded area is the bootstrap interval, from three runs of each game. Several games are human-normalised.
    """
    rows = _with_common_axes(groups)
    figure = _figure(len(rows))
    parts: Iterable[FigureBase] = [figure] if len(rows) == 1 else figure.subfigures(len(rows), squeeze=False).flat
    for part, row in zip(parts, rows, strict=True):
        runs = [run for group in row for run in group.runs]
        tasks = sorted({run.task for run in runs})
        panels = _panels(part, ", ".join(tasks), runs[0] if len(tasks) == 1 else None)
        for panel, axis in panels:
            for i, group in enumerate(row):
                if group.runs:
                    draw_group(panel, axis, group, COLORS[i % len(COLORS)], normalized=len(tasks) > 1)
        _draw_legend(part, panels[0][0])
    _save(figure, path)


def _with_common_axes(groups: Sequence[Group]) -> list[list[Group]]:
    """Returns the groups, once for each task if several tasks have no common axis, then with the runs of that task."""
    runs = [run for group in groups for run in group.runs]
    tasks = sorted({run.task for run in runs})
    if len(tasks) == 1 or all(run.normalized(np.zeros(1)) is not None for run in runs):
        return [list(groups)]
    return [[Group(label, [run for run in runs if run.task == task]) for label, runs in groups] for task in tasks]


def draw_group(panel: Axes, axis: str, group: Group, color: str, normalized: bool) -> None:
    """Draws the runs of a group, their interquartile mean and their median; `axis`: one of AXES."""
    curves = [scores(run, normalized) for run in group.runs]
    if len(curves) == 1:
        _line(panel, axis, curves[0], drawstyle=STAIRCASE, color=color, lw=2, label=_plain(f"{group.label} (1 run)"))
        return
    for curve in curves:
        _line(panel, axis, curve, drawstyle=STAIRCASE, color=color, lw=0.6, alpha=0.5)
    grid = steps(curves, axis)
    label = _plain(f"{group.label} ({len(curves)} runs: {_drawn_statistics(group)})")
    if not grid.size:
        panel.plot([], [], color=color, lw=2, label=label)
        return
    strata = by_game(group, [held(curve, axis, grid) for curve in curves])
    values = np.concatenate(strata)
    x = _scaled(axis, grid)
    if _has_interval(group):
        low, high = bootstrap_interval(strata, interquartile_mean, np.random.default_rng(0))
        panel.fill_between(x, low, high, step="post", color=color, alpha=0.15, lw=0)
    panel.plot(x, np.median(values, axis=0), drawstyle=STAIRCASE, color=color, lw=1, ls=":")
    panel.plot(x, interquartile_mean(values), drawstyle=STAIRCASE, color=color, lw=2, label=label)


def _has_interval(group: Group) -> bool:
    return min(Counter(run.task for run in group.runs).values()) >= FEWEST_RUNS


def _drawn_statistics(group: Group) -> str:
    return "interquartile mean" + (f", {CONFIDENCE:.0%} interval" if _has_interval(group) else "")


def running_mean(curve: Curve) -> Curve:
    """Returns the mean of each point and the points before it; a window is a twentieth of the curve."""
    size = len(curve.returns)
    width = max(1, size // 20)
    sums = np.concatenate([np.zeros(width), np.cumsum(curve.returns)])
    return curve._replace(returns=(sums[width:] - sums[:size]) / np.minimum(np.arange(size) + 1, width))


def scores(run: Run, normalized: bool) -> Curve:
    """Returns the run's evaluation curve, human-normalised if `normalized`."""
    values = run.normalized(run.evaluation.returns) if normalized else None
    return run.evaluation if values is None else run.evaluation._replace(returns=values)


def by_game(group: Group, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the values of the group's runs, stacked for each game."""
    tasks = [run.task for run in group.runs]
    return [np.stack([v for v, t in zip(values, tasks, strict=True) if t == task]) for task in sorted(set(tasks))]


def _figure(rows: int = 1) -> Figure:
    return Figure(figsize=(11, 4.2 * rows), dpi=100, layout="constrained")


def _panels(figure: FigureBase, title: str, normalized_by: Run | None) -> list[tuple[Axes, str]]:
    """Returns a panel for each of AXES.

    `normalized_by`: the run whose game defines the second axis; None if returns are human-normalised.
    """
    axes = figure.subplots(1, 2, sharey=True)
    figure.suptitle(_plain(title))
    axes[0].set_ylabel("return" if normalized_by else "human-normalised score")
    for panel, (_, label) in zip(axes, AXES.items(), strict=True):
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
        panel.ticklabel_format(useOffset=False)  # a tick at -29,981 is labelled so, not "-1" with an offset of -2.998e4
    zero, one = (normalized_by.normalized(np.array(v)) if normalized_by else None for v in (0.0, 1.0))
    if zero is not None and one is not None:
        scale = float(one - zero)
        forward, back = partial(_affine, scale, float(zero)), partial(_affine, 1 / scale, -float(zero) / scale)
        second = axes[1].secondary_yaxis("right", functions=(forward, back))
        second.set_ylabel("human-normalised score")
        second.ticklabel_format(axis="y", useOffset=False)
    return list(zip(axes, AXES, strict=True))


def _plain(text: str) -> str:
    """Escapes a text, so that matplotlib does not interpret it as mathematics."""
    return text.replace("$", r"\$")


def _affine(scale: float, offset: float, values: np.ndarray) -> np.ndarray:
    return scale * np.asarray(values) + offset


def _line(panel: Axes, axis: str, curve: Curve, **style: object) -> None:
    panel.plot(_scaled(axis, getattr(curve, axis)), curve.returns, **style)  # type: ignore[arg-type]


def _scaled(axis: str, positions: np.ndarray) -> np.ndarray:
    return positions / 1e6 if axis == "frames" else positions


def _draw_legend(figure: FigureBase, first: Axes) -> None:
    handles, labels = first.get_legend_handles_labels()
    if labels:  # below the panels, so that it hides no curve
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize="small")


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    with atomic_write(Path(path)) as half:
        figure.savefig(half)


def table(groups: Sequence[Group]) -> str:
    """Returns the last evaluations of each group as a Markdown table, by task if they have no common axis."""
    header = (
        "runs",
        "n",
        "frames (median)",
        "minutes (median)",
        "last return: each",
        "median",
        f"IQM [{CONFIDENCE:.0%}]",
        "human-normalised IQM",
    )
    apart = _with_common_axes(groups)
    each = [
        group if len(apart) == 1 else Group(f"{group.label}, {group.runs[0].task}", group.runs)
        for row in apart
        for group in row
        if group.runs
    ]
    rows = [header, ("---",) * len(header), *map(_table_row, each)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _table_row(group: Group) -> tuple[str, ...]:
    ends = [run.evaluation for run in group.runs]
    last = np.array([curve.returns[-1] for curve in ends])
    interval = ""
    if _has_interval(group):
        low, high = bootstrap_interval(by_game(group, list(last)), interquartile_mean, np.random.default_rng(0))
        interval = f" [{return_text(float(low))}, {return_text(float(high))}]"
    several_games = len({run.task for run in group.runs}) > 1
    human = [run.normalized(run.evaluation.returns[-1:]) for run in group.runs]
    iqm = None if any(h is None for h in human) else float(interquartile_mean(np.array(human))[0])
    return (
        group.label.replace("|", r"\|"),
        str(len(group.runs)),
        f"{np.median([curve.frames[-1] for curve in ends]) / 1e6:.2f} M",
        f"{np.median([curve.minutes[-1] for curve in ends]):.1f}",
        ", ".join(map(return_text, last)),
        "" if several_games else return_text(float(np.median(last))),
        "" if several_games else f"{return_text(float(interquartile_mean(last)))}{interval}",
        "" if iqm is None else f"{iqm:z.0%}",
    )


# The command `plot` -------------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

FORMATS = (".png", ".svg", ".pdf")
FILE_NAME = "plot.png"  # not curves.png, the name of the picture that a run draws at its end


def run(arguments: Sequence[str]) -> int:
    """Runs the command; `arguments`: after "plot". Returns the exit code. Raises UsageError, RunError."""
    options = _parser().parse_args(arguments)
    if options.output is not None:
        _check_output(Path(options.output))
    # A shell's runs/* also matches the pictures that were drawn there.
    runs = [run for run in options.runs if not (Path(run).suffix in FORMATS and Path(run).is_file())] or options.runs
    output = Path(options.output or _default_output([directory for _, directory in map(_labelled, runs)]))
    try:
        groups = groups_of(runs)
        draw_groups(groups, output)
    except OSError as error:
        raise RunError(
            f"{error.filename or output}: {error.strerror or error}; choose another --output or run"
        ) from None
    print(table(groups))
    for drawn in (drawn for group in groups for drawn in group.runs if drawn.changed_settings):
        print(f"\n{drawn.directory} went on with changed settings: {', '.join(drawn.changed_settings)}")
    print(f"\n{output}: thin lines are runs, thick ones their interquartile mean, dotted ones the median")
    return 0


def _check_output(output: Path) -> None:
    if output.suffix not in FORMATS or not output.parent.is_dir():
        endings = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise UsageError(f"--output {short_repr(output)}: give a file in an existing folder that ends in {endings}")


def _default_output(directories: Sequence[str]) -> str:
    """Returns the picture's path: in the directory of the only run, otherwise beside the first."""
    first = directories[0]
    is_one_run = len(set(directories)) == 1 and not is_packed(first)
    return os.path.join(first if is_one_run else os.path.normpath(os.path.join(first, os.pardir)), FILE_NAME)


def _labelled(argument: str) -> tuple[str, str]:
    """Returns the label, "" without one, and the directory or file of an argument."""
    label, separator, directory = argument.partition("=")
    return (label, directory) if separator and not Path(argument).exists() else ("", argument)


def groups_of(arguments: Sequence[str]) -> list[Group]:
    """Returns the runs of `PATH` and `LABEL=PATH` arguments in groups, without those that have no evaluation yet.

    Raises UsageError if none has one, or an argument is wrong.
    """
    labelled: dict[str, list[Run]] = {}
    blank: list[str] = []
    for text in arguments:
        label, directory = _labelled(text)
        runs = read_packed(directory) if is_packed(directory) else [read_run(directory)]
        for run in runs:
            if run.evaluation.returns.size:
                labelled.setdefault(label, []).append(run)
            else:
                blank.append(f"{short_repr(run.directory)}: has no evaluation yet")
    if not labelled:
        where = "if that has another run_directory, copy it beside this one"
        raise UsageError(f"{blank[0]}; plot it once its evaluator has played; {where}")
    for text in blank:
        _log.warning("%s: left out", text)
    unlabelled = labelled.pop("", [])
    return (grouped(unlabelled) if unlabelled else []) + [Group(*item) for item in labelled.items()]


def _parser() -> Parser:
    parser = Parser(
        "plot",
        description="Overlays the evaluation curves of runs, against frames and minutes. Runs that differ in"
        " nothing but the seed are one group: interquartile mean, median and, from three runs, bootstrap interval.",
        epilog=f"example: {NAME} plot runs/Pong-v5-* SB3=runs/sb3-1 SB3=runs/sb3-2 --output pong.png",
    )
    what = "run directories, and files of packed runs; LABEL names their group"
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help=what)
    where = f"picture to write (default: {FILE_NAME} in the run directory; of several runs beside the first)"
    parser.add_argument("--output", metavar="FILE", help=where)
    return parser
