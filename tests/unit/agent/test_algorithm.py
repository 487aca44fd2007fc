"""What the next algorithm, and the next column, cost: a file and a line of a table, and no worker knows of them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq

from apex_jax.agent.algorithm import Action, Algorithm, UpdateOutput
from apex_jax.agent.frame_store import FrameStore, gather
from apex_jax.agent.registry import ALGORITHMS, Entry
from apex_jax.config import AddressConfig, Config
from apex_jax.environments.environment import segment_spec
from apex_jax.run.metrics import read_metrics
from apex_jax.settings import load
from apex_jax.transport.sockets import LocalLinks
from apex_jax.types import SegmentSpec
from apex_jax.workers.actor import open_actor
from apex_jax.workers.learner import learn_and_end, open_learner
from apex_jax.workers.replay_server import ReplayServer
from apex_jax.workers.role import RoleContext
from tests.rigs.processes import ROOT, wait_until

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


def test_workers_run_a_registered_algorithm_without_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "toy", Entry(make_toy, "int32"))
    links = LocalLinks()
    settings = ["algorithm.name=toy", "total_updates=64", "metrics_interval_seconds=0.2", "actor.ladder_size=0"]
    config = load(ROOT / "configs" / "catch.yaml", settings)
    config = config.replace(
        addresses=AddressConfig((links.experience,), (links.sampling,), links.weights), run_directory=str(tmp_path)
    )
    spec, context = segment_spec(config), zmq.Context()
    with contextlib.ExitStack() as opened:
        opened.callback(links.close)
        opened.callback(context.term)
        server = opened.enter_context(contextlib.closing(ReplayServer(RoleContext(config, context, "replay"), spec)))
        actor = opened.enter_context(open_actor(RoleContext(config, context, "actor"), spec))
        threads = [threading.Thread(target=role.run) for role in (server, actor)]
        for thread in threads:
            thread.start()
        learner = opened.enter_context(open_learner(RoleContext(config, context, "learner"), spec))
        learn_and_end(learner)
        for thread in threads:  # the learner told them that the run is over
            wait_until(lambda thread=thread: not thread.is_alive())  # type: ignore[misc]
    assert learner.counters.updates >= 64
    lines = read_metrics(tmp_path / "metrics" / "learner.jsonl")
    assert any(0 < line.get("losses/td_loss", 0) < 2 for line in lines)
    assert not any("losses/q_values" in line for line in lines)


# The next column, and another action -----------------------------------------------------------------------------
