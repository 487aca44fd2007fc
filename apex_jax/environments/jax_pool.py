"""JAX environments behind the interface of EnvPool's pools, for the evaluator; actors use `workers.rollout`."""

from __future__ import annotations

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.config import Config
from apex_jax.environments.gymnasium_tasks import BrokenEnvironment
from apex_jax.environments.jax_tasks import JaxEnvironment, Played

Result = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]


class JaxPool:
    """Environments in groups that step together; `recv` returns the groups in the order in which they were sent."""

    def __init__(self, config: Config, seeds: np.ndarray, max_steps: int, per_step: int):
        """`seeds`: int[E]; `max_steps`: of an episode; `per_step`: environments of a group, 0 = all."""
        environment = self._environment = JaxEnvironment(config, max_steps)
        self._task = config.environment.task
        self._info, self._size, self._no_action = config.metrics.info, len(seeds), environment.no_action
        self._groups = np.array_split(np.arange(self._size), -(-self._size // (per_step or self._size)))
        self._ready: deque[np.ndarray] = deque()  # groups to be received

        def advance(played: Played, action: jax.Array, is_sent: jax.Array) -> Played:
            after = environment.advance(played, action)
            return jax.tree.map(lambda new, old: jnp.where(is_sent, new, old), after, played)

        self._advance = jax.jit(jax.vmap(advance))
        self._played: Played = jax.jit(jax.vmap(environment.begin))(environment_keys(seeds))
        self._has_played = False

    def async_reset(self) -> None:
        """Starts a new episode in every environment."""
        if self._has_played:
            everywhere = jnp.ones(self._size, bool)
            self._played = self._played._replace(terminated=everywhere)  # so that the next step is a reset
            self.send(np.repeat(self._no_action[None], self._size, axis=0), np.arange(self._size))
        self._has_played = True
        self._ready = deque(self._groups)

    def send(self, actions: np.ndarray, env_id: np.ndarray) -> None:
        """Steps the environments `env_id`, int[A], with their actions [A, ...]."""
        all_actions = np.repeat(self._no_action[None], self._size, axis=0)
        all_actions[env_id] = actions
        is_sent = np.isin(np.arange(self._size), env_id)
        self._played = self._advance(self._played, all_actions, is_sent)
        self._ready += [group for group in self._groups if is_sent[group[0]]]

    def recv(self) -> Result:
        """Returns the next group: observations [A, 1, *O], rewards, terminated, truncated, infos."""
        ids = self._ready.popleft()
        rows = (self._played.frame, self._played.reward, self._played.terminated, self._played.truncated)
        frame, reward, terminated, truncated = (np.asarray(row)[ids] for row in rows)
        if not np.isfinite(reward).all():
            raise BrokenEnvironment(
                f"environment.task={self._task}: it returned a reward or an image that is not finite"
            )
        numbers = dict(zip(self._info, np.asarray(self._played.info)[ids].T, strict=True))
        return frame[:, None], reward, terminated, truncated, {"env_id": ids.astype(np.int32), **numbers}

    def render(self) -> tuple[np.ndarray | None]:
        """Returns the picture of environment 0, uint8[height, width, 3]."""
        return (self._environment.render(jax.tree.map(lambda leaf: leaf[0], self._played)),)

    def close(self) -> None:
        """Does nothing: an environment is a few arrays."""


def environment_keys(seeds: np.ndarray) -> jax.Array:
    """Returns the key of each environment; `seeds`: int[E]."""
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
