"""The status, the name and the start of a role, and what the log of its process says of its end."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import zmq

from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.host.errors import RunError, UsageError
from apex_jax.host.program import CONFIGS
from apex_jax.process import StopSignal
from apex_jax.run.environment_spec import record_environment_spec
from apex_jax.run.metrics import read_metrics
from apex_jax.transport.http_link import StatusError, fetch
from apex_jax.transport.security import LINKS
from apex_jax.workers import actor, evaluator, learner, local, role
from apex_jax.workers.local import LOG_TAIL_LINES, RoleProcess
from apex_jax.workers.role import RoleContext, open_role
from tests.rigs.links import free_address
from tests.rigs.storages import run

__all__ = ["run"]


def config_in(folder: Path, *settings: str):  # type: ignore[no-untyped-def]
    return load(CONFIGS / "catch.yaml", [f"run_directory={folder}", *settings])


def test_status_shows_the_last_written_values_and_counts_emulator_frames(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    config = config.replace(environment=config.environment.__class__(task="Pong-v5", frame_skip=4))
    with zmq.Context() as sockets:
        context = RoleContext(config, sockets, "actor")
        context.describe = lambda: {"weights_version": 3}
        context.write_metrics(10, {"charts/episodic_return": 1.0})
        context.write_metrics(25, {"charts/episodic_return": 2.0}, Counter(stale=4))
        report = context.report()
    line = read_metrics(tmp_path / "run" / "metrics" / "actor.jsonl")[-1]
    assert line["step"] == 100
    assert (line["charts/episodic_return"], line["replay/dropped_stale"]) == (2.0, 4.0)
    assert line["system/resident_memory_bytes"] > 1e6
    assert report["weights_version"] == 3
    assert report["metrics"]["replay/dropped_stale"] == 4


def test_role_of_a_local_run_takes_the_description_of_its_supervisor_and_makes_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path / "run")
    environment_spec = describe(config)
    record_environment_spec(tmp_path, environment_spec)
    monkeypatch.setenv(role.DESCRIBED, str(tmp_path))
    monkeypatch.setattr(role, "describe", mock.Mock(side_effect=AssertionError))
    assert role.checked_description(config) == role.task_description(config) == environment_spec


def test_two_actors_of_one_name_are_refused_in_one_run(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    with open_role(config, "actor", "actor", StopSignal()) as context:
        context.write_metrics(0, {})
        with pytest.raises(RunError, match="is named actor"), open_role(config, "actor", "actor", StopSignal()):
            pass
        with open_role(config, "actor", "actor-2", StopSignal()):
            pass
    with open_role(config, "actor", "actor", StopSignal()):
        pass


def test_start_that_fails_frees_the_name_and_the_address(tmp_path: Path) -> None:
    address, stop = free_address(), StopSignal()
    config = config_in(tmp_path / "run", f"addresses.status={address}")
    without_keys = config.replace(addresses=replace(config.addresses, **dict.fromkeys(LINKS, "tcp://10.0.0.7:5550")))
    with pytest.raises(UsageError, match="there are no keys"), open_role(without_keys, "actor", "actor", stop):
        pass
    with open_role(config, "actor", "actor", stop) as context:
        context.write_metrics(0, {})
        assert fetch(address, 5.0)[1]["role"] == "actor"


def test_error_of_a_role_ends_its_status_and_its_sockets(tmp_path: Path) -> None:
    address = free_address()
    config = config_in(tmp_path / "run", f"addresses.status={address}")
    contexts: list[RoleContext] = []

    def role() -> None:
        with open_role(config, "actor", "actor", StopSignal()) as context:
            contexts.append(context)
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        role()
    assert contexts[0].sockets.closed
    with pytest.raises(StatusError, match="does not answer"):
        fetch(address, 5.0)


@pytest.mark.parametrize("setting", ["algorithm.name=ppo", "algorithm.name=dpg"])
@pytest.mark.parametrize("worker", [local, learner, actor, evaluator])
def test_an_algorithm_that_cannot_learn_the_task_is_refused_before_anything_starts(
    tmp_path: Path, worker: ModuleType, setting: str
) -> None:
    config = load(CONFIGS / "cartpole.yaml", [setting, f"run_directory={tmp_path / 'run'}"])
    with pytest.raises(UsageError, match=rf"^{setting}: .* CartPole-v1 .*auto, dqn,"):
        worker.run(config, "any", StopSignal())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("last_line", "code", "error"), [
    ("error: no room", 1, "error: no room"),
    ("fatal: no room", 3, "fatal: no room"),
    ("error: no room", 0, ""),
    ("KeyError: 'of a traceback'", 1, "KeyError: 'of a traceback'"),
    ("12:00:00 INFO actor-0: a thread has died", 1, ""),
    ("Segmentation fault", 139, ""),
])  # fmt: skip
def test_error_of_a_role_is_the_last_line_of_its_log_if_its_exit_code_fits(
    last_line: str, code: int, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"import sys; print(*range(20), {last_line!r}, sep='\\n'); sys.exit({code})"
    monkeypatch.setattr(local, "COMMAND", [sys.executable, "-c", program])
    role = RoleProcess("actor", "actor-0", tmp_path / "actor-0.log")
    role.start([])
    assert role.process is not None
    role.process.wait(30)
    assert role.exit_code() == code
    assert role.error_line() == error
    assert role.log_tail().splitlines() == [f"  {line}" for line in [*range(20 - LOG_TAIL_LINES + 1, 20), last_line]]
    role.log_path.unlink()  # by a user
    assert (role.error_line(), role.log_tail()) == ("", "")
    role.close_pipe()
