"""Races apex_jax against what people would install instead: one task, the same cores, one run after another.

    python -m benchmarks.race CartPole-v1 --against sb3.PPO,sbx.DQN --seeds 3
    python -m benchmarks.race gymnasium:my_file:MyEnv --minutes 5 --ours "--config cartpole"

Peers (sb3.PPO, sb3_contrib.TQC, sbx.DQN, rejax.ppo) get a virtual environment apart, and the settings that their
authors publish for the task (race.yaml has them, with sources). Every run counts from its command on, start-up and
compilation included; apex_jax keeps compiled programs from its first run for the others, as it does for a user, into a
cache that begins empty. All play evaluations of 20 games about equally often. The clock of a peer, and of ours in one
process, stands still in them; ours in many processes plays them beside the training. Limits: of a peer, minutes from
its command on; of ours, from its first update on. torch has one thread, with which it is fastest on tasks of this size.

A finished run is not repeated; a run that fails is left out, and the exit code is 1. The result is a file of runs, a
table, and a picture of return against time and steps under results/race/.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from apex_jax.plotting.curves import Group, Run, read_packed
from apex_jax.plotting.plot import draw_groups
from apex_jax.run.evaluations import return_text
from benchmarks.race_peer import GAMES
from benchmarks.report import finish, say
from results.publish import packed_line

FOLDER = Path(__file__).parent
NEVER = float("inf")
MAIN, PEER = FOLDER.parent / "main.py", FOLDER / "race_peer.py"
OURS, DONE = "apex_jax", "race.json"


def main() -> None:
    """Trains the missing runs, and writes file, table and picture."""
    arguments = parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = yaml.safe_load((FOLDER / "race.yaml").read_text())
    task = settings["defaults"] | settings["tasks"].get(arguments.task, {})
    directory = arguments.directory / arguments.task.replace("/", "-").replace(":", "-")
    commands = ours(arguments, task) | peers(arguments, task, settings["environments"])
    runs: list[tuple[str, int, Path]] = []
    failed = []
    for seed in range(1, arguments.seeds + 1):  # so that an interrupted race has the same seeds of each
        for name, command in commands.items():
            run = directory / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
            of_run = f"run_directory={run}" if name.startswith(OURS) else str(run)
            seeded = [f"seed={seed}"] if name.startswith(OURS) else ["--seed", str(seed)]
            if train(run, [*command, *seeded, of_run], name, seed):
                runs.append((name, seed, run))
            else:
                failed.append(f"{name}, seed {seed}")
    path = arguments.publish / f"{directory.name}.jsonl"
    publish(path, runs, arguments.task)
    groups = groups_of(path)
    draw_groups(groups, path.with_suffix(".png"))
    path.with_suffix(".md").write_text(table(groups, task["mark"]) + "\n")
    print(table(groups, task["mark"]))
    finish(f"race {arguments.task}", {"failed": failed}, targets(groups, task["mark"]))
    sys.exit(1 if failed else 0)


def parsed() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="one of race.yaml, or, with --ours, gymnasium:MODULE:CLASS of your own")
    parser.add_argument("--against", type=lambda text: text.split(","), metavar="PEER,...", help="such as sbx.PPO")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--minutes", type=float, help="the most of a run (race.yaml)")
    parser.add_argument("--ours", default="", metavar="ARGUMENTS", help="of main.py, in place of those of race.yaml")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/race"), help="of runs and environments (runs/race)"
    )
    parser.add_argument("--publish", type=Path, default=Path("results/race"), help="of the result (results/race)")
    return parser.parse_args()


# Commands ------------------------------------------------------------------------------------------------------------


def ours(arguments: argparse.Namespace, task: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns our commands by name, without seed and run directory; exits if the task has none."""
    ways = {"": shlex.split(arguments.ours)} if arguments.ours else task["apex_jax"]
    if not ways:
        sys.exit(f"{arguments.task} is not in race.yaml: give --ours, such as --ours '--config cartpole'")
    evaluations = [] if "steps" in task["every"] else [f"evaluator.interval_seconds={task['every']['seconds']}"]
    limits = [f"evaluator.episodes={GAMES}", *evaluations]
    if arguments.ours:
        limits += [f"environment.task={arguments.task}"]
    if minutes := arguments.minutes or (task["minutes"] if arguments.ours else None):
        limits += [f"total_minutes={minutes}", "total_updates=0"]
    command = [sys.executable, str(MAIN)]
    return {f"{OURS}, {how}" if how else OURS: [*command, *words, *limits] for how, words in ways.items()}


