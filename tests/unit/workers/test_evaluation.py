"""Specification of an evaluation: whole games, the same for equal seeds, and no step beyond their ends."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import pytest

from apex_jax.agent.algorithm import Algorithm, Params
from apex_jax.agent.dqn import make_dqn
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import EpisodeTracker, VectorEnvironment, describe
from apex_jax.process import ROLE_NUMBERS, process_rng
from apex_jax.types import EnvironmentSpec, Step
from apex_jax.workers.evaluator import Evaluator, batch_size
from tests.rigs.processes import ROOT

GAMES = 5


class Player(NamedTuple):
    """A policy, and all that it takes to have it play."""

    config: Config
    environment_spec: EnvironmentSpec
    dqn: Algorithm
    params: Params


@pytest.fixture(scope="module", params=["CartPole-v1", "Catch-v0"])
def player(request: pytest.FixtureRequest) -> Player:
    overrides = [f"environment.task={request.param}", f"evaluator.episodes={GAMES}", "evaluator.epsilon=0.3", "seed=7"]
    config = load(ROOT / "configs" / "catch.yaml", overrides)
    environment_spec = describe(config)
    dqn = make_dqn(config, environment_spec.spec)
    return Player(config, environment_spec, dqn, dqn.init(jax.random.key(1)).online_params)


def lockstep_returns(player: Player, steps_broken_off: int = 0) -> list[float]:
    """Naive twin: an evaluation in which every environment is stepped and computed until the last game has ended.

    `steps_broken_off`: of an evaluation before it.
    """
    config, environment_spec, dqn, params = player
    rng = process_rng(config.seed, ROLE_NUMBERS["evaluator"])
    seeds = rng.integers(2**31, size=GAMES)
    pool = VectorEnvironment(config, environment_spec, seeds, config.evaluator.max_episode_frames)
    returns: dict[int, float] = {}

    def play(step: Step, key: jax.Array, call: int) -> None:
        """Sends an action to each game; those that have ended get any action."""
        playing = np.array([game for game in range(GAMES) if game not in returns])
        rows = np.resize(playing, batch_size(playing.size, GAMES))
        epsilon = np.full(rows.size, config.evaluator.epsilon, np.float32)
        action = np.zeros(GAMES, np.int32)
        action[rows] = dqn.act(params, step.observation[np.argsort(step.env_id)][rows], epsilon, key, call).action
        pool.send(action[step.env_id], step.env_id)

    if steps_broken_off:
        key = jax.random.key(int(rng.integers(2**31)))
        for call in range(steps_broken_off):
            play(pool.receive(), key, call)
        pool.receive()
        pool.reset()
    key, call, tracker = jax.random.key(int(rng.integers(2**31))), 0, EpisodeTracker(GAMES)
    while True:
        step = pool.receive()
        for episode in tracker.add(step):
            returns.setdefault(episode.env_id, episode.episode_return)
        if len(returns) == GAMES:
            break
        play(step, key, call)
        call += 1
    pool.close()
    return [returns[game] for game in range(GAMES)]


def test_evaluation_equals_that_of_a_naive_twin(player: Player) -> None:
    returns = Evaluator(player.config, player.environment_spec, player.dqn).evaluate(player.params, lambda: False)
    assert returns is not None
    assert returns.tolist() == lockstep_returns(player)


def test_games_that_have_not_ended_are_counted_during_an_evaluation(player: Player) -> None:
    counts: list[int] = []
    evaluator = Evaluator(player.config, player.environment_spec, player.dqn)
    evaluator.beat = lambda: counts.append(evaluator.unfinished_games)
    evaluator.evaluate(player.params, lambda: False)
    assert counts[1] == GAMES
    assert counts[1:] == sorted(counts[1:], reverse=True)
    assert evaluator.unfinished_games == 0


def test_no_game_is_stepped_beyond_its_end(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = VectorEnvironment.send

    def count(pool: VectorEnvironment, action: np.ndarray, env_id: np.ndarray) -> None:
        sent.extend(env_id.tolist())
        send(pool, action, env_id)

    monkeypatch.setattr(VectorEnvironment, "send", count)
    returns = Evaluator(player.config, player.environment_spec, player.dqn).evaluate(player.params, lambda: False)
    steps = returns if player.config.environment.task == "CartPole-v1" else [9] * GAMES  # CartPole pays 1 for each
    np.testing.assert_array_equal(np.bincount(sent), steps)


def test_interrupted_evaluation_reports_nothing_and_the_next_one_starts_again(player: Player) -> None:
    evaluator = Evaluator(player.config, player.environment_spec, player.dqn)
    turns = iter([False, False, True])
    assert evaluator.evaluate(player.params, lambda: next(turns)) is None
    returns = evaluator.evaluate(player.params, lambda: False)
    assert returns is not None
    assert returns.tolist() == lockstep_returns(player, steps_broken_off=2)


@pytest.mark.parametrize(("episodes", "sizes"), [
    (1, [1]), (5, [5, 3, 2, 1]), (10, [10, 5, 3, 2, 1]), (8, [8, 4, 2, 1]),
])  # fmt: skip
def test_policy_is_computed_for_running_games_in_few_batch_sizes(episodes: int, sizes: list[int]) -> None:
    for playing in range(1, episodes + 1):
        assert batch_size(playing, episodes) == min(size for size in sizes if size >= playing)


@pytest.mark.parametrize("player", ["CartPole-v1"], indirect=True)
def test_film_shows_the_first_reported_game(player: Player) -> None:
    config, environment_spec, dqn, params = player
    screens: list[np.ndarray | None] = []
    returns = Evaluator(config, environment_spec, dqn, filmed=True).evaluate(params, lambda: False, screens.append)
    assert returns is not None
    assert len(screens) == returns[0]  # CartPole pays 1 for each step, and a screen is shown before each
    assert len({screen.tobytes() for screen in screens if screen is not None}) > 1
    np.testing.assert_array_equal(Evaluator(config, environment_spec, dqn).evaluate(params, lambda: False), returns)
