"""Which of EnvPool's tasks this program can train."""

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


class Task(NamedTuple):
    """A task that can be trained."""

    name: str
    family: str  # its part of EnvPool, such as "atari" or "mujoco.dmc"
    spec: SegmentSpec

    @property
    def is_continuous(self) -> bool:
        """Whether its actions are numbers."""
        return self.spec.action.dtype != "int32"


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
