"""Races apex_jax against what people would install instead: one task, the same cores, one run after another.

    python -m benchmarks.race CartPole-v1 --against sb3.PPO,sbx.DQN --seeds 3
    python -m benchmarks.race gymnasium:my_file:MyEnv --minutes 5 --ours "--config cartpole"

Peers (sb3.PPO, sb3_contrib.TQC, sbx.DQN, rejax.ppo) get a virtual environment apart, and the settings that their
authors publish for the task (race.yaml has them, with sources). Every run counts from its command on, start-up and
compilation included. The clock of a peer stands still while it is evaluated; ours plays its evaluations beside the
training. torch has one thread, with which it is fastest on tasks of this size. A finished run is not repeated. The
result is a file of runs, a table and a picture of return against time and steps under results/race/.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from apex_jax.plotting.curves import Group, Run, read_packed
from apex_jax.plotting.plot import draw_groups
from benchmarks.report import finish, say, target
from results.publish import packed_line

FOLDER = Path(__file__).parent
NEVER = float("inf")
MAIN, PEER = FOLDER.parent / "main.py", FOLDER / "race_peer.py"
OURS = "apex_jax"


def main() -> None:
    """Runs what is missing, and writes file, table and picture."""
    arguments = parsed()
    settings = yaml.safe_load((FOLDER / "race.yaml").read_text())
    task = settings["defaults"] | settings["tasks"].get(arguments.task, {})
    peers = {name: task["peers"].get(name, {}) for name in arguments.against or task["peers"]}
    ours = {"": shlex.split(arguments.ours)} if arguments.ours else task["apex_jax"]
    minutes = arguments.minutes or task.get("minutes", 60.0)
    directory = arguments.directory / arguments.task.replace("/", "-").replace(":", "-")
    runs: dict[str, list[Path]] = {}
    for seed in range(1, arguments.seeds + 1):  # so that an interrupted race has the same seeds of each
        for how, words in ours.items():
            name = f"{OURS}, {how}" if how else OURS
            runs.setdefault(name, []).append(run_ours(directory, name, seed, [*words, *ours_limits(arguments, words)]))
        for name, values in peers.items():
            python = environment(arguments.directory, name.partition(".")[0], settings["environments"])
            limits = ["--seconds", str(60 * minutes), "--every", str(task["every"]), "--settings", json.dumps(values)]
            command = [str(python), str(PEER), "--peer", name, "--task", task.get("id", arguments.task), *limits]
            runs.setdefault(name, []).append(run_peer(directory, name, seed, command))
    path = arguments.publish / f"{directory.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(packed(name, run, arguments.task) for name, of in runs.items() for run in of))
    groups = groups_of(path)
    draw_groups(groups, path.with_suffix(".png"))
    path.with_suffix(".md").write_text(table(groups, task["mark"]) + "\n")
    print(table(groups, task["mark"]))
    medians = {group.label: median(seconds_to(group.runs, task["mark"])) for group in groups}
    peer = min((seconds for name, seconds in medians.items() if not name.startswith(OURS)), default=NEVER)
    first = min(seconds for name, seconds in medians.items() if name.startswith(OURS))
    figures = {name: None if seconds == NEVER else seconds for name, seconds in medians.items()}
    targets = {"median seconds, the best peer's": target(first, at_most=peer)} if max(first, peer) < NEVER else {}
    finish(f"race {arguments.task}", {"median seconds to the mark": figures}, targets)


def parsed() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="one of race.yaml, or gymnasium:MODULE:CLASS of your own")
    parser.add_argument("--against", type=lambda text: text.split(","), metavar="PEER,...", help="such as sbx.PPO")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--minutes", type=float, help="the most of a run, evaluations of peers not counted (race.yaml)")
    parser.add_argument("--ours", default="", metavar="ARGUMENTS", help="of main.py, in place of those of race.yaml")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/race"), help="of runs and environments (runs/race)"
    )
    parser.add_argument("--publish", type=Path, default=Path("results/race"), help="of the result (results/race)")
    return parser.parse_args()


def ours_limits(arguments: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Returns the settings that name the task and end our run, unless its own do."""
    limits = [] if "--config" in words and not arguments.ours else [f"environment.task={arguments.task}"]
    return limits + ([f"total_minutes={arguments.minutes}", "total_updates=0"] if arguments.minutes else [])


