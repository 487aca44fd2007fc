"""Ape-X DPG with pixels: what trains the encoder, random shifts, and a whole run that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apex_jax
from apex_jax.agent.dpg import DPGState, make_dpg, randomly_shifted, shifted
from apex_jax.agent.frame_store import FrameStore
from apex_jax.types import ActionSpec, SegmentSpec
from tests.rigs.agents import assert_equal_bits
from tests.rigs.small_agents import CAPACITY, dpg_config, random_batches, random_store

SPEC = SegmentSpec((12, 14, 3), "uint8", 2, 16, 3, ActionSpec.continuous(3))
CONVOLUTION: dict[str, Any] = {"channels": (4,), "kernel_sizes": (3,), "strides": (2,), "hidden_units": 7}


def pixel_store() -> FrameStore:
    columns = random_store(1, SPEC).columns
    frames = np.random.default_rng(2).integers(0, 256, (CAPACITY, SPEC.slots, *SPEC.frame_shape), np.uint8)
    return FrameStore(jnp.asarray(frames), columns)


def after_one_update(**changes: Any) -> tuple[DPGState, DPGState, Any]:
    """Returns the state before and after an update, and what that returned."""
    dpg = make_dpg(dpg_config(**CONVOLUTION, **changes), SPEC)
    before = dpg.init(jax.random.key(0))
    kept = jax.tree.map(jnp.copy, before)
    after, output = dpg.update(before, pixel_store(), *random_batches(3, 1), 1.0)
    return kept, after, output


@pytest.mark.long
def test_the_loss_of_the_critics_trains_the_encoder_and_that_of_the_policy_does_not() -> None:
    before, after, output = after_one_update()
    _, other, of_other = after_one_update(action_gradient_clip=1e-9)  # hardly any gradient of the policy's loss
    assert_equal_bits(after.critics, other.critics)
    assert output.metrics["losses/policy_gradient_norm"] > 100 * of_other.metrics["losses/policy_gradient_norm"]
    for old, new in zip(*(jax.tree.leaves(state.critics["encoder"]) for state in (before, after)), strict=True):
        assert (old != new).any()


@pytest.mark.long
def test_shifts_are_drawn_for_each_update_unless_they_are_off() -> None:
    (_, _, first), (_, _, again), (_, _, off) = (after_one_update(random_shift=pixels) for pixels in (4, 4, 0))
    np.testing.assert_array_equal(first.priorities, again.priorities)
    assert (first.priorities != off.priorities).any()


def test_shifted_images_equal_crops_of_padded_images() -> None:
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (81, 2, 9, 11, 3), np.uint8)
    rows, columns = (each.ravel() - 4 for each in np.indices((9, 9)))
    found = shifted(jnp.asarray(images), jnp.asarray(rows), jnp.asarray(columns))
    for i in range(81):
        for frame in range(2):
            padded = np.pad(images[i, frame], ((4, 4), (4, 4), (0, 0)), mode="edge")
            at_row, at_column = rows[i] + 4, columns[i] + 4
            crop = padded[at_row : at_row + 9, at_column : at_column + 11]
            np.testing.assert_array_equal(found[i, frame], crop)


def test_random_shifts_are_up_to_the_pixels_in_all_directions() -> None:
    row, column = np.indices((9, 11))
    places = np.broadcast_to(np.stack([row, column], axis=-1).astype(np.uint8), (500, 1, 9, 11, 2))
    middle = np.asarray(randomly_shifted(jax.random.key(5), jnp.asarray(places), 3))[:, 0, 4, 5].astype(int)
    assert {tuple(shift) for shift in (middle - [4, 5]).tolist()} == {
        (i, j) for i in range(-3, 4) for j in range(-3, 4)
    }


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_environment_of_images_with_continuous_actions_trains_and_resumes(tmp_path: Path) -> None:
    task = "gymnasium:tests.rigs.environments:Pixels"
    small: dict[str, Any] = {
        "environment": {"task": task, "settings": {"continuous": True}, "own_processes": False, "frame_stack": 2},
        "network": {"channels": [4], "kernel_sizes": [3], "strides": [2], "hidden_units": 8, "layer_norm": False},
        "actor": {"environments": 4},
        "evaluator": {"episodes": 2, "max_episode_frames": 30, "interval_updates": 10},
        "replay": {"capacity_transitions": 2000, "min_size_to_sample": 500, "samples_per_insert": 2.0},
        "learner": {"batch_size": 16, "updates_per_call": 2},
        "run_directory": str(tmp_path / "run"),
        "progress": False,
    }
    first = apex_jax.train("walker", total_updates=10, **small)
    run = apex_jax.train("walker", total_updates=20, **small)
    assert len(run.evaluations) > len(first.evaluations) > 0
    assert run.evaluations[-1].updates == 20
    action, value = run.policy.act(np.zeros((20, 24), np.uint8))
    assert action.shape == (2,)
    assert np.abs(action).max() <= 1
    assert np.isfinite(value)
