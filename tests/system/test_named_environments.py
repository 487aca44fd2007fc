"""Every environment that README, docs/recipes.md and configs/ name is read without an error for 10,000 random steps.

By the reading of the product: what an actor receives, in processes of their own if that is the default.
"""

from __future__ import annotations

import re

import envpool
import numpy as np
import pytest

from apex_jax.config import Config
from apex_jax.config.command_line import parse
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.environments.preset import preset_of
from apex_jax.environments.tasks import trainable
from apex_jax.host.program import CONFIGS
from apex_jax.segment_codec import LARGEST_OBSERVATION
from tests.rigs.processes import ROOT

STEPS, ENVIRONMENTS, HELD_STEPS = 10_000, 8, 100
PAGES = [ROOT / "README.md", ROOT / "docs" / "recipes.md", *CONFIGS.glob("*.yaml")]
OF_OTHER_PACKAGES = re.compile(r"(?:gymnasium|gymnax):[A-Z][\w-]+")
VERSION = re.compile(r"-v(\d+)$")


def named() -> dict[str, list[str]]:
    """Returns the arguments that train each environment that a page names, in prose by its name without a version."""
    text = "\n".join(path.read_text() for path in PAGES)
    newest: dict[str, str] = {}
    for task in sorted(envpool.list_all_envs(), key=lambda task: int(VERSION.search(task)[1])):  # type: ignore[index]
        newest[VERSION.sub("", task)] = task
    words = set(re.findall(r"\b[A-Z]\w+(?:-v\d+)?", OF_OTHER_PACKAGES.sub("", text)))
    of_envpool = {word if VERSION.search(word) else newest.get(word, "") for word in words}
    tasks = [name for name, _ in trainable(sorted(of_envpool & {*envpool.list_all_envs()}))]
    tasks += sorted(set(OF_OTHER_PACKAGES.findall(text)))
    arguments = {task: [f"environment.task={task}"] for task in tasks}
    return arguments | {f"--config {path.stem}": ["--config", path.stem] for path in sorted(CONFIGS.glob("*.yaml"))}


NAMED = named()


def random_actions(config: Config, seed: int) -> np.ndarray:
    """Returns an action for each environment in each step; every second one holds an action, which leads farther."""
    spec, shape = describe(config).spec.action, (STEPS // ENVIRONMENTS, ENVIRONMENTS)
    rng = np.random.default_rng(seed)
    if spec.dtype == "int32":
        actions = rng.integers(0, spec.num_actions, shape).astype(np.int32)
    else:
        actions = rng.uniform(spec.low, spec.high, (*shape, *spec.shape)).astype(np.float32)
    actions[:, ::2] = actions[np.arange(shape[0]) // HELD_STEPS, ::2]
    return actions


def test_pages_name_the_environments_that_a_reader_tries_first() -> None:
    assert {"Pong-v5", "Boxing-v5", "WalkerWalk-v1", "CartPole-v1", "HalfCheetah-v4"} <= NAMED.keys()
    assert {"gymnasium:LunarLander-v3", "gymnasium:CarRacing-v3", "gymnax:Asterix-MinAtar"} <= NAMED.keys()
    assert len(NAMED) > 35


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMED)
def test_ten_thousand_random_steps_are_read(name: str) -> None:
    config = parse(NAMED[name], preset_of).config
    environment_spec = describe(config)
    spec = environment_spec.spec
    pool = VectorEnvironment(config, environment_spec, np.arange(ENVIRONMENTS), config.environment.max_episode_frames)
    ends = 0
    try:
        for action in random_actions(config, seed=1):
            step = pool.receive()
            assert step.observation.shape == (ENVIRONMENTS, spec.frame_stack, *spec.frame_shape)
            assert np.isfinite(step.reward).all()
            assert (np.abs(step.observation.astype(np.float32)) <= LARGEST_OBSERVATION).all()
            ends += int((step.terminated | step.truncated).sum())
            pool.send(action[np.argsort(step.env_id)], step.env_id)
        pool.receive()
    finally:
        pool.close()
    assert ends >= ENVIRONMENTS or spec.frame_dtype == "uint8", "an episode of an Atari game may be longer"
