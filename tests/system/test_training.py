"""`apex_jax.train`: the same run as the command's, from a program, a notebook's thread or a sweep."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apex_jax
from apex_jax import load_policy
from apex_jax.host.errors import RunError, UsageError
from apex_jax.run.evaluations import Evaluation
from apex_jax.workers import one_process
from tests.rigs.processes import ROOT

SMALL: dict[str, Any] = {
    "evaluator": {"episodes": 2, "interval_updates": 8},
    "network": {"hidden_units": 32},
    "replay": {"min_size_to_sample": 500},
    "total_updates": 40,
}


@pytest.mark.timeout(200)
def test_run_is_returned_with_its_evaluations_and_policy_from_any_thread(tmp_path: Path) -> None:
    seen, runs = list[Evaluation](), list[Any]()

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
    others = {**SMALL, "learner": {"batch_size": 32}}
    again = apex_jax.train("cartpole", seed=3, run_directory=str(tmp_path / "run"), progress=False, **others)
    assert len(again.evaluations) == len(run.evaluations), "the limit had been reached"
    assert again.config == run.config, "those that it was trained with"


class PrunedError(Exception):
    pass


@pytest.mark.long
@pytest.mark.timeout(200)
def test_callback_ends_the_run_by_its_result_or_an_exception(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def second(games: Evaluation) -> bool:
        assert games.returns.dtype == np.float64
        return games.updates >= 16

    settings = {**SMALL, "total_updates": 10_000}
    run = apex_jax.train("cartpole", run_directory=str(tmp_path / "run"), callback=second, **settings)
    assert [games.updates for games in run.evaluations] == [8, 16]
    assert run.policy.updates == 16
    assert "16 updates; best " in capsys.readouterr().out, "a bar shows the progress"


@pytest.mark.ci
@pytest.mark.timeout(200)
def test_exception_of_the_callback_and_an_interrupt_are_raised_once_the_run_is_saved(tmp_path: Path) -> None:
    directory = tmp_path / "run"

    def prune(games: Evaluation) -> bool:
        with pytest.raises(UsageError, match="is running in this process already"):
            apex_jax.train("cartpole", **SMALL)
        raise PrunedError

    def interrupt(games: Evaluation) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    settings = {**SMALL, "total_updates": 10_000}
    for updates, callback, error in ((8, prune, PrunedError), (16, interrupt, KeyboardInterrupt)):
        with pytest.raises(error):
            apex_jax.train("cartpole", run_directory=str(directory), callback=callback, progress=False, **settings)
        assert updates <= load_policy(directory).updates < updates + 8
    assert signal.getsignal(signal.SIGINT) is before


SCRIPT = """
import apex_jax
print("begins")
apex_jax.train("cartpole", environment={"task": "gymnasium:CartPole-v1"}, total_updates=8, run_directory="run",
               replay={"min_size_to_sample": 500}, evaluator={"episodes": 1}, progress=False)
print("ends")
"""


@pytest.mark.ci
@pytest.mark.timeout(200)
def test_script_need_not_guard_its_call(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command, path = [sys.executable, "script.py"], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout.split()) == (0, ["begins", "ends"]), done.stderr


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


def test_errors_of_the_system_are_run_errors_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/run cannot be written \(Not a directory\)"):
        apex_jax.train("cartpole", **SMALL, run_directory=str(tmp_path / "file" / "run"), progress=False)

    def fill_the_disk(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(one_process, "train", fill_the_disk)
    with pytest.raises(RunError, match="No space left on device"):
        apex_jax.train("cartpole", **SMALL, run_directory=str(tmp_path / "run"), progress=False)
