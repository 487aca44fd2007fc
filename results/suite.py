"""Trains one configuration on several Atari games, and says in one number how well it plays them.

    python -m results.suite atari_cpu --minutes 15                              # Boxing, Breakout, SpaceInvaders
    python -m results.suite one_step --minutes 15 --against results/suite/atari_cpu.jsonl algorithm.n_step=1

Game after game is trained for so many minutes, or updates; then the last params of each run play 30 full games, off the
clock, with one random action in a hundred, since greedy games of Atari are much alike: the table says how many of the
returns are distinct. The number is the interquartile mean (IQM) of the human-normalised scores of all runs: 0 is random
play, 1 a human tester. The returns of training games stand beside it: they are of params that keep changing, while 30
games of a game without chance can be seven different ones.
What has run is not run again, so that an interrupted suite goes on; the result is one line a run in --publish, a
picture, and a table.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from apex_jax.environments.atari_scores import ATARI_SCORES, human_normalized_score
from apex_jax.host.disk import atomic_write
from apex_jax.plotting.curves import CONFIDENCE, RESAMPLES, Run, interquartile_mean, read_run
from apex_jax.plotting.plot import COLORS
from apex_jax.run.checkpoint_files import checkpoint_steps
from apex_jax.run.evaluations import best_evaluation
from apex_jax.run.metrics import EPSILON_BANDS
from results.ablations import train

GAMES = ("Boxing", "Breakout", "SpaceInvaders")  # for choosing settings; others are for reporting what was chosen
EPISODES, EPSILON = 30, 0.01
STATISTICS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "IQM": interquartile_mean,
    "median": lambda scores: np.median(scores, axis=0),
    "mean": lambda scores: np.mean(scores, axis=0),
}


class Played(NamedTuple):
    """What the last params of a run have played."""

    game: str  # without its version: a key of ATARI_SCORES
    seed: int
    frames: float  # emulator frames of the run
    minutes: float  # of the run
    updates: int
    returns: list[float]  # of full games, raw rewards
    training: float | None  # mean return of the training games that explore least, in the last fifth of the frames
    epsilon: float = 0.00164  # of the games; runs before 2026-11-28 do not say it

    @property
    def scores(self) -> np.ndarray:
        """The human-normalised score of each game: float64[games]."""
        return np.array([human_normalized_score(self.game, value) for value in self.returns], np.float64)


def main() -> None:
    """Trains and plays what is missing, writes the result, and prints it."""
    arguments = parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs: list[Played] = []
    for seed in arguments.seeds:  # so that an interrupted suite has the same seeds of every game
        for game in arguments.games:
            directory = arguments.directory / arguments.name / f"{game}-{seed}"
            settings = [
                "--config",
                arguments.config,
                f"environment.task={game}-v5",
                f"seed={seed}",
                *arguments.overrides,
            ]
            runs.append(played(game, seed, directory, [*settings, *limits(arguments), f"run_directory={directory}"]))
    arguments.publish.mkdir(parents=True, exist_ok=True)
    path = arguments.publish / f"{arguments.name}.jsonl"
    if path.exists():  # runs that were published from another machine stay
        new = {(run.game, run.seed) for run in runs}
        runs = [run for run in read(path) if (run.game, run.seed) not in new] + runs
    path.write_text("".join(json.dumps(run._asdict()) + "\n" for run in runs))
    suites: dict[str, Sequence[Played]] = {arguments.name: runs}
    if arguments.against is not None:
        suites = {arguments.against.stem: read(arguments.against), **suites}
    draw(suites, path.with_suffix(".png"))
    print(table(suites))


def parsed() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of what is tried; names its runs and its result")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every run")
    parser.add_argument("--config", default="atari_cpu", help="of every run (atari_cpu)")
    parser.add_argument("--minutes", type=float, default=15.0, help="of each run (15)")
    parser.add_argument(
        "--updates", type=int, help="of each run, in place of --minutes: on a machine that has other work"
    )
    parser.add_argument(
        "--games", nargs="+", default=GAMES, choices=ATARI_SCORES, metavar="GAME", help="such as Boxing"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="SEED", help="of each game (1)")
    parser.add_argument("--directory", type=Path, default=Path("runs/suite"), help="of the runs (runs/suite)")
    parser.add_argument("--publish", type=Path, default=Path("results/suite"), help="of the result (results/suite)")
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier result, to compare with")
    return parser.parse_intermixed_args()


def limits(arguments: argparse.Namespace) -> list[str]:
    """Returns the settings that end each run."""
    minutes, updates = (arguments.minutes, 0) if arguments.updates is None else (0.0, arguments.updates)
    return [f"total_minutes={minutes:g}", f"total_updates={updates}"]


def played(game: str, seed: int, directory: Path, arguments: list[str]) -> Played:
    """Trains a run, plays with its last params, unless both are done, and returns what they have played."""
    if (done := result(game, seed, directory)) is not None:
        return done
    print(f"{game}, seed {seed}: in {directory}", flush=True)
    train(directory, arguments)
    games = [f"episodes={EPISODES}", f"evaluator.epsilon={EPSILON}"]
    train(directory, ["--role", "evaluator", f"checkpoint={directory}", *games])
    done = result(game, seed, directory)
    assert done is not None, f"{directory} holds no evaluation of {EPISODES} games"
    return done


def result(game: str, seed: int, directory: Path) -> Played | None:
    """Returns what the last params of a run have played; None if they have not played all games."""
    updates = max(checkpoint_steps(directory / "checkpoints"), default=0)
    games = best_evaluation(directory, updates)
    if games is None or games.returns.size < EPISODES:
        return None
    run = read_run(directory)
    frames, minutes = run.evaluation.frames[-1], round(run.evaluation.minutes[-1], 2)
    return Played(game, seed, frames, minutes, updates, games.returns.tolist(), last_training(run), games.exploration)


def last_training(run: Run) -> float | None:
    """Returns the mean return of the training games that explore least, in the last fifth of the frames, if any."""
    curve = run.training.get(EPSILON_BANDS.names[0])
    return None if curve is None else round(curve.returns[curve.frames >= 0.8 * curve.frames[-1]].mean(), 2)


def read(path: Path) -> list[Played]:
    """Returns the runs of an earlier result."""
    return [Played(**json.loads(line)) for line in path.read_text().splitlines()]


def resampled(runs: Sequence[Played], rng: np.random.Generator) -> np.ndarray:
    """Returns the scores of runs that are drawn anew, with replacement: the runs of each game, and the games of each.

    float64[runs]. With one run of each game, only the chance of its games is in it, and not that of training.
    """
    scores = []
    for game in dict.fromkeys(run.game for run in runs):
        of_game = [run.scores for run in runs if run.game == game]
        for number in rng.integers(len(of_game), size=len(of_game)):
            values = of_game[number]
            scores.append(values[rng.integers(len(values), size=len(values))].mean())
    return np.array(scores)


def statistic_of(runs: Sequence[Played], statistic: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float, float]:
    """Returns the statistic of the runs' scores, and the ends of its bootstrap interval."""
    rng = np.random.default_rng(0)
    value = statistic(np.array([run.scores.mean() for run in runs]))
    low, high = _interval([float(statistic(resampled(runs, rng))) for _ in range(RESAMPLES)])
    return float(value), low, high