def environment(directory: Path, family: str, environments: Mapping[str, Mapping[str, Sequence[str]]]) -> Path:
    """Returns the Python of a family's virtual environment, which is made if it is missing."""
    name = next((name for name, its in environments.items() if family in its["families"]), None)
    if name is None:
        known = [family for its in environments.values() for family in its["families"]]
        sys.exit(f"{family}: no such family of peers; choose from {', '.join(known)}")
    packages = environments[name]["packages"]
    folder = directory / "environments" / name
    python = (folder / "bin" / "python").absolute()
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text() != "\n".join(packages):
        say(f"installing {', '.join(packages)} in {folder}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        installed.write_text("\n".join(packages))
    return python


# Runs ----------------------------------------------------------------------------------------------------------------


def run_ours(directory: Path, name: str, seed: int, words: Sequence[str]) -> Path:
    """Returns the directory of our run, after training it unless it is complete."""
    run = directory / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
    train(run, [sys.executable, str(MAIN), *words, f"seed={seed}", f"run_directory={run}"], name, seed)
    return run


def run_peer(directory: Path, name: str, seed: int, command: Sequence[str]) -> Path:
    """Returns the directory of a peer's run, after training it unless it is complete."""
    run = directory / f"{name}-{seed}"
    train(run, [*command, "--seed", str(seed), "--began", str(time.time()), str(run)], name, seed)
    return run


def train(run: Path, command: Sequence[str], name: str, seed: int) -> None:
    """Runs a command unless it has ended well before; exits if it fails."""
    done = run / "began.txt"
    if done.exists():
        return
    say(f"{name}, seed {seed}")
    shutil.rmtree(run, ignore_errors=True)  # half a run
    run.mkdir(parents=True)
    variables = dict(os.environ) if name.startswith(OURS) else os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.time()
    with open(run / "output.log", "wb") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=variables).returncode
    if code:
        sys.exit(f"{name} ended with exit code {code}; see {run / 'output.log'}")
    done.write_text(str(began))


def packed(name: str, run: Path, task: str) -> str:
    """Returns the packed line of a run, under the competitor's name; its clock begins with its command."""
    line = json.loads(packed_line(run))
    line["name"] = name
    line["starts"][0] |= {"time": float((run / "began.txt").read_text()), "task": task}
    return json.dumps(line, ensure_ascii=False) + "\n"


# Result --------------------------------------------------------------------------------------------------------------


def groups_of(path: Path) -> list[Group]:
    """Returns the runs of each competitor in a file of a race, in its order."""
    names: dict[str, list[Run]] = {}
    for run in read_packed(path):
        names.setdefault(run.directory, []).append(run)
    return [Group(name, runs) for name, runs in names.items()]


def seconds_to(runs: Sequence[Run], mark: float) -> list[float]:
    """Returns when each run first had a mean return of at least `mark`; infinity for a run that never had."""
    seconds = []
    for run in runs:
        above = run.evaluation.returns >= mark
        seconds.append(float(60 * run.evaluation.minutes[above.argmax()]) if above.any() else NEVER)
    return seconds


def median(values: Sequence[float]) -> float:
    """Returns the median, infinity if half of the values are."""
    return sorted(values)[len(values) // 2]


def table(groups: Sequence[Group], mark: float) -> str:
    """Returns a Markdown table: when each run had the mark, and where the runs ended."""
    rows = [("", "runs", f"seconds to {mark:g}", "at the end: mean (range)", "seconds", "steps")]
    rows.append(("---", "--:", "--:", "--:", "--:", "--:"))
    for group in groups:
        seconds = ", ".join("never" if value == NEVER else f"{value:.0f}" for value in seconds_to(group.runs, mark))
        last = np.array([run.evaluation.returns[-1] for run in group.runs])
        ends = f"{last.mean():.0f} ({last.min():.0f} to {last.max():.0f})"
        minutes = np.mean([run.evaluation.minutes[-1] for run in group.runs])
        steps = np.mean([run.evaluation.frames[-1] for run in group.runs])
        rows.append((group.label, str(len(group.runs)), seconds, ends, f"{60 * minutes:.0f}", f"{steps:,.0f}"))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    main()
