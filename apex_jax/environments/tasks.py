"""Which of EnvPool's tasks this program can train."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.environments.envpool_package import envpool
from apex_jax.environments.envpool_tasks import describe, family_of
from apex_jax.host.errors import UsageError
from apex_jax.types import SegmentSpec


def families() -> Counter[str]:
    """Returns the number of tasks in each part of EnvPool, also of those that cannot be trained."""
    return Counter(map(family_of, envpool.list_all_envs()))


def names(word: str) -> list[str]:
    """Returns the tasks whose name or family contains `word`, in whatever case, sorted by family and name."""
    found = [task for task in envpool.list_all_envs() if word.lower() in f"{family_of(task)}/{task}".lower()]
    return sorted(found, key=lambda task: (family_of(task), task))


def trainable(candidates: list[str]) -> Iterator[tuple[str, SegmentSpec]]:
    """Yields name and spec of those of the tasks that can be trained; each takes some milliseconds."""
    for name in candidates:
        frames = 4 if family_of(name) == "atari" else 1
        environment = EnvironmentConfig(task=name, frame_stack=frames, frame_skip=frames)
        with contextlib.suppress(UsageError):
            yield name, describe(Config(environment=environment)).spec
