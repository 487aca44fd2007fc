"""JAX environments as their authors wrote them, one of each shape of interface, against a walk in plain Python."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.config.load import load
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.environments.jax_tasks import JaxEnvironment
from apex_jax.host.errors import UsageError
from apex_jax.types import named_parts
from tests.rigs.jax_packages import walk

RIG = "jax:tests.rigs.jax_packages"
PLAIN = ("environment.frame_stack=1", "environment.frame_skip=1", "actor.segment_slots=16")
NAMES = ("GymnaxWalk", "CraftaxWalk", "PgxWalk", "BraxWalk", "JumanjiWalk", "XMiniGridWalk")


@pytest.mark.parametrize("name", NAMES)
def test_environment_of_a_package_ends_is_cut_off_and_begins_again_as_in_plain_python(name: str) -> None:
    config = load(None, [f"environment.task={RIG}:{name}", *PLAIN])
    described, rng = describe(config), np.random.default_rng(3)
    spec = described.spec
    assert spec.vector_size == 2
    assert spec.action.is_masked == (name not in ("GymnaxWalk", "CraftaxWalk", "BraxWalk"))
    environment, ends, cuts = VectorEnvironment(config, described, np.arange(4), 1000), 0, 0
    places: Any = None
    right: Any = None
    for _ in range(60):
        step = environment.receive()
        parts = named_parts(step.observation)
        seen = parts["numbers"][:, 0]
        for i in range(4):
            if step.first[i]:
                assert seen[i, 0] in (0, 1)
                assert (seen[i, 1], step.reward[i]) == (0, 0)
            else:
                expected = walk(int(places[i, 0]), int(places[i, 1]), int(right[i]))
                assert (*seen[i], step.reward[i], step.terminated[i], step.truncated[i]) == expected
        if spec.action.is_masked:
            np.testing.assert_array_equal(parts["mask"][:, 0], np.stack([seen[:, 0] > 0, np.ones(4)], axis=1))
        ends, cuts, places = ends + step.terminated.sum(), cuts + step.truncated.sum(), seen.copy()
        right = rng.integers(2, size=4) | (seen[:, 0] == 0)
        action = right.astype(np.int32) if name != "BraxWalk" else (2.0 * right[:, None] - 1).astype(np.float32)
        environment.send(action, step.env_id)
    assert ends > 5
    assert cuts > 5


def test_action_of_several_parts_is_a_number_of_their_combination_and_so_is_its_mask() -> None:
    config = load(None, [f"environment.task={RIG}:PartsWalk", *PLAIN])
    described, environment = describe(config), JaxEnvironment(config, 1000)
    assert described.spec.action.num_actions == 6
    numbers = np.arange(6, dtype=np.int32)
    np.testing.assert_array_equal(described.scaled(numbers), [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]])
    np.testing.assert_array_equal(jax.vmap(environment.scaled)(jnp.asarray(numbers)), described.scaled(numbers))
    pool = VectorEnvironment(config, described, numbers, 1000)
    before = named_parts(pool.receive().observation)
    assert len(set(before["numbers"][:, 0, 0])) == 2
    pool.send(numbers, numbers)
    for place, mask in zip(before["numbers"][:, 0, 0], before["mask"][:, 0], strict=True):
        np.testing.assert_array_equal(mask, [*[place > 0] * 3, 1, 0, 1])
    for number, old, new in zip(numbers, before["numbers"], pool.receive().observation["numbers"], strict=True):
        assert tuple(new[0]) == walk(int(old[0, 0]), 0, int(number >= 3))[:2]


@pytest.mark.parametrize(("task", "words"), [
    ("jax:gymnax:Braekout-MinAtar", "gymnax.registered_envs"),
    ("jax:no_such_package:A-v0", "no module no_such_package"),
    ("jax:json:A-v0", "has no function or class A-v0"),
])  # fmt: skip
def test_unknown_package_or_name_is_one_line(task: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        describe(load(None, [f"environment.task={task}", *PLAIN]))
    assert "\n" not in str(error.value)


def test_prefix_of_gymnax_names_the_same_environments_as_its_package() -> None:
    plain = ("environment.observation_layout=vector", *PLAIN)
    tasks = "gymnax:Breakout-MinAtar", "jax:gymnax:Breakout-MinAtar"
    one, other = (describe(load(None, [f"environment.task={task}", *plain])) for task in tasks)
    assert one.spec == other.spec
