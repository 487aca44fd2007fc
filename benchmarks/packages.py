"""Environments of other packages: each is installed, played against a plain rollout, and trained for two minutes.

    python -m benchmarks.packages --folder /tmp/packages crafter procgen     # some of packages.yaml; or all, for hours
    python -m benchmarks.packages --table                                    # writes the table of docs/environments.md

A package has a virtual environment of its own in the folder, where `environment.python` plays it; those written in JAX
are played in this program's. The rollout has the same seed and actions; it compares all observations, the last ones of
episodes included, rewards and ends; if some differ, two plain rollouts are compared. Rows are kept in packages.jsonl,
a package has the newest of its tasks, with the means of all their runs.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from apex_jax.config.load import load
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.run.metrics import read_metrics
from apex_jax.types import MASK, named_parts
from benchmarks import package_wrappers
from benchmarks.page import of_git
from benchmarks.report import finish, say, target
from benchmarks.workers import random_actions

ROOT = Path(__file__).parents[1]
ROWS, RESULTS = (Path(__file__).with_suffix(ending) for ending in (".yaml", ".jsonl"))
PAGE = ROOT / "docs" / "environments.md"
BEGIN, END = "<!-- made by python -m benchmarks.packages --table -->\n", "<!-- end -->\n"
STEPS, SECONDS, SEED = 10_000, 30.0, 1  # of rollouts
SAME = "package", "task", "settings", "options"  # of runs whose mean is taken
INTERVAL = 2  # seconds, of the learner's metrics


def main() -> None:
    """Tries the packages that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="names of packages.yaml; none = all")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/packages"), help="of the virtual environments")
    parser.add_argument("--minutes", type=float, default=2.0, help="of training; 0 = none, and no row is kept")
    parser.add_argument("--table", action="store_true", help="only writes the table")
    arguments = parser.parse_args()
    if arguments.table:
        PAGE.write_text(with_table(PAGE.read_text()))
        return
    rows = [
        row
        for row in yaml.safe_load(ROWS.read_text())
        if not arguments.packages or row["package"] in arguments.packages
    ]
    for row in rows:
        seen = tried(row, arguments.folder.resolve(), arguments.minutes)
        say(json.dumps(seen))
        if arguments.minutes:
            with RESULTS.open("a") as file:
                file.write(json.dumps(seen) + "\n")
    trained = sum(row.get("after") is not None for row in records().values())
    finish("packages", {"rows": len(records())}, {"trained": target(trained, at_least=30)})


def tried(row: dict[str, Any], folder: Path, minutes: float) -> dict[str, Any]:
    """Returns the row of a package, with the last line of what failed as `error`."""
    seen = {"commit": of_git("describe", "--always"), "package": row["package"], "task": row["task"]}
    seen |= {"settings": row.get("settings", {}), "options": row.get("options", [])}
    try:
        home = folder / row["package"]
        is_jax = row["task"].startswith("jax:")
        installed(row, home)
        seen |= {"version": version_of(row, home), "python": row.get("python", "")}
        os.environ.update(row.get("variables", {}))
        settings = [f"environment.task={row['task']}", f"environment.settings={json.dumps(row.get('settings', {}))}"]
        settings += row.get("options", [])
        if not is_jax:
            settings.append(f"environment.python={home / 'bin' / 'python'}")
            seen |= compared(row, settings, home)
        else:
            code = f"from benchmarks.packages import random_return; print(random_return({settings}))"
            seen["random"] = float(run([str(home / "bin" / "python"), "-c", code]).splitlines()[-1])
        return seen | (after_training(row, settings, home, minutes) if minutes else {})
    except subprocess.CalledProcessError as error:
        return seen | {"error": (str(error.stderr).strip().splitlines() or [str(error)])[-1][:300]}
    except Exception as error:
        return seen | {"error": str(error)[:300]}


