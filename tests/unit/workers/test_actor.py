"""The acting loop on real environments: who explores how much, what is told of its steps, and what seeds differ in."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import zmq

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.exploration import epsilon_ladder
from apex_jax.agent.registry import make_algorithm
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.links.weights_client import Weights
from apex_jax.transport.messages import ActorWelcome, EpisodeStatistics
from apex_jax.types import Segment, Step
from apex_jax.workers.actor import Actor
from apex_jax.workers.role import RoleContext
from tests.rigs.processes import ROOT

LADDER_INDICES = np.array([0, 2, 3, 5], np.int32)
LADDER = 6


class Replay:
    """A replay server that takes everything, and remembers it."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.disconnects = 0
        self.status: Any = None
        self.produced = 0
        self.finished = threading.Event()
        self.segments: list[Segment] = []

    def put(self, segment: Segment, timeout_seconds: float) -> bool:
        self.segments.append(segment)
        return True

    def put_episodes(self, episodes: EpisodeStatistics) -> None:
        """Takes returns, too."""


class Acting:
    """What an actor did in some calls of its policy."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.epsilons: list[np.ndarray] = []
        self.replay = Replay()


@functools.cache  # compiled once
def dqn_of(config: Config) -> Algorithm:
    return make_algorithm(config, describe(config).spec)


@pytest.fixture
def act(tmp_path: Path, context: zmq.Context, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Acting]:
    """Has an actor of the given actor number act for some calls."""
    overrides = [
        "processes=many",
        "actor.environments=4",
        "actor.environments_per_step=3",
        f"actor.ladder_size={LADDER}",
    ]
    config = load(ROOT / "configs" / "catch.yaml", overrides).replace(run_directory=str(tmp_path))

    dqn = dqn_of(config.replace(run_directory=""))
    params = dqn.init(jax.random.key(1)).online_params

    def act(actor_number: int, calls: int) -> Acting:
        acting, role, environment_spec = Acting(), RoleContext(config, context, "actor"), describe(config)

        def policy(params: Any, observation: Any, epsilon: np.ndarray, *rest: Any) -> Any:
            acting.epsilons.append(np.asarray(epsilon))
            if len(acting.epsilons) == calls:
                replay.finished.set()
            return dqn.act(params, observation, epsilon, *rest)

        algorithm = dqn._replace(act=policy)  # type: ignore[arg-type]
        replay = acting.replay
        weights = Weights(params, 1, 1, 0, 0, False, 0.0)
        client = SimpleNamespace(fetch_after=lambda last: weights, dropped=Counter())
        actor = Actor(role, environment_spec, algorithm, client, replay, peer_id=1)  # type: ignore[arg-type]
        receive = VectorEnvironment.receive

        def remember(environment: VectorEnvironment) -> Step:
            acting.steps.append(receive(environment))
            return acting.steps[-1]

        monkeypatch.setattr(VectorEnvironment, "receive", remember)
        list(actor.act(ActorWelcome(actor_number, LADDER_INDICES, LADDER, 64)))
        monkeypatch.setattr(VectorEnvironment, "receive", receive)
        return acting

    return act


def test_each_environment_keeps_the_epsilon_of_its_ladder_index(act: Callable[..., Acting]) -> None:
    acting, ladder = act(actor_number=1, calls=60), epsilon_ladder(LADDER, 0.4, 7.0)
    groups = set()
    for step, epsilon in zip(acting.steps, acting.epsilons, strict=True):
        assert epsilon.tolist() == ladder[LADDER_INDICES[step.env_id]].tolist()
        groups.add(tuple(step.env_id))
    assert len(groups) > 1, "three of the four environments a step, and not always the same"


def test_each_step_but_the_first_of_a_game_is_counted_as_a_transition(act: Callable[..., Acting]) -> None:
    acting = act(actor_number=1, calls=300)
    made = sum(int(np.count_nonzero(~step.first)) for step in acting.steps)
    assert made - len(LADDER_INDICES) <= acting.replay.produced <= made, "the last call may not have returned"


def test_actors_of_different_actor_numbers_play_different_games(act: Callable[..., Acting]) -> None:
    first, again, other = (act(actor_number, calls=1).steps[0] for actor_number in (1, 1, 2))
    common = sorted(set(first.env_id) & set(again.env_id) & set(other.env_id))
    seen, seen_again, seen_by_other = (
        [step.observation[step.env_id == env_id].tolist() for env_id in common] for step in (first, again, other)
    )
    assert seen == seen_again
    assert seen != seen_by_other
