"""Which of EnvPool's tasks this program can train, with which agent and settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from apex_jax.config import Config
from apex_jax.environments.envpool_package import envpool
from apex_jax.environments.envpool_tasks import describe, family_of
from apex_jax.host.errors import UsageError
from apex_jax.types import SegmentSpec

CONFIGS = {
    "CartPole-v1": "cartpole",
    "CartPole-v0": "cartpole",
    "Catch-v0": "catch",
    "HumanoidRun-v1": "humanoid",
    "HumanoidStand-v1": "humanoid",
    "HumanoidWalk-v1": "humanoid",
    "LunarLander-v2": "lunar_lander",
    "LunarLander-v3": "lunar_lander",
    "MountainCar-v0": "mountain_car",
    "Pendulum-v1": "pendulum",
    "WalkerWalk-v1": "walker",
}
"""Tasks with a configuration of their own; the others take that of their kind, see `Task.arguments`."""


class Task(NamedTuple):
    """A task that can be trained."""

    name: str
    family: str  # its part of EnvPool, such as "atari" or "mujoco.dmc"
    spec: SegmentSpec

    @property
    def is_continuous(self) -> bool:
        """Whether its actions are numbers."""
        return self.spec.action.dtype != "int32"

    @property
    def arguments(self) -> str:
        """The arguments of the program that train it."""
        if self.family == "atari":
            return f"environment.task={self.name}"
        own = CONFIGS.get(self.name)
        config = own or ("walker" if self.is_continuous else "mountain_car")
        limit = "" if own else " total_updates=0 total_minutes=15"
        return f"--config {config} environment.task={self.name}{limit}"


def families() -> Counter[str]:
    """Returns the number of tasks in each part of EnvPool, also of those that cannot be trained."""
    return Counter(map(family_of, envpool.list_all_envs()))


def names(word: str) -> list[str]:
    """Returns the tasks whose name or family contains `word`, in whatever case, sorted by family and name."""
    found = [task for task in envpool.list_all_envs() if word.lower() in f"{family_of(task)}/{task}".lower()]
    return sorted(found, key=lambda task: (family_of(task), task))


def trainable(candidates: list[str]) -> Iterator[Task]:
    """Yields those of the tasks that can be trained; each takes some milliseconds."""
    for name in candidates:
        family = family_of(name)
        config = Config()
        if family == "atari":
            environment = replace(config.environment, task=name)
        else:
            environment = replace(config.environment, task=name, frame_stack=1, frame_skip=1)
        try:
            spec = describe(config.replace(environment=environment)).spec
        except UsageError:
            continue
        yield Task(name, family, spec)