def run(command: list[str], **options: Any) -> str:
    """Returns what a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, **options).stdout


def installed(row: dict[str, Any], home: Path) -> None:
    """Installs a package into its virtual environment, unless it is there."""
    if (home / "installed").exists():
        return
    if row["task"].startswith("jax:"):
        run([sys.executable, "-m", "venv", str(home)])
        of_program = next(path for path in sys.path if path.endswith("site-packages"))
        [own] = home.glob("lib/python*/site-packages")
        (own / "program.pth").write_text(f"{of_program}\n")
    else:
        run([f"python{row['python']}", "-m", "venv", str(home)])
    run([str(home / "bin" / "python"), "-m", "pip", "install", "-q", *row["install"]], timeout=900)
    (home / "installed").touch()


def version_of(row: dict[str, Any], home: Path) -> str:
    """Returns the version of a package that is installed."""
    name = row.get("distribution", row["package"])
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return run([str(home / "bin" / "python"), "-c", code]).strip()


def compared(row: dict[str, Any], settings: list[str], home: Path) -> dict[str, Any]:
    """Plays random actions with apex_jax and without; returns the steps, how many differ, and the random score."""
    config = load(None, [*FREE, *settings])
    described = describe(config)
    spec, rng = described.spec.action, np.random.default_rng(SEED)
    actions = random_actions(rng, spec, STEPS)
    np.save(home / "actions.npy", described.scaled(actions))
    module, _, name = row["task"].removeprefix("gymnasium:").rpartition(":")
    given = {"module": module, "name": name, "settings": row.get("settings", {}), "seed": SEED, "seconds": SECONDS}
    given |= {"actions": str(home / "actions.npy"), "result": str(home / "plain.npz")}
    plain = plain_rollout(home, given)
    reward, terminated, truncated, first = plain["others"]
    environment, differ = VectorEnvironment(config, described, np.array([SEED]), 10**9), 0
    try:
        for number, seen in enumerate(plain["observation"]):
            if number:
                environment.send(actions[number : number + 1], np.zeros(1, np.int32))  # ignored if an episode begins
            step = environment.receive()
            parts = {name: part for name, part in named_parts(step.observation).items() if name != MASK}
            found = np.concatenate([part.ravel() for part in parts.values()], dtype=np.float32)
            if len(parts) > 1:
                found, seen = np.sort(found), np.sort(seen)  # the image comes first here
            ends = step.reward[0], step.terminated[0], step.truncated[0], step.first[0]
            expected = np.float32(reward[number]), terminated[number], truncated[number], first[number]
            differ += not (np.array_equal(found, seen) and ends == expected)
    finally:
        environment.close()
    starts = np.flatnonzero(first)
    returns = np.add.reduceat(reward, starts)[: -1 if len(starts) > 1 else None]
    seen = {"steps": len(first), "differ": int(differ), "random": float(np.mean(returns))}
    if differ:
        again = plain_rollout(home, given)["observation"]
        both = min(len(again), len(first))
        seen["repeats"] = bool(np.array_equal(again[:both], plain["observation"][:both]))
    return seen


def random_return(settings: list[str]) -> float:
    """Returns the mean return of random actions in an environment of this program's interpreter."""
    config = load(None, [*FREE, *settings])
    described, rng, count = describe(config), np.random.default_rng(SEED), 16
    environment = VectorEnvironment(config, described, np.arange(count), config.environment.max_episode_frames)
    running, ended = np.zeros(count), []
    for _ in range(STEPS // count):
        step = environment.receive()
        running[step.env_id] += step.reward
        for number in step.env_id[step.terminated | step.truncated]:
            ended.append(running[number])
            running[number] = 0
        environment.send(random_actions(rng, described.spec.action, count), step.env_id)
    environment.close()
    return float(np.mean(ended))


def plain_rollout(home: Path, given: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns what `package_rollout` has seen."""
    run([str(home / "bin" / "python"), str(Path(__file__).parent / "package_rollout.py"), json.dumps(given)])
    return dict(np.load(home / "plain.npz"))


FREE = (  # of the limits of a configuration that is for another task
    f"seed={SEED}",
    "environment.frame_stack=1",
    "environment.frame_skip=1",
    "network.channels=[8]",
    "network.kernel_sizes=[3]",
    "network.strides=[2]",
    "network.normalize_observations=true",
)


def after_training(row: dict[str, Any], settings: list[str], home: Path, minutes: float) -> dict[str, Any]:
    """Trains; returns the seconds until the first update was reported, and the mean of the last evaluation."""
    python = str(home / "bin" / "python") if row["task"].startswith("jax:") else sys.executable
    command = ["main.py", *settings, f"total_minutes={minutes:g}", f"seed={SEED}"]
    directory = home / "run"
    shutil.rmtree(directory, ignore_errors=True)
    started = time.time()
    run([python, *command, f"run_directory={directory}", f"metrics_interval_seconds={INTERVAL}"], timeout=900)
    lines = (directory / "evaluations.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    learner = read_metrics(directory / "metrics" / "learner.jsonl")
    begins = next(line["time"] for line in learner if line["learner/updates"]) - started
    return {"begins": round(begins), "after": last["mean"], "evaluations": len(lines)}


def records() -> dict[str, dict[str, Any]]:
    """Returns the newest row of each package, with the means and number of all runs that trained the same."""
    rows = [json.loads(line) for line in (RESULTS.read_text().splitlines() if RESULTS.exists() else [])]
    newest = {row["package"]: row for row in rows}
    for seen in newest.values():
        alike = [row for row in rows if "after" in row and all(row[name] == seen[name] for name in SAME)]
        numbers = {name: [row[name] for row in alike if name in row] for name in ("begins", "random", "after")}
        seen |= {name: float(np.mean(values)) for name, values in numbers.items() if values} | {"runs": len(alike)}
    return newest


def with_table(page: str) -> str:
    """Returns a page with the table of the kept rows."""
    return re.sub(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", lambda _: table(), page, flags=re.DOTALL)


def table() -> str:
    """Returns the table of the packages that train."""
    given = {row["package"]: row for row in yaml.safe_load(ROWS.read_text())}
    lines = [
        "| package | task, Python | pins | wrapper | steps compared | begins, s | random | two minutes |",
        "|---|---|---|--:|---|--:|--:|--:|",
    ]
    trained = {name: seen for name, seen in sorted(records().items()) if "after" in seen and name in given}
    for name, seen in trained.items():
        settings = [shlex.quote(json.dumps(seen["settings"]))] if seen["settings"] else []
        steps = f"{seen['steps']:,}" if "steps" in seen else ""
        if seen.get("differ"):
            steps += f", {seen['differ']:,} differ" if seen["repeats"] else "; does not repeat itself"
        bold = "**" * (seen["after"] > seen["random"])
        runs = f" ({seen['runs']})" * (seen["runs"] > 1)
        scores = f"{shown(seen['random'])} | {bold}{shown(seen['after'])}{bold}{runs}"
        task = " ".join(f"`{word}`" for word in (seen["task"], *settings, *seen["options"]))
        python = f", {seen['python']}" if seen["python"] else ""
        pins = ", ".join(item for item in given[name]["install"] if re.search("[=<]", item))
        about = f"{pins} | {wrapper_lines(seen['task']) or ''} | {steps} | {round(seen['begins'])}"
        lines.append(f"| {name} {seen['version']} | {task}{python} | {about} | {scores} |")
    better = sum(seen["after"] > seen["random"] for seen in trained.values())
    lines += ["", f"{better} of {len(trained)} scored more than random actions."]
    return "\n".join(lines) + "\n"


def wrapper_lines(task: str) -> int:
    """Returns the lines of the function in `package_wrappers` that makes a task, with those of the class it uses."""
    if package_wrappers.__name__ not in task:
        return 0
    source = inspect.getsource(getattr(package_wrappers, task.rpartition(":")[2]))
    source += inspect.getsource(package_wrappers.Small) * ("Small(" in source)
    return len([line for line in source.splitlines() if line.strip()])


def shown(score: float) -> str:
    """Returns a score with three digits at least."""
    return f"{score:,.0f}" if abs(score) >= 100 else f"{score:.3g}"


if __name__ == "__main__":
    main()
