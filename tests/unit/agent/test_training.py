"""Optimizers against their NumPy twins, target copies, and several updates in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from apex_jax.agent.algorithm import UpdateOutput
from apex_jax.agent.training import make_optimizer, maybe_copy_target, scan_updates_with_target
from apex_jax.config import LearnerConfig
from tests.rigs import reference

SHAPES = {"kernel": (4, 3), "bias": (3,)}


def random_tree(rng: np.random.Generator, scale: float = 1.0) -> dict[str, np.ndarray]:
    return {name: rng.normal(scale=scale, size=shape).astype(np.float32) for name, shape in SHAPES.items()}


# The optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [
    LearnerConfig(learning_rate=0.01, optimizer_epsilon=1e-3),
    LearnerConfig(learning_rate=0.01, rmsprop_decay=0.9, optimizer_epsilon=1e-3, max_gradient_norm=0.0),
    LearnerConfig(learning_rate=0.01, optimizer_epsilon=1e-3, max_gradient_norm=2.5),  # some gradients are larger
    LearnerConfig(),  # the paper's, for Ape-X DQN
    LearnerConfig(optimizer="adam", learning_rate=0.01, optimizer_epsilon=1.5e-4),
    LearnerConfig(optimizer="adam", learning_rate=1e-4, optimizer_epsilon=1e-8, max_gradient_norm=2.5),
], ids=["rmsprop", "never_clipped", "clipped", "paper", "adam", "adam_clipped"])  # fmt: skip
def test_optimizer_equals_its_numpy_twin(config: LearnerConfig) -> None:
    rng, optimizer = np.random.default_rng(1), make_optimizer(config)
    params: Any = random_tree(rng)
    twin_params = {name: array.astype(np.float64) for name, array in params.items()}
    twin: reference.RMSProp | reference.Adam
    if config.optimizer == "adam":
        twin = reference.Adam(params, config.learning_rate, config.optimizer_epsilon)
    else:
        twin = reference.RMSProp(params, config.learning_rate, config.rmsprop_decay, config.optimizer_epsilon)
    state, norms = optimizer.init(params), []
    for _ in range(20):
        gradients = random_tree(rng, scale=float(rng.choice([0.1, 1.0])))
        deltas, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, deltas)
        doubles = {name: array.astype(np.float64) for name, array in gradients.items()}
        clipped, norm = reference.clip_by_global_norm(doubles, config.max_gradient_norm)
        twin_params = twin.step(twin_params, clipped)
        norms.append(norm)
        for name, array in params.items():
            np.testing.assert_allclose(array, twin_params[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert min(norms) < 2.5 < max(norms)


def test_step_for_a_constant_gradient_is_finite_though_rounding_makes_its_variance_negative() -> None:
    settings = LearnerConfig(max_gradient_norm=0.0)
    optimizer = make_optimizer(settings)
    gradient = {"x": np.random.default_rng(5).normal(scale=30.0, size=500).astype(np.float32)}
    state, update = optimizer.init(gradient), jax.jit(optimizer.update)
    largest = settings.learning_rate * np.abs(gradient["x"]) / np.sqrt(settings.optimizer_epsilon)
    for _ in range(600):
        step, state = update(gradient, state)
        assert (np.abs(step["x"]) <= largest * (1 + 1e-5)).all()  # false for NaN


# Target copies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "branches"), [("cpu", True), ("gpu", False)])
def test_a_target_copy_is_a_branch_only_on_a_cpu(backend: str, branches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    tree = random_tree(np.random.default_rng(2))
    assert ("cond[" in str(jax.make_jaxpr(partial(maybe_copy_target))(True, tree, tree))) == branches


# Several updates in one call --------------------------------------------------------------------------------------


class Toy(NamedTuple):
    """A state whose parameters are one number."""

    online: jax.Array
    target: jax.Array
    updates: jax.Array


def toy_update(state: Toy, indices: jax.Array, weights: jax.Array) -> tuple[Toy, UpdateOutput]:
    """An update whose result depends on all updates before it, and on their order."""
    online = 3 * state.online + indices.sum()
    output = UpdateOutput(weights * online, {"losses/td_loss": online + state.target + weights.sum()})
    return Toy(online, state.target, state.updates + 1), output


def copy_target(is_due: jax.Array, state: Toy) -> Toy:
    return state._replace(target=maybe_copy_target(is_due, state.online, state.target))


def call(unrolled: bool, interval: int = 1_000_000) -> Callable[..., tuple[Toy, UpdateOutput]]:
    return partial(scan_updates_with_target, toy_update, copy_target, interval, unrolled=unrolled)


def toy(updates: int = 0) -> Toy:
    return Toy(jnp.float32(1), jnp.float32(0), jnp.int32(updates))


@pytest.mark.parametrize("unrolled", [False, True])
def test_updates_of_a_call_are_made_in_turn(unrolled: bool) -> None:
    indices = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    weights = np.array([[1, 0.5], [0.25, 1], [0, 2]], np.float32)
    state, output = jax.jit(call(unrolled))(toy(), indices, weights)
    assert state.online == 3 * (3 * (3 * 1 + 3) + 7) + 11 == 86
    np.testing.assert_array_equal(output.priorities, [[6, 3], [6.25, 25], [0, 172]])  # of states 6, 25, 86
    np.testing.assert_array_equal(output.metrics["losses/td_loss"], [7.5, 26.25, 88])


@pytest.mark.parametrize(("unrolled", "loops"), [(False, 1), (True, 0)])
def test_unrolled_updates_are_a_program_without_a_loop(unrolled: bool, loops: int) -> None:
    batches = np.zeros((6, 2), np.int32), np.zeros((6, 2), np.float32)
    program = jax.make_jaxpr(call(unrolled))(toy(), *batches)
    assert str(program).count("scan[") == loops


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("interval", [4, 5])
def test_a_target_is_copied_every_interval_of_updates_in_whatever_part_of_a_call(
    interval: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    state, online, target, program = toy(), 1.0, 0.0, jax.jit(call(unrolled=backend == "cpu", interval=interval))
    for number in range(0, 12, 2):
        indices = np.arange(number, number + 2, dtype=np.int32)[:, None] % 3
        state, _ = program(state, indices, np.ones((2, 1), np.float32))
        for update in (number, number + 1):
            online = 3 * online + update % 3
            target = online if (update + 1) % interval == 0 else target
        assert (state.online, state.target, state.updates) == (np.float32(online), np.float32(target), number + 2)


def test_on_a_gpu_a_target_is_copied_once_a_call_though_earlier_calls_had_another_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    program, batches = call(unrolled=False, interval=8), (np.zeros((4, 2), np.int32), np.ones((4, 2), np.float32))
    state, _ = program(toy(updates=5), *batches)  # reaches 8 within the call
    assert state.target == state.online == 81
