"""Plays environments written in JAX for the actor: many steps, the policy's included, in one call of the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from apex_jax.agent.algorithm import Action, Algorithm, Params
from apex_jax.agent.frame_store import Array
from apex_jax.agent.rollout import make_rollout
from apex_jax.config import Config
from apex_jax.environments.gymnasium_tasks import BrokenEnvironment
from apex_jax.environments.jax_tasks import JaxEnvironment, environment_keys
from apex_jax.types import Step

_log = logging.getLogger(__name__)

STEPS_OF_A_CALL = 32  # of each environment: enough that Python's part of a call is small, and the weights new


class Rollouts:
    """Environments that are played STEPS_OF_A_CALL steps a call, on the device of the policy."""

    def __init__(self, config: Config, algorithm: Algorithm, seeds: np.ndarray, exploration: Array, key: jax.Array):
        """`seeds`: int[E]; `exploration`: float32[E]; `key`: of the policy's random numbers."""
        environment = self._environment = JaxEnvironment(config, config.environment.max_episode_frames)
        self._task, self._exploration, self._key = config.environment.task, exploration, key
        self._ids, self._step = np.arange(len(seeds), dtype=np.int32), 0
        self._keys, self._has_ended = environment_keys(seeds), False
        self._played: Any = jax.vmap(environment.begin)(self._keys)
        if caution := environment.wrong_levels(self._keys[0]):
            _log.warning("environment.task=%s: %s", self._task, caution)

        def advance(played: Any, action: jax.Array) -> Any:
            return environment.advance(played, environment.scaled(action))

        self._rollout = make_rollout(algorithm.act, advance, STEPS_OF_A_CALL)

    def start(self, params: Params) -> tuple[Any, Action]:
        """Starts the next call, without waiting for it; returns what `steps` reads."""
        self._played, seen, output = self._rollout(params, self._played, self._exploration, self._key, self._step)
        self._step = (self._step + STEPS_OF_A_CALL) % 2**30  # an int32 in the policy
        return seen, output

    def steps(self, started: tuple[Any, Action]) -> Iterator[tuple[Step, Action]]:
        """Yields each step of all environments and the actions chosen for it. Raises BrokenEnvironment."""
        seen, output = jax.tree.map(np.array, started)
        if not (np.isfinite(seen.reward).all() and np.isfinite(seen.frame).all()):
            what = "it returned a reward or an observation that is not finite"
            raise BrokenEnvironment(f"environment.task={self._task}: {what}")
        if not self._has_ended and (seen.terminated | seen.truncated).any():
            self._has_ended = True
            self._warn_of_resets(seen)
        for k in range(STEPS_OF_A_CALL):
            ends = seen.first[k], seen.terminated[k], seen.truncated[k]
            no_life_lost = np.zeros(self._ids.size, bool)
            step = Step(self._ids, seen.frame[k][:, None], seen.reward[k], *ends, no_life_lost, seen.info[k])
            yield step, Action(*(array[k] for array in output))

    def _warn_of_resets(self, seen: Any) -> None:
        """Warns if a game ended with the first observation of the next one, from which its return would bootstrap."""
        k, i = np.argwhere(seen.terminated | seen.truncated)[0]
        key = jax.random.fold_in(self._keys[i], int(seen.calls[k, i]) - 1)  # of the step that ended it
        if self._environment.resets_with(key, seen.frame[k, i]):
            what = "step returns what reset does at the end of a game, as if it reset itself"
            fix = "return the last observation, with terminated or truncated; reset is called after it"
            _log.warning("environment.task=%s: %s; %s", self._task, what, fix)
