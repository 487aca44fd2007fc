"""Specification of an evaluation: whole games, the same for equal seeds, and no step beyond their ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest

from apex_jax.agent.dqn import Dqn, Params, make_dqn
from apex_jax.checkpoint import Checkpointer, Progress
from apex_jax.command_line import load
from apex_jax.config import Config
from apex_jax.environment import Environment, EpisodeTracker, segment_spec
from apex_jax.links.weights import Weights, WeightsSubscriber
from apex_jax.process import ROLE_NUMBERS, StopSignal, process_rng
from apex_jax.transport.codec import architecture_of
from apex_jax.types import SegmentSpec
from apex_jax.workers import evaluator
from apex_jax.workers.evaluator import Evaluator, _next_weights
from tests.processes import ROOT

GAMES = 5


class Player(NamedTuple):
    """A policy, and all that it takes to have it play."""

    config: Config
    spec: SegmentSpec
    dqn: Dqn
    params: Params


@pytest.fixture(scope="module", params=["CartPole-v1", "Catch-v0"])
def player(request: pytest.FixtureRequest) -> Player:
    overrides = [f"environment.task={request.param}", f"evaluator.episodes={GAMES}", "evaluator.epsilon=0.3", "seed=7"]
    config = load(ROOT / "configs" / "catch.yaml", overrides)
    spec = segment_spec(config)
    dqn = make_dqn(config, spec)
    return Player(config, spec, dqn, dqn.init(jax.random.key(1)).online_params)


def lockstep_returns(player: Player, steps_broken_off: int = 0) -> list[float]:
    """Naive twin: an evaluation in which every environment is stepped until the last game has ended.

    `steps_broken_off`: of an evaluation before it.
    """
    config, spec, dqn, params = player
    rng = process_rng(config.seed, ROLE_NUMBERS["evaluator"])
    pool = Environment(config, spec, rng.integers(2**31, size=GAMES), config.evaluator.max_episode_frames)
    epsilon = np.full(GAMES, config.evaluator.epsilon, np.float32)
    if steps_broken_off:
        key = jax.random.key(int(rng.integers(2**31)))
        for call in range(steps_broken_off):
            step = pool.receive()
            pool.send(np.asarray(dqn.act(params, step.observation, epsilon, key, call).action), step.env_id)
        pool.receive()
        pool.reset()
    key = jax.random.key(int(rng.integers(2**31)))
    returns: dict[int, float] = {}
    tracker, call = EpisodeTracker(GAMES), 0
    while len(returns) < GAMES:
        step = pool.receive()
        for episode in tracker.add(step):
            returns.setdefault(episode.env_id, episode.episode_return)
        action = np.asarray(dqn.act(params, step.observation, epsilon, key, call).action)
        pool.send(action, step.env_id)
        call += 1
    pool.receive()
    pool.close()
    return [returns[game] for game in range(GAMES)]


def test_an_evaluation_is_that_of_a_twin_that_steps_everything(player: Player) -> None:
    returns = Evaluator(player.config, player.spec, player.dqn).evaluate(player.params, lambda: False)
    assert returns is not None
    assert returns.tolist() == lockstep_returns(player)


def test_equal_seeds_make_equal_evaluations_and_each_has_games_of_its_own(player: Player) -> None:
    one, other = (Evaluator(player.config, player.spec, player.dqn) for _ in range(2))
    rounds = []
    for _ in range(6):
        returns = one.evaluate(player.params, lambda: False)
        np.testing.assert_array_equal(returns, other.evaluate(player.params, lambda: False))
        rounds.append(np.asarray(returns).tolist())
    assert any(returns != rounds[0] for returns in rounds)


def test_no_game_is_stepped_beyond_its_end(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Environment.send

    def count(pool: Environment, action: np.ndarray, env_id: np.ndarray) -> None:
        sent.extend(env_id.tolist())
        send(pool, action, env_id)

    ended: list[Any] = []
    add = EpisodeTracker.add

    def remember(tracker: EpisodeTracker, step: Any) -> Any:
        ended.extend(episodes := add(tracker, step))
        return episodes

    monkeypatch.setattr(Environment, "send", count)
    monkeypatch.setattr(EpisodeTracker, "add", remember)
    Evaluator(player.config, player.spec, player.dqn).evaluate(player.params, lambda: False)
    assert sorted(episode.env_id for episode in ended) == list(range(GAMES))
    assert np.bincount(sent).tolist() == [episode.steps for episode in sorted(ended, key=lambda e: e.env_id)]


def test_an_evaluation_that_is_broken_off_says_nothing_and_the_next_starts_anew(player: Player) -> None:
    evaluator = Evaluator(player.config, player.spec, player.dqn)
    turns = iter([False, False, True])
    assert evaluator.evaluate(player.params, lambda: next(turns)) is None
    returns = evaluator.evaluate(player.params, lambda: False)
    assert returns is not None
    assert returns.tolist() == lockstep_returns(player, steps_broken_off=2)


def test_parameters_of_a_checkpoint_are_put_on_the_device_once_and_not_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["environment.task=Catch-v0", "evaluator.episodes=2", f"evaluator.checkpoint={tmp_path}"]
    config = load(ROOT / "configs" / "catch.yaml", overrides)
    dqn = make_dqn(config, segment_spec(config))
    state = dqn.init(jax.random.key(1))
    checkpointer = Checkpointer(str(tmp_path))
    architecture = architecture_of(state.online_params)
    checkpointer.save(state, Progress(1, 1, 0.0, 1, config.checkpoint_agreement, architecture))
    checkpointer.close()
    leaves: list[list[Any]] = []

    def act(params: Params, *arguments: Any) -> Any:
        leaves.append(jax.tree.leaves(params))
        return dqn.act(params, *arguments)

    monkeypatch.setattr(evaluator, "make_dqn", lambda *_: dqn._replace(act=act))
    assert evaluator.run(config, "evaluator", StopSignal()) == 0
    assert len(leaves) > 1
    for step in leaves:
        assert all(isinstance(leaf, jax.Array) for leaf in step)
        assert all(leaf is first for leaf, first in zip(step, leaves[0], strict=True))


@pytest.mark.parametrize("updates", [0, 499, 501])
def test_weights_of_other_updates_are_evaluated_also_those_of_a_learner_that_began_anew(updates: int) -> None:
    def weights_of(updates: int) -> Weights:
        return Weights({}, 1, 1, updates, environment_steps=0, final=False, received_seconds=0.0)

    subscriber = mock.Mock(spec=WeightsSubscriber)
    subscriber.wait.side_effect = [weights_of(500), weights_of(500), weights_of(updates)]
    newest = _next_weights(subscriber, weights_of(500), 0.0, StopSignal())
    assert newest is not None
    assert newest.updates == updates
