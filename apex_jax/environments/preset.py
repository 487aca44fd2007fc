"""The configuration for a task for which the user names none: its own, or that for such observations and actions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from apex_jax.config import Config, EnvironmentConfig, NetworkConfig
from apex_jax.config.load import DEFAULT_CONFIG, Preset
from apex_jax.config.rules import check
from apex_jax.environments.processes import described_apart
from apex_jax.host.errors import UsageError
from apex_jax.types import EnvironmentSpec

OWN = {
    "CartPole-v0": "cartpole",
    "CartPole-v1": "cartpole",
    "Catch-v0": "catch",
    "HumanoidRun-v1": "humanoid",
    "HumanoidStand-v1": "humanoid",
    "HumanoidWalk-v1": "humanoid",
    "LunarLander-v2": "lunar_lander",
    "LunarLander-v3": "lunar_lander",
    "MountainCar-v0": "mountain_car",
    "Pendulum-v1": "pendulum",
    "WalkerWalk-v1": "walker",
    **{f"gymnax:{game}-MinAtar": "minatar" for game in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")},
}
"""In configs/, by task; of those of Gymnasium, too."""
OF_KIND = {
    ("numbers", "choices"): "lunar_lander",
    ("numbers", "numbers"): "walker",
    ("images", "choices"): "pixels",
    ("images", "numbers"): "car_racing",
}
"""In configs/, by observations and actions."""
MINUTES = 15.0  # of a run by `OF_KIND`: the limit of its configuration is that of another task
LIMITS = {"total_minutes", "total_updates", "total_environment_frames"}
MOST_BYTES, FEWEST, MOST = 2**32, 5_000, 100_000  # of the images in a replay
LEAST_SIDE = 24  # of images, in pixels: the convolutions of these configurations fit on no smaller ones


def preset_of(given: Mapping[str, Any]) -> Preset:
    """Returns the configuration for a task, by its name or by its spaces.

    `given`: the user's settings by key, among them environment.task. Raises UsageError if no agent here can learn the
    task, RunError if the environment fails.
    """
    groups = (name.partition(".")[::2] for name in given)
    environment = EnvironmentConfig(**{key: given[f"{group}.{key}"] for group, key in groups if group == "environment"})
    task = environment.task
    if environment.is_atari:
        return Preset(DEFAULT_CONFIG.stem)
    if own := OWN.get(task.removeprefix("gymnasium:").removeprefix("jax:")):
        return Preset(own, why=f"{task}: --config {own}, its own")
    is_limited, is_auto = bool(LIMITS & given.keys()), environment.observation_layout == "auto"
    # Many processes, because a step may take long.
    settings: dict[str, Any] = {"processes": "many", "total_updates": 0, "total_minutes": MINUTES * (not is_limited)}
    try:
        spec = _described(environment, given.get("seed", 1)).spec
    except UsageError:
        if not (is_auto and environment.is_gymnasium):
            raise
        settings["environment.observation_layout"] = "vector"  # which images beside a text need
        spec = _described(dataclasses.replace(environment, observation_layout="vector"), given.get("seed", 1)).spec
    seen = "images" if spec.has_images else "numbers"
    size = " x ".join(map(str, spec.frame_shape))
    beside = f" and {spec.numbers} numbers" if spec.numbers else ""
    if seen == "images" and is_auto and min(spec.frame_shape[:2]) < LEAST_SIDE:
        seen, settings["environment.observation_layout"] = "numbers", "vector"
    if spec.numbers:
        settings["network.normalize_observations"] = True
    action = f"{spec.action.num_actions} choices" if spec.action.dtype == "int32" else f"{spec.action.shape[0]} numbers"
    config = OF_KIND[seen, action.partition(" ")[2]]
    end = f"{'' if is_limited else f', for {MINUTES:g} minutes'}; give --config or a limit for another"
    if (fits := max(FEWEST, MOST_BYTES // math.prod(spec.frame_shape or (1,)))) < MOST:
        settings["replay.capacity_transitions"] = fits
        end += f"; the replay holds {fits:,} such images, and learning is slow: wrap the task so that they are smaller"
    why = f"{task}: observations are {size} {seen}{beside}, actions {action}, so --config {config}{end}"
    return Preset(config, settings, why)


def _described(environment: EnvironmentConfig, seed: int) -> EnvironmentSpec:
    """Describes a task without the rules of a configuration that is not chosen yet."""
    from apex_jax.environments import environment as environments  # EnvPool takes a second
    from apex_jax.environments import gymnasium_pool

    config = Config(
        seed=seed,
        environment=dataclasses.replace(environment, frame_stack=1, frame_skip=1),
        network=NetworkConfig(channels=(), kernel_sizes=(), strides=(), normalize_observations=True),
    )
    check(config)  # the form of the name
    if environment.is_jax:  # in a process of its own, since the device of this one is not chosen yet
        return described_apart(_described_in_jax, config)
    if environment.is_gymnasium:
        return gymnasium_pool.describe(config, is_tried=True, is_kept=True)
    return environments.describe(config)


def _described_in_jax(config: Config) -> EnvironmentSpec:
    import jax

    jax.config.update("jax_platforms", "cpu")
    from apex_jax.environments import jax_tasks

    return jax_tasks.describe(config)
