"""The algorithm: whole updates against a NumPy twin, donation, traces, exploration, the paper's network."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.frame_store import FrameStore
from apex_jax.config import Config, EnvironmentConfig, NetworkConfig
from apex_jax.segment_codec import LARGEST_OBSERVATION, value_limits
from tests.rigs import reference, reference_dqn
from tests.rigs.agents import twin_params
from tests.rigs.dqn import VECTORS, batch_of, config, random_batches, random_store


@pytest.fixture(scope="module")
def dqn() -> Algorithm:
    """The algorithm, compiled once for all tests that do not count traces."""
    return make_dqn(config(), VECTORS)


@pytest.fixture(scope="module")
def params(dqn: Algorithm) -> Any:
    return dqn.init(jax.random.key(0)).online_params


def assert_params_equal(params: Any, twin: reference.Arrays) -> None:
    ours = twin_params(params)
    assert ours.keys() == twin.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, twin[name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("config", [
    config(),
    config(double_q=False, loss="huber"),
    config(max_gradient_norm=0.05),  # every gradient here is larger
    config(munchausen=True),
    config(value_rescaling=True),
    config(munchausen=True, value_rescaling=True, loss="huber"),
    config(quantiles=4),
    config(quantiles=3, double_q=False),
    config(quantiles=4, munchausen=True, value_rescaling=True),
], ids=[
    *("paper", "single_q_huber", "clipped", "munchausen", "value_rescaling", "both"),
    *("quantiles", "single_q_quantiles", "all"),
])  # fmt: skip
def test_updates_equal_their_numpy_twin(config: Config) -> None:
    rng = np.random.default_rng(3)
    dqn, store = make_dqn(config, VECTORS), random_store(rng)
    state = dqn.init(jax.random.key(0))
    twin = reference_dqn.Learner(twin_params(state.online_params), twin_params(state.target_params), config)
    for updates in range(1, 8):  # the target network is copied after updates 3 and 6
        indices, weights = random_batches(rng, 1)
        share = 1 - updates / 10  # of the learning rate
        state, output = dqn.update(state, store, indices, weights, share)
        priorities, loss, q_value, norm = twin.update(batch_of(store, indices[0], weights[0]), share)
        assert int(state.updates) == updates
        np.testing.assert_allclose(output.priorities[0], priorities, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(output.metrics["losses/td_loss"][0], loss, rtol=1e-4)
        np.testing.assert_allclose(output.metrics["losses/q_values"][0], q_value, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(output.metrics["losses/gradient_norm"][0], norm, rtol=1e-4)
        assert_params_equal(state.online_params, twin.online)
        assert_params_equal(state.target_params, twin.target)


def test_updates_on_a_gpu_have_no_conditional_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    dqn, rng = make_dqn(config(), VECTORS), np.random.default_rng(4)
    state = jax.eval_shape(dqn.init, jax.random.key(0))
    program = str(jax.make_jaxpr(dqn.update)(state, random_store(rng), *random_batches(rng, 4), 1.0))
    assert "scan[" in program
    assert "cond[" not in program
    assert "while[" not in program


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.long)])  # unrolled, or a loop
def test_four_updates_in_one_call_equal_four_calls(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    dqn = make_dqn(config(), VECTORS)
    rng = np.random.default_rng(4)
    store = random_store(rng)
    indices, weights = random_batches(rng, 4)
    together, outputs = dqn.update(dqn.init(jax.random.key(0)), store, indices, weights, 1.0)
    apart = dqn.init(jax.random.key(0))
    for i in range(4):
        apart, output = dqn.update(apart, store, indices[i : i + 1], weights[i : i + 1], 1.0)
        for ours, twin in zip(jax.tree.leaves(outputs), jax.tree.leaves(output), strict=True):
            np.testing.assert_allclose(ours[i], twin[0], rtol=1e-5, atol=1e-6)
    assert int(together.updates) == int(apart.updates) == 4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), together[:3], apart[:3])


def test_update_donates_the_state_but_not_the_store_and_is_traced_once_per_shape() -> None:
    rng = np.random.default_rng(5)
    dqn, store = make_dqn(config(), VECTORS), random_store(rng)
    state = dqn.init(jax.random.key(0))
    for count, traces in ((1, 1), (1, 1), (4, 2), (4, 2), (1, 2)):
        old = state
        state, _ = dqn.update(old, store, *random_batches(rng, count), 1 / count)
        assert dqn.update._cache_size() == traces  # type: ignore[attr-defined]
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert not any(array.is_deleted() for array in jax.tree.leaves(store))


@pytest.mark.long
@pytest.mark.parametrize("loss", ["squared", "huber"])
def test_largest_accepted_observations_and_returns_keep_learning_finite(loss: str) -> None:
    settings = config(loss=loss)
    dqn, rng = make_dqn(settings, VECTORS), np.random.default_rng(5)
    store = random_store(rng)
    largest = value_limits(settings.replace(environment=EnvironmentConfig(reward_clip=0))).n_step_return
    returns = jnp.sign(store.columns["n_step_return"]) * largest
    store = FrameStore(
        frames=jnp.sign(store.frames) * LARGEST_OBSERVATION, columns=store.columns | {"n_step_return": returns}
    )
    state, output = dqn.update(dqn.init(jax.random.key(0)), store, *random_batches(rng, 8), 1.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.online_params, output)))


def test_online_and_target_parameters_start_equal_and_share_no_buffer(dqn: Algorithm) -> None:
    state, again = dqn.init(jax.random.key(0)), dqn.init(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, state.online_params, state.target_params)
    where = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.online_params, state.target_params))]
    assert len(set(where)) == len(where)
    with pytest.raises(AssertionError):  # another key is another network
        jax.tree.map(np.testing.assert_array_equal, state.online_params, again.online_params)


@pytest.mark.parametrize("dueling", [True, False])
def test_epsilon_0_is_greedy_and_epsilon_1_is_uniform_for_any_network(dueling: bool) -> None:
    network = NetworkConfig((), (), (), hidden_units=8, dueling=dueling)
    dqn = make_dqn(Config(network=network), VECTORS)
    params = dqn.init(jax.random.key(0)).online_params
    observation = jnp.asarray(np.random.default_rng(6).normal(size=(6000, 2, 5)), jnp.float32)
    greedy = dqn.act(params, observation, jnp.zeros(6000), jax.random.key(1), 0)
    np.testing.assert_array_equal(greedy.value, greedy.bootstrap_value)
    random = dqn.act(params, observation, jnp.ones(6000), jax.random.key(1), 0)
    counts = np.bincount(random.action, minlength=3)
    assert (abs(counts - 2000) < 5 * np.sqrt(6000 * (1 / 3) * (2 / 3))).all()  # five standard deviations
    assert (random.value <= random.bootstrap_value).all()
    np.testing.assert_array_equal(random.bootstrap_value, greedy.bootstrap_value)
    half = dqn.act(params, observation, jnp.full(6000, 0.5), jax.random.key(1), 0)
    same = float((half.action == greedy.action).mean())
    assert abs(same - (0.5 + 0.5 / 3)) < 5 * np.sqrt(0.25 / 6000)


def test_every_environment_explores_at_its_own_epsilon(dqn: Algorithm, params: Any) -> None:
    observation = jnp.zeros((100, 2, 5)).at[50:].set(1.0)
    epsilon = jnp.repeat(jnp.array([0.0, 1.0]), 50)
    output = dqn.act(params, observation, epsilon, jax.random.key(2), 0)
    assert len(set(output.action[:50].tolist())) == 1
    assert set(output.action[50:].tolist()) == {0, 1, 2}


def test_draw_depends_only_on_key_and_step(dqn: Algorithm, params: Any) -> None:
    draws = [
        dqn.act(params, jnp.zeros((100, 2, 5)), jnp.ones(100), jax.random.key(key), step).action.tolist()
        for key, step in ((7, 3), (7, 3), (7, 4), (8, 3))
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert draws[0] != draws[3]
