"""`apex_jax.train`: the same run as the command's, from a program, a notebook's thread or a sweep."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apex_jax
from apex_jax.host.errors import UsageError
from apex_jax.run.evaluations import PlayedGames

SMALL: dict[str, Any] = {
    "evaluator": {"episodes": 2, "interval_updates": 8},
    "network": {"hidden_units": 32},
    "replay": {"min_size_to_sample": 500},
    "total_updates": 40,
}


@pytest.mark.timeout(200)
def test_run_is_returned_with_its_evaluations_and_policy_from_any_thread(tmp_path: Path) -> None:
    seen, runs = list[PlayedGames](), list[Any]()

    def train() -> None:
        runs.append(
            apex_jax.train(
                "cartpole", seed=3, run_directory=str(tmp_path / "run"), callback=seen.append, progress=False, **SMALL
            )
        )

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    [run] = runs
    assert run.directory == tmp_path / "run"
    assert run.config.seed == 3
    assert [games.updates for games in run.evaluations] == [games.updates for games in seen]
    assert run.evaluations[-1].updates >= 40
    assert len(run.evaluations) >= 4
    assert run.policy([0.0, 0.0, 0.1, 0.0]) in (0, 1)
    again = apex_jax.train("cartpole", seed=3, run_directory=str(tmp_path / "run"), progress=False, **SMALL)
    assert len(again.evaluations) == len(run.evaluations), "the limit had been reached"


class PrunedError(Exception):
    pass


@pytest.mark.long
@pytest.mark.timeout(200)
def test_callback_ends_the_run_by_its_result_or_an_exception(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def second(games: PlayedGames) -> bool:
        assert games.returns.dtype == np.float64
        return games.updates >= 16

    settings = {**SMALL, "total_updates": 10_000}
    run = apex_jax.train("cartpole", run_directory=str(tmp_path / "run"), callback=second, **settings)
    assert [games.updates for games in run.evaluations] == [8, 16]
    assert run.policy.updates == 16
    assert "16 updates; best " in capsys.readouterr().out, "a bar shows the progress"

    def prune(games: PlayedGames) -> bool:
        raise PrunedError

    with pytest.raises(PrunedError):
        apex_jax.train("cartpole", run_directory=str(tmp_path / "pruned"), callback=prune, progress=False, **settings)


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_all_roles_run_as_processes_on_request(tmp_path: Path) -> None:
    settings = {**SMALL, "total_updates": 0, "evaluator": {"episodes": 2, "interval_seconds": 0.0}}
    run = apex_jax.train(
        "cartpole",
        processes="many",
        run_directory=str(tmp_path / "run"),
        callback=lambda games: games.updates > 0,
        **settings,
    )
    assert run.evaluations[-1].updates > 0
    assert run.policy.updates > 0


@pytest.mark.parametrize(("settings", "message"), [
    ({"lerner": {}}, "unknown key lerner"),
    ({"learner": {"batch_size": 0}}, "learner.batch_size=0: must be 1 to"),
    ({"learner": 3}, "is a group of keys"),
])  # fmt: skip
def test_wrong_settings_are_a_usage_error_of_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        apex_jax.train("cartpole", **settings)
