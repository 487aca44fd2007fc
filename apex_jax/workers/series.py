"""Runs of one configuration with several seeds on this machine, one after the other, plotted together at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apex_jax.config import Config
from apex_jax.host.disk import write_durably
from apex_jax.process import StopSignal
from apex_jax.run.provenance import check_resumable
from apex_jax.workers import local, one_process


def run(config: Config, seeds: Sequence[int], name: str, stop: StopSignal) -> int:
    """Trains with each seed, then plots; returns the process's exit code.

    A run that has already reached its limit starts no processes. A signal, or the error of one run, ends the series.
    """
    configs = [config.replace(seed=seed) for seed in seeds]
    for each in configs:  # before the first one trains
        check_resumable(each)
    for number, each in enumerate(configs, 1):
        print(f"{'' if number == 1 else chr(10)}Seed {each.seed}, run {number} of {len(configs)}", flush=True)
        run_one = one_process.run if each.processes == "one" else local.run
        exit_code = run_one(each, name, stop)
        if exit_code or stop.is_set():
            return exit_code
    plot(configs)
    return stop.exit_code


def plot(configs: Sequence[Config]) -> None:
    """Draws the runs in one picture beside the first of them, writes their table there, and prints both paths."""
    from apex_jax.plotting.plot import draw_groups, groups_of, table  # imported here: matplotlib takes 1 s

    groups = groups_of([each.directory for each in configs])
    first = configs[0]  # its directory is named <task>-<seed>, without characters that no file name can have
    picture = Path(f"{first.directory.removesuffix(f'-{first.seed}')}-seeds.png")
    draw_groups(groups, picture)
    text = table(groups)
    write_durably(picture.with_suffix(".md"), f"{text}\n")
    print(f"\n{text}\n\nAll seeds:   {picture}, {picture.with_suffix('.md')}", flush=True)
