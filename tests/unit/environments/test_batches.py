"""Batches of environments, `vector:MODULE:FUNCTION`, against the same environments one at a time."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.environments.task import BrokenEnvironment
from apex_jax.host.errors import UsageError
from apex_jax.types import named_parts
from tests.rigs import environments

BATCH = "vector:tests.unit.environments.test_batches:batch"


class Plain(gymnasium.ActionWrapper[Any, Any, Any]):
    """Takes the integers of a batch."""

    def action(self, action: Any) -> Any:
        return action if np.ndim(action) else int(action)


def batch(num_envs: int, name: str, mode: str = "NextStep", **settings: Any) -> Any:
    """Returns environments of the rigs that play one after the other."""
    function = getattr(environments, name)
    limited = [lambda: gymnasium.wrappers.TimeLimit(Plain(function(**settings)), 12)] * num_envs
    return SyncVectorEnv(limited, autoreset_mode=AutoresetMode(mode))


def no_batch(num_envs: int) -> str:
    """Returns something else."""
    return "a batch"


def config(task: str, *overrides: str) -> Config:
    plain = [
        "environment.frame_stack=1",
        "environment.frame_skip=1",
        "network.kernel_sizes=[4,2,1]",
        "network.strides=[2,1,1]",
    ]
    return load(None, [f"environment.task={task}", *plain, *overrides])


@pytest.mark.parametrize(("name", "settings"), [
    ("Corridor", ""), ("Pixels", ""), ("Acts", ", what: float64"), ("Acts", ", what: start"), ("Combines", ""),
    ("Cards", ", observed: true"), ("Cards", ", pixels: true"), ("Cells", ""),
])  # fmt: skip
@pytest.mark.parametrize("per_step", [0, 2])
def test_steps_are_those_of_the_environments_in_one_process(name: str, settings: str, per_step: int) -> None:
    of_batch = config(BATCH, f"environment.settings={{name: {name}{settings}}}")
    alone = config(
        f"gymnasium:tests.rigs.environments:{name}",
        f"environment.settings={{{settings.removeprefix(', ')}}}",
        "environment.own_processes=false",
    )
    described, expected = describe(of_batch), describe(alone)
    assert (described.spec, described.parts, described.images) == (expected.spec, expected.parts, expected.images)
    seeds, rng = np.arange(7, 10), np.random.default_rng(0)
    played = VectorEnvironment(of_batch, described, seeds, 12, per_step=per_step)
    reference = VectorEnvironment(alone, expected, seeds, 12, per_step=per_step)
    for _ in range(90):
        step, same = played.receive(), reference.receive()
        for field, of_same in zip(step, same, strict=True):
            np.testing.assert_equal(field, of_same)
        spec = described.spec.action
        if spec.dtype == "int32":
            valid = named_parts(step.observation)["mask"][:, -1] if spec.is_masked else np.ones((3, spec.num_actions))
            action = np.array([rng.choice(np.flatnonzero(row)) for row in valid[: len(step.env_id)]], np.int32)
        else:
            action = rng.uniform(-1, 1, (len(step.env_id), *spec.shape)).astype(np.float32)
        played.send(action, step.env_id)
        reference.send(action, step.env_id)
    played.close()
    reference.close()


def test_environments_that_are_left_out_rest_with_valid_actions_until_the_reset() -> None:
    settings = config(BATCH, "environment.settings={name: Cards, observed: true}")  # an invalid card is an error
    environment = VectorEnvironment(settings, describe(settings), np.arange(3), 12, per_step=1)
    steps = [environment.receive() for _ in range(3)]
    environment.leave_out(np.array([1]))
    for _ in range(30):
        assert [step.env_id.tolist() for step in steps if step.env_id[0] != 1] == [[0], [2]]
        valid = [step.observation["mask"][0, -1].argmax() for step in steps if step.env_id[0] != 1]
        environment.send(np.array(valid, np.int32), np.array([0, 2]))
        steps = [environment.receive() for _ in range(2)]
    environment.reset()
    assert [environment.receive().first.tolist() for _ in range(3)] == [[True]] * 3
    environment.close()


@pytest.mark.parametrize(("task", "settings", "error", "words"), [
    (BATCH, "name: Corridor, mode: SameStep", UsageError, "SAME_STEP; it must .* autoreset_mode=NEXT_STEP"),
    (BATCH, "name: Corridor, mode: Disabled", UsageError, "DISABLED; it must .* autoreset_mode=NEXT_STEP"),
    (BATCH.replace(":batch", ":no_batch"), "", BrokenEnvironment, "it returned str, not a gymnasium.vector.VectorEnv"),
    (BATCH.replace(":batch", ":nothing"), "", UsageError, "has no function or class nothing"),
    ("vector:no_such_module:make", "", UsageError, "there is no module no_such_module"),
    ("vector:make", "", UsageError, "must be gymnasium:ID, .* vector:MODULE:FUNCTION"),
    (BATCH, "name: Raises, at: reset", BrokenEnvironment, r"the reset failed \(.*environments.py, line"),
    (BATCH, "name: Unlearnable", UsageError, "272 combinations"),
])  # fmt: skip
def test_batch_with_which_no_agent_can_learn_is_one_line(
    task: str, settings: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        describe(config(task, f"environment.settings={{{settings}}}"))
    assert "\n" not in str(raised.value)