def difference(runs: Sequence[Played], base: Sequence[Played]) -> tuple[float, float, float]:
    """Returns how much larger the mean score of `runs` is than that of `base`, and the ends of its interval."""
    rng, other = np.random.default_rng(0), np.random.default_rng(1)
    value = np.mean([run.scores.mean() for run in runs]) - np.mean([run.scores.mean() for run in base])
    low, high = _interval(
        [float(resampled(runs, rng).mean() - resampled(base, other).mean()) for _ in range(RESAMPLES)]
    )
    return float(value), low, high


def _interval(values: Sequence[float]) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def table(suites: dict[str, Sequence[Played]]) -> str:
    """Returns a Markdown table of one suite, or of two, the second compared with the first.

    A row for each game of the last suite has the mean return of each run, how many of its returns are distinct, and the
    human-normalised score of their mean, the next one the returns in training; a row for each statistic is of the games
    that all suites have.
    """
    names = list(suites)
    games = list(dict.fromkeys(run.game for run in suites[names[-1]]))
    rows = [("", *names, *(["difference"] if len(names) == 2 else []))]
    rows.append(("---", *["--:"] * (len(rows[0]) - 1)))
    for game in games:
        of_game = [[run for run in suites[name] if run.game == game] for name in names]
        cells = [", ".join(map(_games, runs)) + _human(runs) for runs in of_game]
        compared = [_shown(*difference(of_game[1], of_game[0]), sign="+")] if len(names) == 2 and all(of_game) else []
        rows.append((game, *cells, *compared))
        training = [[run.training for run in runs if run.training is not None] for runs in of_game]
        rows.append((f"{game}, in training", *(", ".join(f"{value:.1f}" for value in values) for values in training)))
    shared = set.intersection(*({run.game for run in runs} for runs in suites.values()))
    for statistic, function in STATISTICS.items():
        values = [statistic_of([run for run in suites[name] if run.game in shared], function) for name in names]
        compared = [f"{values[1][0] / values[0][0]:.2f} times"] if len(names) == 2 and values[0][0] > 0 else []
        rows.append((f"{statistic} of human-normalised scores", *(_shown(*value) for value in values), *compared))
    width = len(rows[0])
    return "\n".join("| " + " | ".join([*row, *[""] * (width - len(row))]) + " |" for row in rows)


def _games(run: Played) -> str:
    return f"{np.mean(run.returns):.1f} [{len(set(run.returns))}]"


def _human(runs: Sequence[Played]) -> str:
    return f" ({np.mean([run.scores.mean() for run in runs]):.2f})" if runs else ""


def _shown(value: float, low: float, high: float, sign: str = "") -> str:
    return f"{value:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


def draw(suites: dict[str, Sequence[Played]], path: Path) -> None:
    """Draws the human-normalised score of each game: a bar is the mean of its runs, a dot one of them."""
    games = list(dict.fromkeys(run.game for runs in suites.values() for run in runs))
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(games) * len(suites)), dpi=100, layout="constrained")
    panel, height = figure.subplots(), 0.8 / len(suites)
    for number, (name, runs) in enumerate(suites.items()):
        for row, game in enumerate(games):
            scores = [run.scores.mean() for run in runs if run.game == game]
            place = row + (number - (len(suites) - 1) / 2) * height
            label = name if row == 0 else None
            panel.barh(place, np.mean(scores) if scores else 0.0, height, color=COLORS[number], alpha=0.6, label=label)
            panel.plot(scores, [place] * len(scores), "o", color=COLORS[number], ms=4)
    panel.axvline(1, color="black", lw=0.8, ls=":")
    panel.set(
        yticks=range(len(games)), yticklabels=games, xlabel="human-normalised score (0: random play, 1: a person)"
    )
    panel.invert_yaxis()
    panel.legend(fontsize="small")
    with atomic_write(path) as half:
        figure.savefig(half)


if __name__ == "__main__":
    main()
