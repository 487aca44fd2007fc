"""An algorithm is chosen by its name or by the actions of the environment; a new one takes one line of a table."""

from __future__ import annotations

import contextlib
import re
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

from apex_jax.agent.algorithm import Action, Algorithm, UpdateOutput
from apex_jax.agent.frame_store import FrameStore, gather
from apex_jax.agent.registry import ALGORITHMS, Entry, make_algorithm, resolved
from apex_jax.config import AddressConfig, Config
from apex_jax.config.load import load
from apex_jax.environments.environment import segment_spec
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS
from apex_jax.run.metric_files import read_metrics
from apex_jax.transport.sockets import LocalLinks
from apex_jax.types import ActionSpec, SegmentSpec
from apex_jax.workers.actor import open_actor
from apex_jax.workers.learner import learn_and_end, open_learner
from apex_jax.workers.replay_server import ReplayServer
from apex_jax.workers.role import RoleContext
from tests.rigs.agents import CONTINUOUS
from tests.rigs.links import SPEC
from tests.rigs.processes import ROOT, wait_until


@pytest.mark.parametrize(
    ("name", "action"),
    [("ppo", ActionSpec.discrete(2)), ("ppo", CONTINUOUS), ("dpg", ActionSpec.discrete(2)), ("dqn", CONTINUOUS)],
)
def test_algorithm_without_the_actions_of_the_task_is_refused_with_the_right_ones(
    name: str, action: ActionSpec
) -> None:
    allowed = ", ".join(["auto", *(known for known, entry in ALGORITHMS.items() if entry.action_dtype == action.dtype)])
    config = Config()
    config = config.replace(algorithm=replace(config.algorithm, name=name))
    with pytest.raises(UsageError, match=rf"^algorithm\.name={name}: for the actions of Pong-v5 .* one of {allowed}$"):
        make_algorithm(config, SPEC._replace(action=action))


@pytest.mark.parametrize(
    ("file", "task", "name", "allowed"),
    [("walker.yaml", "WalkerWalk-v1", "dqn", "auto, dpg"), ("pong_cpu.yaml", "Pong-v5", "dpg", "auto, dqn")],
)
def test_real_task_with_an_algorithm_for_other_actions_is_refused_in_one_line(
    file: str, task: str, name: str, allowed: str
) -> None:
    config = load(CONFIGS / file, [f"algorithm.name={name}"])
    error = f"algorithm.name={name}: for the actions of {task} it must be one of {allowed}"
    with pytest.raises(UsageError, match=f"^{re.escape(error)}$"):
        make_algorithm(config, segment_spec(config))


@pytest.mark.parametrize("name", ["auto", "dpg"])
@pytest.mark.parametrize(("setting", "value"), [("munchausen", True), ("value_rescaling", True), ("quantiles", 8)])
def test_option_of_dqn_is_refused_with_dpg(name: str, setting: str, value: Any) -> None:
    config = Config()
    config = config.replace(algorithm=replace(config.algorithm, name=name, **{setting: value}))
    with pytest.raises(UsageError, match=rf"^algorithm\.{setting}=\w+: is an option of DQN, not of DPG; leave it out$"):
        make_algorithm(config, SPEC._replace(action=CONTINUOUS))


def test_auto_is_the_algorithm_for_the_actions_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(name: str) -> Callable[..., Any]:
        return lambda *_: name

    monkeypatch.setitem(ALGORITHMS, "dqn", Entry(named("dqn"), "int32"))
    monkeypatch.setitem(ALGORITHMS, "dpg", Entry(named("dpg"), "float32"))
    chosen: list[Any] = [make_algorithm(Config(), SPEC._replace(action=action)) for action in (SPEC.action, CONTINUOUS)]
    assert chosen == ["dqn", "dpg"]
    assert resolved(Config(), SPEC).algorithm.name == "dqn"


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
