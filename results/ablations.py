"""Trains Ape-X without one of its parts at a time, several seeds each, on one machine, and compares the results.

Every variant is one configuration with a key or two changed, and has the same updates and, by
replay.samples_per_insert, the same frames: what else the machine does meanwhile changes only the minutes. Runs that
are already complete are not run again, nor those that --publish has of the same settings, so what was interrupted goes
on; the end is one picture, one table and one file of runs for each variant, in --publish.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from apex_jax.config.load import SETTINGS, load
from apex_jax.plotting.curves import Group, bootstrap_interval, held, interquartile_mean
from apex_jax.plotting.plot import AXES, draw_group, groups_of
from apex_jax.run.metrics import read_metrics
from apex_jax.run.provenance import value_of
from results.publish import packed_line

MAIN = Path(os.path.relpath(Path(__file__).parents[1] / "main.py"))  # relative: runs record CONFIG, made from it
CONFIG = MAIN.parent / "configs" / "mountain_car.yaml"
DQN: dict[str, tuple[str, ...]] = {
    "Ape-X": (),
    "uniform replay": ("replay.priority_exponent=0",),
    "new transitions at maximum priority": ("replay.initial_priority=maximum",),
    "one-step returns": ("algorithm.n_step=1",),
    "single Q": ("algorithm.double_q=false",),
    "one epsilon": ("actor.epsilon_exponent=0", "actor.base_epsilon=0.05"),
    "two actor processes": ("actor.processes=2", "actor.environments={half}"),
}
DPG: dict[str, tuple[str, ...]] = {
    "Ape-X DPG": (),
    "uniform replay": ("replay.priority_exponent=0",),
    "one-step returns": ("algorithm.n_step=1",),
    "one noise": ("actor.largest_noise=0.3", "actor.smallest_noise=0.3"),
    "no normalization": ("network.normalize_observations=false",),
    "no layer normalization": ("network.layer_norm=false",),
}
VARIANTS = {"dqn": DQN, "dpg": DPG}
COLUMNS = 3  # of panels
GRID = 200  # positions of a curve, for its mean


def main() -> None:
    """Trains the missing runs and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="of Ape-X itself (configs/mountain_car.yaml)")
    parser.add_argument("--updates", type=int, default=40_000, help="of each run (40000)")
    parser.add_argument(
        "--seeds", type=int, default=3, choices=range(1, 101), metavar="N", help="runs of each variant (3)"
    )
    parser.add_argument("--directory", type=Path, default=Path("runs/ablations"), help="of the runs (runs/ablations)")
    parser.add_argument(
        "--publish", type=Path, default=Path("results/ablations"), help="of the result (results/ablations)"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--agent", choices=VARIANTS, default="dqn", help="whose parts are removed (dqn)")
    parser.add_argument("--without", nargs="+", metavar="PART", help="the names of the variants to train (all)")
    arguments = parser.parse_intermixed_args()
    variants = VARIANTS[arguments.agent]
    if arguments.without is not None:
        if arguments.publish == parser.get_default("publish"):
            parser.error("--without needs another --publish: that folder has the runs of all variants")
        names = [next(iter(variants)), *arguments.without]
        if unknown := set(arguments.without) - set(list(variants)[1:]):
            parser.error(f"--without {' '.join(sorted(unknown))}: choose from {', '.join(map(repr, variants))}")
        variants = {name: variants[name] for name in names}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    half = load(arguments.config).actor.environments // 2
    files = {name: arguments.publish / file_of(name) for name in variants}
    lines: dict[str, list[str]] = {name: [] for name in variants}
    for seed in range(1, arguments.seeds + 1):  # so that an interrupted series has the same seeds of every variant
        for name, changes in variants.items():
            directory = arguments.directory / f"{name.replace(' ', '_')}-{seed}"
            changed = [change.format(half=half) for change in changes]
            limits = [f"total_updates={arguments.updates}", "total_minutes=0", "processes=many"]
            limits += [f"seed={seed}", f"run_directory={directory}"]
            overrides = [*arguments.overrides, *changed, *limits]
            line = published_line(files[name], arguments.config, overrides)
            if line is None and updates_of(directory) < arguments.updates:
                print(f"{name}, seed {seed}: {arguments.updates} updates in {directory}", flush=True)
                train(directory, ["--config", str(arguments.config), *overrides])
            lines[name].append(line or packed_line(directory))
    arguments.publish.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        path.write_text("".join(lines[name]))
    groups = groups_of([f"{name}={path}" for name, path in files.items()])
    draw(groups, arguments.publish / "ablations.png")
    (arguments.publish / "table.md").write_text(table(groups) + "\n")
    print(table(groups))


def published_line(path: Path, config: Path, overrides: Sequence[str]) -> str | None:
    """Returns the packed run of these settings, in whatever directory it ran, in a published file; or None."""
    loaded = load(config, list(overrides))
    settings = json.loads(json.dumps({name: value_of(loaded, name) for name in SETTINGS}))
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        ran = json.loads(line)["config"]
        chosen = {name: ran[name] for name in ("run_directory", "actor.processes") if name in ran}  # by each start
        if ran == settings | chosen:
            return line
    return None


def draw(groups: Sequence[Group], path: Path) -> None:
    """Draws each group except the first over frames, in its own panel with the first group in grey behind it."""
    first, *others = groups
    figure = Figure(figsize=(11, 3.1 * -(-len(others) // COLUMNS)), dpi=100, layout="constrained")
    panels = figure.subplots(-(-len(others) // COLUMNS), COLUMNS, sharex=True, sharey=True, squeeze=False)
    for i, panel in enumerate(panels.flat):
        panel.set_visible(i < len(others))
        panel.grid(alpha=0.3)
        panel.set(xlabel=AXES["frames"], ylabel="return")
        panel.ticklabel_format(useOffset=False)
        panel.label_outer()
    for panel, group in zip(panels.flat, others, strict=False):
        draw_group(panel, "frames", first, "#999999", normalized=False)
        draw_group(panel, "frames", group, "#0072B2", normalized=False)
        panel.set_title(group.label, fontsize="medium")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    texts = [labels[0], "the same, changed as the title says"]
    figure.legend(handles, texts, loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path)


def file_of(variant: str) -> str:
    """Returns the name of the file that holds the runs of a variant."""
    return f"{variant.replace(' ', '_')}.jsonl"


def table(groups: Sequence[Group]) -> str:
    """Returns a Markdown table of how early and how far each group learned, compared with the first group.

    Early is the mean of a run's curve over frames, far its last evaluation. A cell has the interquartile mean of the
    runs, or its difference to that of the first group, with the bootstrap interval.
    """
    less_than_first = f"difference to {groups[0].label}"
    header = ("", "runs", "mean over the run", less_than_first, "last evaluation", less_than_first)
    rows: list[tuple[str, ...]] = [header, ("---", "--:", "--:", "--:", "--:", "--:")]
    frames = [run.evaluation.frames for group in groups for run in group.runs]
    grid = np.linspace(max(each[0] for each in frames), min(each[-1] for each in frames), GRID)
    early = [np.array([held(run.evaluation, "frames", grid).mean() for run in group.runs]) for group in groups]
    last = [np.array([run.evaluation.returns[-1] for run in group.runs]) for group in groups]
    for number, group in enumerate(groups):
        cells = []
        for values in (early, last):
            cells += [_interval(values[number]), _difference(values[number], values[0]) if number else ""]
        rows.append((group.label, str(len(group.runs)), *cells))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _interval(values: np.ndarray) -> str:
    low, high = bootstrap_interval([values], interquartile_mean, np.random.default_rng(0))
    return f"{interquartile_mean(values):.0f} [{low:.0f}, {high:.0f}]"


def _difference(values: np.ndarray, base: np.ndarray) -> str:
    def less(drawn: np.ndarray) -> np.ndarray:
        return interquartile_mean(drawn[: len(values)]) - interquartile_mean(drawn[len(values) :])

    low, high = bootstrap_interval([values, base], less, np.random.default_rng(0))
    return f"{less(np.concatenate([values, base])):+.0f} [{low:+.0f}, {high:+.0f}]"


def updates_of(directory: Path) -> float:
    """Returns how many updates the run has made."""
    path = directory / "metrics" / "learner.jsonl"
    lines = read_metrics(path) if path.exists() else []
    return max((line.get("learner/updates") or 0.0 for line in lines), default=0.0)


def train(directory: Path, overrides: list[str]) -> None:
    """Trains to the end of the run; exits if it fails or is interrupted."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "output.log", "ab") as log:
        command = [sys.executable, str(MAIN), *overrides]
        # In its own session, so that Ctrl-C reaches it only through this process.
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        exit_code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # makes it save a checkpoint
        exit_code = process.wait()
    if exit_code:
        sys.exit(f"main.py ended with exit code {exit_code}; see {directory / 'output.log'}")


if __name__ == "__main__":
    main()
