"""The promised effect of each recipe of docs/extending.md, checked in a copy of the repository with its diff.

python extended.py RECIPE ...      run in that copy; standard input has command lines that must parse, as JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.frame_store import create_store
from apex_jax.agent.losses import weighted_loss
from apex_jax.agent.registry import make_algorithm
from apex_jax.agent.training import make_optimizer
from apex_jax.command_line import parse
from apex_jax.config import Config
from apex_jax.environments.environment import segment_spec
from apex_jax.run.metrics import TAGS
from apex_jax.settings import load
from apex_jax.transport import wire
from apex_jax.transport.messages import ActorStatus
from apex_jax.types import ActionSpec, SegmentSpec

SPEC = SegmentSpec((3,), "float32", 1, 8, 1, ActionSpec.discrete(4))


def catch(*settings: str) -> Config:
    return load("configs/catch.yaml", settings)  # type: ignore[arg-type]


def algorithm_of(*settings: str) -> Algorithm:
    return make_algorithm(catch(*settings), SPEC)


def updated(algorithm: Algorithm) -> tuple[Any, Any, Any]:
    """Returns a state before and after an update on blank transitions, and what the update returned beside it."""
    state = algorithm.init(jax.random.key(0))
    before = jax.tree.map(np.array, state)
    indices, weights = np.zeros((1, 4), np.int32), np.ones((1, 4), np.float32)
    return before, *algorithm.update(state, create_store(SPEC, 2), indices, weights, 1.0)


def assert_close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


def the_loss() -> None:
    error, weight = jnp.array([0.0, 30.0]), jnp.array([1.0, 2.0])
    np.testing.assert_allclose(weighted_loss(error, weight, "log_cosh"), 30 - np.log(2), rtol=1e-6)
    np.testing.assert_allclose(weighted_loss(error, weight, "squared"), 450)
    np.testing.assert_allclose(weighted_loss(error, weight, "huber"), 29.5)
    assert catch("algorithm.loss=log_cosh").algorithm.loss == "log_cosh"


def the_network() -> None:
    settings: tuple[list[str], ...] = ([], ["network.input_norm=true"])
    plain, normalized = (jax.eval_shape(algorithm_of(*given).init, jax.random.key(0)) for given in settings)
    assert set(normalized.online_params["params"]) - set(plain.online_params["params"]) == {"norm"}


def the_exploration() -> None:
    observation = np.random.default_rng(0).normal(size=(64, 1, 3)).astype(np.float32)
    algorithm = algorithm_of("actor.temperature=1e-4")
    params = algorithm.init(jax.random.key(0)).online_params
    best, explored = (
        algorithm.act(params, observation, np.full(64, epsilon, np.float32), jax.random.key(1), 0).action
        for epsilon in (0, 1)
    )
    assert len(set(best.tolist())) > 1
    assert (best == explored).mean() > 0.9  # at a temperature this low, exploring is choosing the best


def the_optimizer() -> None:
    params = {"kernel": jnp.ones(3)}
    for name, decay in (("adam", 0.0), ("adamw", 1e-4)):
        optimizer = make_optimizer(catch(f"learner.optimizer={name}", "learner.learning_rate=0.1").learner)
        deltas, _ = optimizer.update({"kernel": jnp.zeros(3)}, optimizer.init(params), params)
        np.testing.assert_allclose(deltas["kernel"], -0.1 * decay * np.ones(3), rtol=1e-5)


def an_algorithm() -> None:
    settings = "algorithm.name=soft_dqn", "learner.target_update_interval=1"
    before, after, _ = updated(algorithm_of(*settings))
    means = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, before.target_params, after.online_params)
    assert_close(after.target_params, means)
    draw = jax.ShapeDtypeStruct((3, 4), jnp.int32), jax.ShapeDtypeStruct((3, 4), jnp.float32)
    _, output = jax.eval_shape(algorithm_of(*settings).update, before, create_store(SPEC, 2), *draw, 1.0)
    assert output.priorities.shape == (3, 4)
    assert output.metrics["losses/td_loss"].shape == (3,)


def an_environment_that_envpool_has() -> None:
    config = parse(["--config", "acrobot"]).config
    assert segment_spec(config).frame_shape == (6,)
    assert segment_spec(config).action.num_actions == 3


def a_metric() -> None:
    assert "losses/step_norm" in TAGS
    before, after, output = updated(algorithm_of("learner.optimizer=adam"))
    steps = jax.tree.map(lambda old, new: ((new - old) ** 2).sum(), before.online_params, after.online_params)
    np.testing.assert_allclose(output.metrics["losses/step_norm"][0] ** 2, sum(jax.tree.leaves(steps)), rtol=1e-3)


def a_field_of_a_message() -> None:
    status: Any = ActorStatus(1, 2.0, 3)._replace(**{"memory_bytes": 2**40})
    assert wire.decode(wire.encode(status)) == status
    assert wire.PROTOCOL_VERSION == 10


def main() -> None:
    functions: dict[str, Callable[[], None]] = {
        name.replace("_", "-"): value for name, value in globals().items() if callable(value)
    }
    for recipe in sys.argv[1:]:
        functions[recipe]()
    for arguments in json.load(sys.stdin):
        parse(arguments)


if __name__ == "__main__":
    main()
