"""What the next algorithm, and the next column, cost: a file and a line of a table, and no worker knows of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq

from apex_jax import types
from apex_jax.agent.algorithm import Action, Algorithm, UpdateOutput
from apex_jax.agent.frame_store import FrameStore, create_store, gather, insert_segments
from apex_jax.agent.registry import ALGORITHMS, Entry, make_algorithm
from apex_jax.command_line import load
from apex_jax.config import AddressConfig, Config
from apex_jax.environment import segment_spec
from apex_jax.errors import UsageError
from apex_jax.metrics import read_metrics
from apex_jax.segment_codec import CorruptSegment, decode_segment, encode_segment
from apex_jax.transport.sockets import LocalLinks
from apex_jax.types import ActionSpec, Column, SegmentSpec
from apex_jax.workers.actor import Actor
from apex_jax.workers.learner import Learner
from apex_jax.workers.replay_server import ReplayServer
from apex_jax.workers.role import RoleContext
from tests.links import SPEC, segment_of
from tests.processes import ROOT, wait_until

CONTINUOUS = ActionSpec((3,), "float32", -1.0, 1.0)


# The next algorithm ----------------------------------------------------------------------------------------------


class ToyState(NamedTuple):
    """The mean of the actions that were drawn."""

    mean: dict[str, jax.Array]
    updates: jax.Array


def make_toy(config: Config, spec: SegmentSpec, compute_dtype: Any) -> Algorithm:
    """Acts at random, and learns one number."""

    def init(key: jax.Array) -> ToyState:
        return ToyState({"action": jnp.zeros(1)}, jnp.zeros((), jnp.int32))

    def act(params: Any, observation: Any, exploration: Any, key: jax.Array, step: int) -> Action:
        action = jax.random.randint(jax.random.fold_in(key, step), exploration.shape, 0, spec.action.num_actions)
        value = jnp.zeros(exploration.shape) + params["action"]
        return Action(action, value, value)

    def update(
        state: ToyState, store: FrameStore, indices: Any, weights: Any, learning_rate_share: float
    ) -> tuple[ToyState, UpdateOutput]:
        batch = gather(store, indices.ravel(), spec.frame_stack)
        mean = {"action": state.mean["action"] * 0.9 + 0.1 * batch.columns["action"].mean()}
        metrics = {"losses/td_loss": jnp.repeat(mean["action"], len(indices))}
        return ToyState(mean, state.updates + len(indices)), UpdateOutput(jnp.ones(indices.shape), metrics)

    return Algorithm(
        jax.jit(init), jax.jit(act), jax.jit(update), lambda state: state.mean, lambda size: np.ones(size, np.float32)
    )


def test_workers_run_an_algorithm_that_they_have_never_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALGORITHMS, "toy", Entry(make_toy, "int32"))
    links = LocalLinks()
    settings = ["algorithm.name=toy", "total_updates=64", "metrics_interval_seconds=0.2", "actor.ladder_size=0"]
    config = load(ROOT / "configs" / "catch.yaml", settings)
    config = config.replace(
        addresses=AddressConfig(links.experience, links.sampling, links.weights), run_directory=str(tmp_path)
    )
    spec, context = segment_spec(config), zmq.Context()
    made = {make: RoleContext(config, context, name) for name, make in (("replay", ReplayServer), ("actor", Actor))}
    roles: list[Any] = [make(role, spec) for make, role in made.items()]
    threads = [threading.Thread(target=role.run) for role in roles]
    for thread in threads:
        thread.start()
    learner = Learner(RoleContext(config, context, "learner"), spec)
    try:
        learner.run()
        for thread in threads:  # the learner told them that the run is over
            wait_until(lambda thread=thread: not thread.is_alive())  # type: ignore[misc]
    finally:
        learner.close()
        for role in roles:
            role.close()
        context.term()
        links.close()
    assert learner.counters.updates >= 64
    lines = read_metrics(tmp_path / "metrics" / "learner.jsonl")
    assert any(0 < line.get("losses/td_loss", 0) < 2 for line in lines)
    assert not any("losses/q_values" in line for line in lines)


@pytest.mark.parametrize(("action", "allowed"), [(ActionSpec.discrete(2), "auto, dqn"), (CONTINUOUS, "auto")])
@pytest.mark.parametrize("name", ["ppo", "dpg"])
def test_an_algorithm_that_there_is_not_is_refused_with_those_that_there_are(
    name: str, action: ActionSpec, allowed: str
) -> None:
    config = Config()
    config = config.replace(algorithm=replace(config.algorithm, name=name))
    with pytest.raises(UsageError, match=rf"^algorithm\.name={name}: for the actions of Pong-v5 .* one of {allowed}$"):
        make_algorithm(config, SPEC._replace(action=action))


def test_auto_is_the_algorithm_for_the_actions_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(name: str) -> Callable[..., Any]:
        return lambda *_: name

    monkeypatch.setitem(ALGORITHMS, "dqn", Entry(named("dqn"), "int32"))
    monkeypatch.setitem(ALGORITHMS, "toy", Entry(named("toy"), "float32"))
    chosen: list[Any] = [make_algorithm(Config(), SPEC._replace(action=action)) for action in (SPEC.action, CONTINUOUS)]
    assert chosen == ["dqn", "toy"]


# The next column, and another action -----------------------------------------------------------------------------


def travelled(spec: SegmentSpec, **columns: np.ndarray) -> Any:
    """What the update gathers of slot 1 of a segment that has been encoded, decoded and stored."""
    segment = segment_of(7)
    segment = segment._replace(columns=segment.columns | columns)
    decoded = decode_segment(encode_segment(segment, spec), spec)
    stacked = {name: column[None] for name, column in decoded.columns.items()}
    store = insert_segments(create_store(spec, 3), np.array([2], np.int32), decoded.frames[None], stacked)
    return gather(store, jnp.array([2 * spec.slots + 1]), spec.frame_stack)


def test_a_new_column_is_one_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(types.COLUMNS, "reward_parts", lambda spec: Column("float32", (2, 2)))
    parts = np.random.default_rng(0).normal(size=(SPEC.slots, 2, 2)).astype(np.float32)
    batch = travelled(SPEC, reward_parts=parts)
    np.testing.assert_array_equal(batch.columns["reward_parts"][0], parts[1])
    assert batch.columns["n_step_return"].shape == (1,)


def test_actions_of_any_shape_travel_bit_for_bit() -> None:
    spec = SPEC._replace(action=CONTINUOUS)
    action = np.random.default_rng(0).uniform(-1, 1, (spec.slots, 3)).astype(np.float32)
    np.testing.assert_array_equal(travelled(spec, action=action).columns["action"][0], action[1])


@pytest.mark.parametrize("value", [1.0001, -1.0001, np.nan, np.inf])
def test_an_action_outside_its_bounds_is_refused(value: float) -> None:
    action = np.zeros((SPEC.slots, 3), np.float32)
    action[4, 2] = value
    with pytest.raises(CorruptSegment, match="bad_action"):
        travelled(SPEC._replace(action=CONTINUOUS), action=action)
