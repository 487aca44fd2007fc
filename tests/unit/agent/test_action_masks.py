"""Action masks: targets against loops over the valid actions of each transition; which actions are chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.frame_store import FrameStore
from apex_jax.agent.networks import make_q_network
from apex_jax.config import Config
from apex_jax.host.errors import UsageError
from apex_jax.types import ActionSpec, SegmentSpec
from examples.hl_gauss import make as make_hl_gauss
from tests.rigs import reference_dqn
from tests.rigs.small_agents import BATCH, config, random_batches, random_store

ACTIONS, SIZE = 4, 5  # SIZE: of an observation without its mask
SPEC = SegmentSpec((SIZE,), "float32", 1, 16, 3, ActionSpec.discrete(ACTIONS)._replace(is_masked=True))
OPTIONS: dict[str, dict[str, Any]] = {
    "double": {},
    "not double": {"double_q": False},
    "munchausen": {"munchausen": True},
    "quantiles": {"quantiles": 5},
    "munchausen and quantiles": {"munchausen": True, "quantiles": 5},
}


def random_masks(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns masks [*shape, ACTIONS] in which at least one action is valid."""
    masks = rng.random((*shape, ACTIONS)) < 0.4
    masks |= np.arange(ACTIONS) == rng.integers(ACTIONS, size=(*shape, 1))
    return masks.astype(np.uint8)


def masked_store(seed: int) -> FrameStore:
    """Returns random transitions, each with a valid action."""
    rng, store = np.random.default_rng(seed), random_store(seed)
    shape = store.frames.shape[:2]
    masks = random_masks(rng, *shape)
    frames = {"numbers": store.frames, "mask": jnp.asarray(masks)}
    action = (masks * (0.1 + rng.random(masks.shape))).argmax(axis=-1).astype(np.int32)
    return FrameStore(frames, store.columns | {"action": jnp.asarray(action)})


def quantiles_of(settings: Config, params: Any, observation: np.ndarray) -> np.ndarray:
    """Returns the network's outputs [B, ACTIONS, N] for observations [B, SIZE], of all actions."""
    network = make_q_network(settings.network, ACTIONS, outputs=settings.algorithm.quantiles)
    return np.asarray(network.apply(params, observation[:, None])).reshape(len(observation), ACTIONS, -1)


def target_of(settings: Config, row: dict[str, Any]) -> float:
    """Returns the target of one transition; `row`: its columns, its masks, and q-values of all actions."""
    valid_t, valid_tpk = (np.flatnonzero(row[name]).tolist() for name in ("mask_t", "mask_tpk"))
    if settings.algorithm.munchausen:
        q_t, q_tpk = row["target_t"][valid_t], row["target_tpk"][valid_tpk]
        bonus = reference_dqn.munchausen_bonus(q_t, valid_t.index(row["action"]))
        return bonus + row["n_step_return"] + row["discount"] * reference_dqn.soft_value(q_tpk, q_tpk)
    chooser = row["online_tpk"] if settings.algorithm.double_q else row["target_tpk"]
    best = max(valid_tpk, key=lambda action: chooser[action])
    return row["n_step_return"] + row["discount"] * row["target_tpk"][best]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "munchausen and quantiles" else pytest.mark.long) for name in OPTIONS
])  # fmt: skip
def test_target_equals_a_loop_over_the_valid_actions_of_each_transition(name: str) -> None:
    settings = config(**OPTIONS[name])
    dqn, store, (indices, weights) = make_dqn(settings, SPEC), masked_store(1), random_batches(2, 1)
    rng, state = np.random.default_rng(3), dqn.init(jax.random.key(0))
    online, target = (
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), state.online_params) for _ in range(2)
    )
    at = indices[0]
    columns = {name: np.asarray(each).reshape(-1)[at] for name, each in store.columns.items()}
    numbers, masks = (np.asarray(store.frames[name]) for name in ("numbers", "mask"))
    numbers, masks, at_tpk = numbers.reshape(-1, SIZE), masks.reshape(-1, ACTIONS), at + columns["bootstrap_offset"]
    columns |= {"mask_t": masks[at], "mask_tpk": masks[at_tpk]}
    for place, x in (("t", numbers[at]), ("tpk", numbers[at_tpk])):
        columns[f"online_{place}"] = quantiles_of(settings, online, x).mean(axis=2)
        columns[f"target_{place}"] = quantiles_of(settings, target, x).mean(axis=2)
    errors = []
    for i in range(BATCH):
        row = {name: each[i] for name, each in columns.items()}
        errors.append(target_of(settings, row) - row["online_t"][row["action"]])
    state = state._replace(online_params=jax.tree.map(jnp.copy, online), target_params=target)
    after, output = dqn.update(state, store, indices, weights, 1.0)
    np.testing.assert_allclose(output.priorities[0], np.abs(errors), rtol=1e-4, atol=1e-4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.online_params))


@pytest.mark.parametrize("options", [
    {}, pytest.param({"munchausen": True, "quantiles": 5}, marks=pytest.mark.long)
])  # fmt: skip
def test_exploring_or_not_only_valid_actions_are_chosen_and_all_of_them(options: dict[str, Any]) -> None:
    dqn, rng = make_dqn(config(**options), SPEC), np.random.default_rng(4)
    params = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32), dqn.init(jax.random.key(0)).online_params
    )
    masks = random_masks(rng, 3000)
    observation = {"numbers": rng.normal(size=(3000, 1, SIZE)).astype(np.float32), "mask": masks[:, None]}
    for epsilon in (0.0, 0.5, 1.0):
        action, value, state_value = dqn.act(params, observation, np.full(3000, epsilon), jax.random.key(1), 0)
        assert masks[np.arange(3000), action].all()
        assert np.isfinite(value).all()
        assert np.abs(state_value).max() < 1e9
    all_valid = action[masks.all(axis=1)]
    assert set(np.asarray(all_valid).tolist()) == set(range(ACTIONS))
    assert dqn.greedy is not None
    assert masks[
        np.arange(3000), np.asarray(dqn.greedy(params, jax.tree.map(jnp.asarray, observation))["action"])
    ].all()


@pytest.mark.parametrize(("make", "key", "options"), [(make_hl_gauss, "name", {}), (make_dqn, "atoms", {"atoms": 5})])
def test_estimator_that_does_not_know_masks_is_refused(make: Any, key: str, options: dict[str, Any]) -> None:
    text = rf"algorithm\.{key}: its estimator does not know the action masks of environment\.task=Pong-v5"
    with pytest.raises(UsageError, match=text):
        make(config(**options), SPEC, jnp.float32)
