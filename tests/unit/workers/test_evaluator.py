"""Specification of the evaluator: which weights it plays, and what it keeps of an evaluation."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from apex_jax.agent.registry import make_algorithm
from apex_jax.config.command_line import parse
from apex_jax.environments.environment import describe
from apex_jax.export.folder import write_files
from apex_jax.host.errors import RunError, UsageError
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.policy import load_policy
from apex_jax.process import StopSignal
from apex_jax.run.checkpoint_files import CheckpointError
from apex_jax.run.provenance import read_records
from apex_jax.workers import evaluator
from apex_jax.workers.evaluator import Evaluator, is_cancelled, next_weights
from apex_jax.workers.role import RoleContext
from tests.rigs import saved_runs
from tests.rigs.learner_runs import config_of, save_checkpoint
from tests.rigs.links import wait_until
from tests.rigs.live_views import START, Clock
from tests.rigs.saved_runs import save_best, save_run
from tests.rigs.weights_link import Link, link, newest, params_of

__all__ = ["link"]


def weights_of(updates: int, final: bool = False) -> Weights:
    return Weights({}, 1, 1, updates, environment_steps=0, final=final, published_seconds=0.0)


@pytest.mark.parametrize(("path", "updates"), [("", 2), ("checkpoints/1", 1), ("best", 1)])
def test_a_checkpoint_is_played_by_its_path_and_the_best_evaluation_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, updates: int
) -> None:
    save_best(save_run("CartPole-v1", tmp_path), updates=1)
    config = parse(["--role", "evaluator", f"checkpoint={tmp_path / path}"]).config
    assert config.environment.task == "CartPole-v1"
    assert evaluator.run(config, "evaluator", StopSignal()) == 0
    assert capsys.readouterr().out.endswith(f" over 2 games, after {updates} updates and {10 * updates} frames\n")
    [line] = read_records(tmp_path / ("best" if path == "best" else "") / "evaluations.jsonl")
    returns = line["returns"]
    assert (line["lowest"], line["highest"]) == (min(returns), max(returns))
    assert (line["mean"], line["standard_deviation"]) == (np.mean(returns), np.std(returns))
    assert 0 < line["seconds"] < 100


def test_an_exported_policy_is_evaluated_from_its_folder_which_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "exported"
    exported.mkdir()
    save_run("CartPole-v1", tmp_path / "run")
    write_files(exported, tmp_path / "run")
    files = {path: path.read_bytes() for path in exported.iterdir()}
    for path in (tmp_path / "run", exported):
        config = parse(["--role", "evaluator", f"checkpoint={path}", "episodes=2"]).config
        assert evaluator.run(config, "evaluator", StopSignal()) == 0
    of_run, of_export = capsys.readouterr().out.splitlines()
    assert of_export == of_run
    assert {path: path.read_bytes() for path in exported.iterdir()} == files
    other = parse(["--role", "evaluator", f"checkpoint={exported}", "network.hidden_units=17"]).config
    with pytest.raises(UsageError, match=r"network\.hidden_units: was \d+, now 17"):
        evaluator.run(other, "evaluator", StopSignal())


def test_the_params_of_the_best_evaluation_are_kept_while_the_learner_is_followed(
    tmp_path: Path, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = saved_runs.config_of("CartPole-v1", tmp_path)
    algorithm = make_algorithm(config, describe(config).spec)
    scores = iter([3.0, 9.0, 9.0, 5.0])
    published = [
        Weights(algorithm.acting_params(algorithm.init(jax.random.key(n))), n, 1, n, n, n == 4, 0.0)
        for n in (1, 2, 3, 4)
    ]
    given = iter(published)
    monkeypatch.setattr(Evaluator, "evaluate", lambda *_: np.full(2, next(scores)))
    monkeypatch.setattr(evaluator, "next_weights", lambda *_: next(given))
    monkeypatch.setattr(evaluator, "WeightsClient", lambda *_: mock.MagicMock(best_return=0.0))
    for start in (0, 1):  # after the restart, all evaluations are worse
        evaluator.follow(RoleContext(config, mock.MagicMock(), "evaluator"), describe(config))
        scores, given = iter([4.0]), iter(published[3:])
        best = load_policy(tmp_path / "best")
        assert best.updates == 2, start


def test_evaluator_waits_for_weights_that_it_can_use_and_has_not_evaluated(link: Link) -> None:
    server, client, found = link.server(), link.client(), list[Weights | None]()
    server.publish(params_of(1), 500, 0)
    last = newest(client, 500)
    again = link.restarted_server(server)
    follow = partial(next_weights, client, last, 0.0, StopSignal())
    thread = threading.Thread(target=lambda: found.append(follow()), daemon=True)
    thread.start()
    again.publish(params_of(1), 500, 0)  # as in warm-up, or while the actors are away
    wait_until(lambda: client.newest is not last)
    again.publish(jax.tree.map(lambda leaf: leaf * np.float32("nan"), params_of(1)), 501, 0)
    wait_until(lambda: client.dropped["not_finite"] == 1)
    again.publish(params_of(2), 502, 0)
    wait_until(lambda: not thread.is_alive())
    assert [weights and weights.updates for weights in found] == [502]


def test_checkpoint_of_another_configuration_is_not_evaluated(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    config = config_of(tmp_path / "other", f"evaluator.checkpoint={tmp_path}", "network.hidden_units=32")
    with pytest.raises(CheckpointError, match=r"different configuration: network\.hidden_units: was \d+, now 32; use"):
        evaluator.run(config, "evaluator", StopSignal())


# Restarts with fewer updates, more updates, and the first weights that have learned something.
@pytest.mark.parametrize(("last", "published"), [(500, [500, 0]), (500, [499]), (500, [500, 501]), (None, [0, 0, 8])])
def test_new_weights_are_evaluated(last: int | None, published: list[int]) -> None:
    client = mock.Mock(spec=WeightsClient, newest=None)
    client.fetch_after.side_effect = [None, *map(weights_of, published)]
    found = next_weights(client, None if last is None else weights_of(last), 0.0, StopSignal())
    assert (found and found.updates) == published[-1]


def test_pause_follows_weights_without_an_update_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stop = Clock(), mock.Mock(spec=StopSignal, run_is_over=False)
    monkeypatch.setattr(evaluator, "time", mock.Mock(monotonic=clock))
    stop.is_set.return_value, stop.wait.side_effect = False, lambda seconds: setattr(clock, "now", clock.now + seconds)
    client = mock.Mock(spec=WeightsClient, newest=weights_of(8))
    client.fetch_after.side_effect = [weights_of(0), weights_of(8)]
    assert next_weights(client, None, 60.0, stop) is not None
    assert clock.now >= START + 60


def test_evaluation_of_the_final_weights_goes_on_after_the_link_is_lost() -> None:
    client = mock.Mock(spec=WeightsClient)
    type(client).newest = mock.PropertyMock(side_effect=RunError("refused by the learner of the next run"))
    assert not is_cancelled(StopSignal(), client, weights_of(500, final=True))
    with pytest.raises(RunError):
        is_cancelled(StopSignal(), client, weights_of(500))
