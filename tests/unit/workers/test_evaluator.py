"""Specification of an evaluation: whole games, the same for equal seeds, and no step beyond their ends."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest

from apex_jax.agent.algorithm import Action, Algorithm, Params
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.registry import ALGORITHMS, Entry, make_algorithm
from apex_jax.command_line import parse
from apex_jax.config import Config
from apex_jax.environments.environment import Environment, EpisodeTracker, segment_spec
from apex_jax.host.errors import RunError
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.policy import load_policy
from apex_jax.process import ROLE_NUMBERS, StopSignal, process_rng
from apex_jax.run.checkpoint import Checkpointer, CheckpointError, Progress
from apex_jax.run.metrics import MetricsWriter
from apex_jax.run.provenance import read_records, record_config
from apex_jax.settings import load
from apex_jax.transport.params_codec import architecture_of
from apex_jax.types import SegmentSpec, Step
from apex_jax.workers import evaluator
from apex_jax.workers.evaluator import Evaluator, _is_cancelled, _next_weights, batch_size
from apex_jax.workers.role import RoleContext
from tests.rigs import saved_runs
from tests.rigs.learner_runs import config_of, save_checkpoint
from tests.rigs.links import wait_until
from tests.rigs.processes import ROOT
from tests.rigs.saved_runs import save_best, save_run
from tests.rigs.weights_link import Link, link, newest, params_of

__all__ = ["link"]

GAMES = 5


class Player(NamedTuple):
    """A policy, and all that it takes to have it play."""

    config: Config
    spec: SegmentSpec
    dqn: Algorithm
    params: Params


@pytest.fixture(scope="module", params=["CartPole-v1", "Catch-v0"])
def player(request: pytest.FixtureRequest) -> Player:
    overrides = [f"environment.task={request.param}", f"evaluator.episodes={GAMES}", "evaluator.epsilon=0.3", "seed=7"]
    config = load(ROOT / "configs" / "catch.yaml", overrides)
    spec = segment_spec(config)
    dqn = make_dqn(config, spec)
    return Player(config, spec, dqn, dqn.init(jax.random.key(1)).online_params)


def lockstep_returns(player: Player, steps_broken_off: int = 0) -> list[float]:
    """Naive twin: an evaluation in which every environment is stepped and computed until the last game has ended.

    `steps_broken_off`: of an evaluation before it.
    """
    config, spec, dqn, params = player
    rng = process_rng(config.seed, ROLE_NUMBERS["evaluator"])
    pool = Environment(config, spec, rng.integers(2**31, size=GAMES), config.evaluator.max_episode_frames)

    def act(step: Step, playing: np.ndarray, key: jax.Array, call: int) -> np.ndarray:
        """The games that have ended get any action."""
        rows = np.resize(playing, batch_size(playing.size, GAMES))
        observation = step.observation[np.argsort(step.env_id)]
        epsilon = np.full(rows.size, config.evaluator.epsilon, np.float32)
        action = np.zeros(GAMES, np.int32)
        action[rows] = dqn.act(params, observation[rows], epsilon, key, call).action
        return action[step.env_id]

    if steps_broken_off:
        key = jax.random.key(int(rng.integers(2**31)))
        for call in range(steps_broken_off):
            step = pool.receive()
            pool.send(act(step, np.arange(GAMES), key, call), step.env_id)
        pool.receive()
        pool.reset()
    key, call = jax.random.key(int(rng.integers(2**31))), 0
    returns: dict[int, float] = {}
    tracker = EpisodeTracker(GAMES)
    while True:
        step = pool.receive()
        for episode in tracker.add(step):
            returns.setdefault(episode.env_id, episode.episode_return)
        if len(returns) == GAMES:
            break
        playing = np.array([game for game in range(GAMES) if game not in returns])
        pool.send(act(step, playing, key, call), step.env_id)
        call += 1
    pool.close()
    return [returns[game] for game in range(GAMES)]


def test_evaluation_equals_that_of_a_naive_twin(player: Player) -> None:
    returns = Evaluator(player.config, player.spec, player.dqn).evaluate(player.params, lambda: False)
    assert returns is not None
    assert returns.tolist() == lockstep_returns(player)


def test_equal_seeds_make_equal_evaluations_and_each_evaluation_has_new_games(player: Player) -> None:
    one, other = (Evaluator(player.config, player.spec, player.dqn) for _ in range(2))
    rounds = []
    for _ in range(6):
        returns = one.evaluate(player.params, lambda: False)
        np.testing.assert_array_equal(returns, other.evaluate(player.params, lambda: False))
        rounds.append(np.asarray(returns).tolist())
    assert any(returns != rounds[0] for returns in rounds)


def weights_of(updates: int, final: bool = False) -> Weights:
    return Weights({}, 1, 1, updates, environment_steps=0, final=final, published_seconds=0.0)


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


def test_interrupted_evaluation_reports_nothing_and_the_next_one_starts_again(player: Player) -> None:
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
    checkpointer.save(state, Progress(1, 1, 0.0, 1, config.checkpoint_compatibility_key, architecture))
    checkpointer.close()
    leaves: list[list[Any]] = []

    def act(params: Params, *arguments: Any) -> Any:
        leaves.append(jax.tree.leaves(params))
        return dqn.act(params, *arguments)

    monkeypatch.setattr(evaluator, "make_algorithm", lambda *_: dqn._replace(act=act))
    assert evaluator.run(config, "evaluator", StopSignal()) == 0
    assert len(leaves) > 1
    for step in leaves:
        assert all(isinstance(leaf, jax.Array) for leaf in step)
        assert all(leaf is first for leaf, first in zip(step, leaves[0], strict=True))


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


def test_the_params_of_the_best_evaluation_are_kept_while_the_learner_is_followed(
    tmp_path: Path, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = saved_runs.config_of("CartPole-v1", tmp_path)
    algorithm = make_algorithm(config, segment_spec(config))
    scores = iter([3.0, 9.0, 9.0, 5.0])
    published = [
        Weights(algorithm.acting_params(algorithm.init(jax.random.key(n))), n, 1, n, n, n == 4, 0.0)
        for n in (1, 2, 3, 4)
    ]
    given = iter(published)
    monkeypatch.setattr(Evaluator, "evaluate", lambda *_: np.full(2, next(scores)))
    monkeypatch.setattr(evaluator, "_next_weights", lambda *_: next(given))
    monkeypatch.setattr(evaluator, "WeightsClient", mock.MagicMock())
    for start in (0, 1):  # after the restart, all evaluations are worse
        evaluator.follow(RoleContext(config, mock.MagicMock(), "evaluator"), segment_spec(config))
        scores, given = iter([4.0]), iter(published[3:])
        best = load_policy(tmp_path / "best")
        assert best.updates == 2, start
        jax.tree.map(np.testing.assert_array_equal, best._params, published[1].params)


def test_evaluator_waits_for_weights_that_it_can_use_and_has_not_evaluated(link: Link) -> None:
    server, client, found = link.server(), link.client(), list[Weights | None]()
    server.publish(params_of(1), 500, 0)
    last = newest(client, 500)
    again = link.restarted_server(server)
    follow = partial(_next_weights, client, last, 0.0, StopSignal())
    thread = threading.Thread(target=lambda: found.append(follow()), daemon=True)
    thread.start()
    again.publish(params_of(1), 500, 0)  # as in warm-up, or while the actors are away
    wait_until(lambda: client.newest is not last)
    again.publish(jax.tree.map(lambda leaf: leaf * np.float32("nan"), params_of(1)), 501, 0)
    wait_until(lambda: client.dropped["not_finite"] == 1)
    again.publish(params_of(2), 502, 0)
    wait_until(lambda: not thread.is_alive())
    assert found[0] is not None
    assert found[0].updates == 502


@pytest.mark.parametrize(("newest_updates", "age"), [
    (None, ""), (7, ""), (1_007, "; the run has made 1,007 updates, 1,000 more than this checkpoint"),
])  # fmt: skip
def test_evaluation_of_a_checkpoint_logs_how_far_the_run_is_ahead_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], newest_updates: int | None, age: str
) -> None:
    save_checkpoint(tmp_path, updates=7)
    if newest_updates is not None:
        writer = MetricsWriter(str(tmp_path), "learner")
        for updates in (5_000, newest_updates):  # before a kill and after it
            writer.write(1, {"learner/updates": updates})
        writer.write(1, {})
    config = config_of(tmp_path, "evaluator.episodes=1", f"evaluator.checkpoint={tmp_path}")
    assert evaluator.run(config, "evaluator", StopSignal()) == 0
    assert capsys.readouterr().out.endswith(f", after 7 updates and 17 frames{age}\n")


@pytest.mark.parametrize(("interval", "seconds"), [(300, 45), (20, 20)])
def test_evaluating_a_run_without_a_checkpoint_reports_when_the_first_is_due(
    tmp_path: Path, interval: int, seconds: int
) -> None:
    settings = (f"evaluator.checkpoint={tmp_path}", f"learner.checkpoint_interval_seconds={interval}")
    config = config_of(tmp_path, *settings)
    with pytest.raises(RunError, match=f"no checkpoint in {tmp_path}/checkpoints; give the directory of a run$"):
        evaluator.run(config, "evaluator", StopSignal())
    record_config(config)
    when = f"saves the first checkpoint {seconds} s after its first update; try again then$"
    with pytest.raises(RunError, match=f"^{tmp_path}: nothing is saved yet, the learner {when}"):
        evaluator.run(config, "evaluator", StopSignal())


def test_checkpoint_of_another_algorithm_is_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "toy", Entry(make_dqn, "int32"))
    config = load(ROOT / "configs" / "catch.yaml", [f"evaluator.checkpoint={tmp_path}"])
    toy = config.replace(algorithm=replace(config.algorithm, name="toy"))
    state = make_dqn(config, segment_spec(config)).init(jax.random.key(1))
    checkpointer, architecture = Checkpointer(str(tmp_path)), architecture_of(state.online_params)
    checkpointer.save(state, Progress(1, 1, 0.0, 1, toy.checkpoint_compatibility_key, architecture))
    checkpointer.close()
    with pytest.raises(CheckpointError, match=r"algorithm\.name: was toy, now dqn"):
        evaluator.run(config, "evaluator", StopSignal())


@pytest.mark.parametrize("updates", [0, 499, 501])
def test_new_weights_are_evaluated_even_with_fewer_updates_after_a_restart(updates: int) -> None:
    client = mock.Mock(spec=WeightsClient)
    client.fetch_after.side_effect = [None, weights_of(500), weights_of(updates)]
    newest = _next_weights(client, weights_of(500), 0.0, StopSignal())
    assert newest is not None
    assert newest.updates == updates


def test_evaluation_of_the_final_weights_goes_on_after_the_link_is_lost() -> None:
    client = mock.Mock(spec=WeightsClient)
    type(client).newest = mock.PropertyMock(side_effect=RunError("refused by the learner of the next run"))
    assert not _is_cancelled(StopSignal(), client, weights_of(500, final=True))
    with pytest.raises(RunError):
        _is_cancelled(StopSignal(), client, weights_of(500))


@pytest.mark.parametrize(
    ("episodes", "sizes"), [(1, [1]), (5, [5, 3, 2, 1]), (10, [10, 5, 3, 2, 1]), (8, [8, 4, 2, 1])]
)
def test_policy_is_computed_for_running_games_in_few_batch_sizes(episodes: int, sizes: list[int]) -> None:
    chosen = [batch_size(playing, episodes) for playing in range(episodes, 0, -1)]
    assert list(dict.fromkeys(chosen)) == sizes
    assert all(size >= playing for size, playing in zip(chosen, range(episodes, 0, -1), strict=True))
    assert all(size == min(each for each in sizes if each >= playing)
               for size, playing in zip(chosen, range(episodes, 0, -1), strict=True))  # fmt: skip


def test_policy_is_not_computed_for_finished_games(player: Player) -> None:
    sizes: list[int] = []

    def act(params: Params, observation: Any, epsilon: Any, key: jax.Array, step: int) -> Action:
        sizes.append(len(observation))
        return player.dqn.act(params, observation, epsilon, key, step)

    games = Evaluator(player.config, player.spec, player.dqn._replace(act=act))
    assert games.evaluate(player.params, lambda: False) is not None
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) <= {5, 3, 2, 1}
    if player.config.environment.task == "CartPole-v1":  # its games are of unequal length
        assert sizes[-1] < GAMES


def test_film_shows_the_first_reported_game() -> None:
    config = load(ROOT / "configs" / "catch.yaml", ["environment.task=CartPole-v1", "evaluator.epsilon=0.3"])
    spec = segment_spec(config)
    dqn = make_dqn(config, spec)
    params = dqn.init(jax.random.key(1)).online_params
    screens: list[np.ndarray | None] = []
    returns = Evaluator(config, spec, dqn, filmed=True).evaluate(params, lambda: False, screens.append)
    assert returns is not None
    assert len(screens) == returns[0]  # CartPole pays 1 for each step, and a screen is shown before each
    assert len({screen.tobytes() for screen in screens if screen is not None}) > 1
    np.testing.assert_array_equal(Evaluator(config, spec, dqn).evaluate(params, lambda: False), returns)
