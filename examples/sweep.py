"""A search for settings with Optuna: ten trials of CartPole, in five minutes on two cores.

    pip install optuna
    python examples/sweep.py                # --trials 30 --updates 10000 for a longer search

A trial is a run in this process, with settings that Optuna chooses. It is pruned, that is, ended early, if after as
many updates as now most earlier trials had a higher return.
"""

import argparse
import sys
import time
from pathlib import Path

import optuna

sys.path.append(str(Path(__file__).parents[1]))  # finds apex_jax in a checkout, if it is not installed

import apex_jax
from apex_jax.run.evaluations import Evaluation


def train(trial: optuna.Trial, updates: int, directory: Path) -> float:
    """Returns the mean return of the run's last evaluation. Raises optuna.TrialPruned."""

    def report(games: Evaluation) -> None:
        trial.report(float(games.returns.mean()), games.updates)
        if trial.should_prune():
            raise optuna.TrialPruned  # ends the run

    run = apex_jax.train(
        "cartpole",
        callback=report,
        run_directory=str(directory / f"trial-{trial.number}"),
        total_updates=updates,
        learner={"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)},
        algorithm={"n_step": trial.suggest_categorical("n_step", [1, 3, 5])},
    )
    return float(run.evaluations[-1].returns.mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Searches for settings of CartPole with Optuna.")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--updates", type=int, default=8000, help="of a trial")
    arguments = parser.parse_args()
    directory = Path("runs", time.strftime("sweep-%Y%m%d-%H%M%S"))  # a new one: a run that was trained is resumed
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1), pruner=pruner)
    study.optimize(lambda trial: train(trial, arguments.updates, directory), arguments.trials)
    best = study.best_trial
    where = directory / f"trial-{best.number}"
    print(f"best of {arguments.trials} trials: {where}, return {best.value}, {best.params}")
