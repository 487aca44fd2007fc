"""A card game in which an invalid card is an error, played by actor, evaluator and policy; and what refuses a mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apex_jax
from apex_jax import load_policy
from apex_jax.config.load import load
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.environments.gymnasium_tasks import FLAT_MASK, NOTES, make
from apex_jax.environments.task import BrokenEnvironment
from apex_jax.export.folder import write_files
from apex_jax.host.program import CONFIGS
from apex_jax.types import valid_actions
from tests.rigs.environments import Cards

TASK = "gymnasium:tests.rigs.environments:Cards"
SMALL: dict[str, Any] = {
    "actor": {"base_epsilon": 1.0, "environments": 4, "segment_slots": 16},  # all actions are random
    "evaluator": {"episodes": 4, "epsilon": 0.5},
    "network": {"hidden_units": 8, "channels": [4], "kernel_sizes": [4], "strides": [4]},
    "replay": {"min_size_to_sample": 500},
    "total_updates": 20,
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [pytest.param("", marks=pytest.mark.long), "observed", "pixels"])
def test_only_cards_of_the_hand_are_played_by_actor_evaluator_and_policies(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {kind: True} if kind else {}
    observed = kind == "observed"
    environment = {"task": TASK, "settings": settings, "own_processes": kind == "pixels"}
    directory, folder = tmp_path / "run", tmp_path / "exported"
    run = apex_jax.train("cartpole", environment=environment, run_directory=str(directory), progress=False, **SMALL)
    assert np.concatenate([games.returns for games in run.evaluations]).min() >= 0

    folder.mkdir()
    write_files(folder, directory, None, {"environment.task": TASK})
    assert {"policy.stablehlo", "policy.onnx"} <= {path.name for path in folder.iterdir()}
    policies = [load_policy(run, exploration=epsilon) for run in (directory, folder) for epsilon in (0.0, 1.0)]
    cards = Cards(**settings)
    for game in range(20):
        observation, info = cards.reset(seed=game)
        is_over = False
        while not is_over:
            mask = () if observed else (info["action_mask"],)
            card, value = policies[game % 4].act(observation, *mask)
            assert abs(value) < 100
            observation, _, is_over, _, info = cards.step(card)  # raises for an invalid card

    if kind:
        return
    masks = np.eye(8, dtype=bool)
    np.testing.assert_array_equal(policies[1](np.zeros((8, 16)), masks), range(8))
    for given, message in (((), "without action_mask"), ((np.zeros(8),), "mask without a valid action")):
        with pytest.raises(ValueError, match=message):
            policies[0](np.zeros(16), *given)


@pytest.mark.parametrize(("fault", "message"), [
    ("none", "action_mask; give 8 numbers"),
    ("short", r"int8\[7\].* 8 numbers"),
    ("empty", "action_mask without a valid action"),
])  # fmt: skip
def test_wrong_mask_is_one_line(fault: str, message: str) -> None:
    adapted = make(TASK, f'{{"fault": "{fault}"}}', is_masked=True)
    adapted.reset(seed=0)
    with pytest.raises(BrokenEnvironment, match=message) as error:
        adapted.step(min(adapted.unwrapped.hand))  # type: ignore[attr-defined]
    assert "\n" not in str(error.value)


COMBINATIONS = [[[1, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]]  # of parts of 2, 2 and 3 choices


@pytest.mark.parametrize("mask", [
    COMBINATIONS,
    np.ravel(COMBINATIONS).tolist(),
    tuple(np.ravel(COMBINATIONS).tolist()),
    np.ravel(COMBINATIONS).astype(bool),
    np.array([1, 0, 1, 0, 1, 0, 1]),  # of each part, as in sb3-contrib
    (np.array([1, 0]), np.array([True, False]), np.array([1.0, 0.0, 1.0])),
])  # fmt: skip
def test_mask_is_of_the_combinations_of_an_action_or_of_its_parts(mask: Any) -> None:
    np.testing.assert_array_equal(valid_actions(mask, (2, 2, 3)), np.ravel(COMBINATIONS).astype(bool))
    if isinstance(mask, tuple) and len(mask) == 3:
        several: Any = tuple(np.stack([part, part]) for part in mask)
    else:
        several = np.array([mask, mask])
    np.testing.assert_array_equal(valid_actions(several, (2, 2, 3))[1], np.ravel(COMBINATIONS).astype(bool))


def test_mask_that_fits_both_is_of_the_combinations_unless_a_tuple_says_otherwise() -> None:
    assert valid_actions([1, 0, 0, 1], (2, 2)).tolist() == [True, False, False, True]
    assert valid_actions(([1, 0], [0, 1]), (2, 2)).tolist() == [False, True, False, False]


@pytest.mark.parametrize("mask", [[0.0, -np.inf], [1.0, np.nan], [1, 2], ["1", "0"], [1, 0, 0], [[1, 0, 0]]])
def test_other_numbers_than_0_and_1_or_of_another_size_are_no_mask(mask: Any) -> None:
    with pytest.raises(ValueError, match=r"\[.*\]"):
        valid_actions(mask, (2,))


@pytest.mark.parametrize(("several", "mask"), [(False, [1, 0, 0, 1]), (True, [0, 1, 0, 0])])
def test_flat_mask_of_two_switches_is_read_with_a_warning_and_a_tuple_without(several: bool, mask: list[int]) -> None:
    settings = f'{{"several": {str(several).lower()}}}'
    adapted = make("gymnasium:tests.rigs.environments:Switches", settings, is_masked=True)
    observation, info = adapted.reset(seed=0)
    assert observation["mask"].tolist() == mask
    assert [name for name in NOTES if name in info] == ([] if several else [FLAT_MASK])


def test_mask_that_begins_after_reset_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings = [f"environment.task={TASK}", 'environment.settings={"fault": "late"}', "environment.own_processes=false"]
    config = load(CONFIGS / "cartpole.yaml", settings)
    pool = VectorEnvironment(config, describe(config), np.array([1, 2]), 100)
    for _ in range(2):
        pool.send(np.zeros(2, np.int32), pool.receive().env_id)
    assert pool.receive().observation.shape == (2, 1, 16), "no mask"
    [warning] = caplog.records
    assert all(word in warning.message for word in ("action_mask", "ignored"))