def peers(
    arguments: argparse.Namespace, task: Mapping[str, Any], environments: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Returns the commands of the peers by name, without seed and directory; makes their environments."""
    commands = {}
    for name in arguments.against or task["peers"]:
        python = environment(arguments.directory, name.partition(".")[0], environments)
        limits = ["--seconds", str(60 * (arguments.minutes or task["minutes"])), "--every", json.dumps(task["every"])]
        settings = ["--settings", json.dumps(task["peers"].get(name, {}))]
        identity = ["--peer", name, "--task", task.get("id", arguments.task)]
        commands[name] = [str(python), str(PEER), *identity, *limits, *settings]
    return commands


def environment(directory: Path, family: str, environments: Mapping[str, Any]) -> Path:
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


def train(run: Path, command: Sequence[str], name: str, seed: int) -> bool:
    """Runs a command unless it has ended well before; returns whether it has. Exits if another one made the run."""
    done = run / DONE
    if done.exists():
        if json.loads(done.read_text())["command"] != list(command):
            sys.exit(f"{run} is of another command: remove it, or give another --directory")
        return True
    say(f"{name}, seed {seed}")
    shutil.rmtree(run, ignore_errors=True)  # half a run
    run.mkdir(parents=True)
    cache = (run.parent / "cache").absolute()
    variables = os.environ | ({"XDG_CACHE_HOME": str(cache)} if name.startswith(OURS) else {"OMP_NUM_THREADS": "1"})
    began = time.time()
    with open(run / "output.log", "wb") as log:
        program = subprocess.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True)
    try:
        code = program.wait()
    except KeyboardInterrupt:
        program.send_signal(signal.SIGINT)
        program.wait()
        sys.exit(130)
    if code:
        say(f"{name}, seed {seed}, ended with exit code {code}: see {run / 'output.log'}")
        return False
    done.write_text(json.dumps({"began": began, "command": list(command)}))
    return True


def publish(path: Path, runs: Sequence[tuple[str, int, Path]], task: str) -> None:
    """Writes the runs, (name, seed, directory), into the file of a race; other runs that it holds stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = {(name, seed): packed(name, run, task) for name, seed, run in runs}
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    old = {(line["name"], line["starts"][0]["seed"]): text for text in lines for line in [json.loads(text)]}
    path.write_text("".join((old | new).values()))


def packed(name: str, run: Path, task: str) -> str:
    """Returns the packed line of a run, under the competitor's name; its clock begins with its command."""
    line = json.loads(packed_line(run))
    if line["config"].get("processes") == "one":
        played = 0.0
        for evaluation in line["metrics"]["evaluator"]:
            played += evaluation["eval/seconds"]
            evaluation["time"] -= played
    line["name"] = name
    line["starts"][0] |= {"time": json.loads((run / DONE).read_text())["began"], "task": task}
    return json.dumps(line, ensure_ascii=False) + "\n"


# Result --------------------------------------------------------------------------------------------------------------


def groups_of(path: Path) -> list[Group]:
    """Returns the runs of each competitor in a file of a race, in its order."""
    names: dict[str, list[Run]] = {}
    for run in read_packed(path):
        names.setdefault(run.directory, []).append(run)
    return [Group(name, runs) for name, runs in names.items()]


def seconds_to(runs: Sequence[Run], mark: float) -> list[float]:
    """Returns when each run first had a mean return of at least `mark`; NEVER for a run that had none."""
    seconds = []
    for run in runs:
        above = run.evaluation.returns >= mark
        seconds.append(float(60 * run.evaluation.minutes[above.argmax()]) if above.any() else NEVER)
    return seconds


def targets(groups: Sequence[Group], mark: float) -> dict[str, Any]:
    """Returns the target: our median seconds to the mark are at most those of the fastest peer; None: never."""
    medians = {group.label: statistics.median(seconds_to(group.runs, mark)) for group in groups}
    first, peer = (
        min((value for name, value in medians.items() if name.startswith(OURS) == is_ours), default=NEVER)
        for is_ours in (True, False)
    )
    shown = {"measured": first, "at_most": peer}
    found = {name: round(value, 1) if value < NEVER else None for name, value in shown.items()}
    return {
        f"our median seconds to {mark:g}, and the fastest peer's": {**found, "met": first < NEVER and first <= peer}
    }


def table(groups: Sequence[Group], mark: float) -> str:
    """Returns a Markdown table: when each run had the mark, and where the runs ended."""
    rows = [("", "runs", f"seconds to {mark:g}", "at the end: mean (range)", "seconds", "steps")]
    rows.append(("---", "--:", "--:", "--:", "--:", "--:"))
    for group in groups:
        found = seconds_to(group.runs, mark)
        seconds = ", ".join("never" if value == NEVER else f"{value:.0f}" for value in found)
        last = np.array([run.evaluation.returns[-1] for run in group.runs])
        mean, low, high = (return_text(round(float(value), 1)) for value in (last.mean(), last.min(), last.max()))
        minutes = np.mean([run.evaluation.minutes[-1] for run in group.runs])
        steps = np.mean([run.evaluation.frames[-1] for run in group.runs])
        ends = f"{mean} ({low} to {high})"
        rows.append((group.label, str(len(group.runs)), seconds, ends, f"{60 * minutes:.0f}", f"{steps:,.0f}"))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    main()
