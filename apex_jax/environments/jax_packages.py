"""Environments of JAX packages as their authors wrote them, as objects with the functions that `jax_tasks` describes.

`adapted` recognizes an environment by what it has, whatever its package:

    reset_env, step_env               gymnax, craftax
    init, num_players                 pgx
    observation_size                  brax
    a time step of dm_env from reset  jumanji, xminigrid, navix

An observation may be any pytree: its leaves become the parts of a Dict, by their names. A leaf `action_mask` with one
number for each action is the mask.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from apex_jax.types import ACTION_MASK

MAKERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "brax": ("brax.envs", "get_environment", {}),
    "craftax": ("craftax.craftax_env", "make_craftax_env_from_name", {"auto_reset": False}),
}
"""Module, function and arguments by which a package makes an environment, if not by `make` of its module."""


def makes(module: Any) -> bool:
    """Returns whether a package makes environments by their names, see `made`."""
    return module.__name__ in MAKERS or callable(getattr(module, "make", None))


def made(package: str, name: str, settings: dict[str, Any]) -> Any:
    """Returns an environment of a package by its name, as the package does. `settings`: of gymnax, its params."""
    if package == "gymnax":
        environment, params = importlib.import_module("gymnax").make(name)
        return environment, params.replace(**settings)
    module, function, arguments = MAKERS.get(package, (package, "make", {}))
    return getattr(importlib.import_module(module), function)(name, **arguments, **settings)


def adapted(environment: Any) -> Any:
    """Returns an environment, or a tuple of it and its params, as `jax_tasks` takes it. Raises TypeError."""
    environment, *params = environment if isinstance(environment, tuple) else (environment,)
    if isinstance(getattr(environment, "observation_space", None), spaces.Space):
        return environment  # the user's own, whatever else it has
    if hasattr(environment, "step_env"):
        return Gymnax(environment, *params)
    if hasattr(environment, "num_players"):
        return Pgx(environment)
    if hasattr(environment, "observation_size"):
        return Brax(environment)
    if not (hasattr(environment, "reset") and hasattr(environment, "step")):
        raise TypeError("it returned no environment with observation_space, action_space, reset and step")
    return TimeSteps(environment, *params)


class Adapted:
    """The frame of an adapter, whose `begin` and `advance` return observations of any pytree.

    `begin(key)` returns observation and state; `advance(key, state, action)` these, reward, terminated, truncated and
    info.
    """

    begin: Any
    advance: Any

    def __init__(self, environment: Any, action_space: spaces.Space[Any]):
        self.environment, self.action_space = environment, action_space
        seen = jax.eval_shape(lambda: self.begin(jax.random.PRNGKey(0))[0])
        leaves: dict[str, spaces.Space[Any]] = {name: _space_of(leaf) for name, leaf in self._named(seen).items()}
        self.observation_space: Any = spaces.Dict(leaves) if len(leaves) > 1 else next(iter(leaves.values()))

    def _named(self, observation: Any) -> dict[str, Any]:
        """Returns the leaves of an observation by name; the mask of another shape gets another name."""
        leaves, counts = {}, np.ravel(getattr(self.action_space, "nvec", getattr(self.action_space, "n", 0))).tolist()
        for path, leaf in jax.tree_util.tree_leaves_with_path(observation):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            is_mask = leaf.shape in (tuple(counts), (math.prod(counts),))
            leaves["mask" if name == ACTION_MASK and not is_mask else name] = leaf
        return leaves

    def _parts(self, observation: Any) -> Any:
        leaves = self._named(observation)
        return leaves if len(leaves) > 1 else next(iter(leaves.values()))

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Starts an episode. `key`: becomes one of the older form, which states may hold."""
        observation, state = self.begin(jax.random.key_data(key))
        return self._parts(observation), state

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        """Returns observation, state, reward, terminated, truncated, info."""
        observation, *others = self.advance(jax.random.key_data(key), state, action)
        return self._parts(observation), *others


LIMITS = "max_timesteps", "max_steps_in_episode"
"""Params that limit the steps of an episode, in craftax and older versions of gymnax."""


class Gymnax:
    """gymnax and craftax: `step_env` does not begin the next episode. Their spaces are taken as they are.

    Without `is_truncated`, an end at the limit of steps is one that there would not be with the largest limit.
    """

    def __init__(self, environment: Any, params: Any = None):
        self.environment, self.params = environment, environment.default_params if params is None else params
        self.observation_space = _converted(environment.observation_space(self.params))
        self.action_space = _converted(environment.action_space(self.params))

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Starts an episode."""
        observation, state = self.environment.reset_env(key, self.params)
        return observation, state

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        """Returns observation, state, reward, terminated, truncated, info."""
        observation, state, reward, ended, info = self.environment.step_env(key, state, action, self.params)
        no_limit = {name: np.iinfo(np.int32).max for name in LIMITS if hasattr(self.params, name)}
        truncated: Any = False
        if hasattr(self.environment, "is_truncated"):
            truncated = self.environment.is_truncated(state, self.params)
        elif no_limit and hasattr(self.environment, "is_terminal"):
            truncated = ended & ~self.environment.is_terminal(state, self.params.replace(**no_limit))
            ended = ended & ~truncated
        return observation, state, reward, ended, truncated, info


class Pgx(Adapted):
    """pgx: games of one player; the state has observation, rewards, and mask."""

    def __init__(self, environment: Any):
        if environment.num_players != 1:
            raise TypeError(f"{environment.id} is a game for {environment.num_players} players; choose one for one")
        super().__init__(environment, spaces.Discrete(environment.num_actions))

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        """See `Adapted`."""
        state = self.environment.init(key)
        return self._seen(state), state

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        """See `Adapted`."""
        state = self.environment.step(state, action, key)
        return self._seen(state), state, state.rewards[0], state.terminated, state.truncated, {}

    def _seen(self, state: Any) -> Any:
        return {"observation": state.observation, ACTION_MASK: state.legal_action_mask}


class Brax(Adapted):
    """brax: actions in [-1, 1]; an episode has no time limit of its own."""

    def __init__(self, environment: Any):
        super().__init__(environment, spaces.Box(-1, 1, (environment.action_size,), np.float32))

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        """See `Adapted`."""
        state = self.environment.reset(key)
        return state.obs, state

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        """See `Adapted`."""
        state = self.environment.step(state, action)
        truncated = jnp.asarray(state.info.get("truncation", 0)) > 0  # of its EpisodeWrapper
        return state.obs, state, state.reward, (state.done > 0) & ~truncated, truncated, state.metrics


class TimeSteps(Adapted):
    """jumanji, xminigrid, navix: time steps as dm_env's, which hold the state, or come with one.

    An episode that ends with a discount is truncated, one without is terminated.
    """

    def __init__(self, environment: Any, *params: Any):
        self.params = params or ((environment.default_params(),) if hasattr(environment, "default_params") else ())
        super().__init__(environment, self._actions(environment))

    def _actions(self, environment: Any) -> spaces.Space[Any]:
        if hasattr(environment, "num_actions"):
            return spaces.Discrete(int(environment.num_actions(*self.params)))
        actions = getattr(environment, "action_spec", None) or environment.action_space
        actions = actions() if callable(actions) else actions
        count = getattr(actions, "num_values", getattr(actions, "n", None))
        if count is not None:
            return spaces.MultiDiscrete(np.asarray(count), np.int32) if np.ndim(count) else spaces.Discrete(int(count))
        if np.issubdtype(actions.dtype, np.floating):
            return spaces.Box(np.asarray(actions.minimum), np.asarray(actions.maximum), actions.shape, np.float32)
        raise TypeError(f"its actions, {actions}, are neither choices nor a vector of numbers")

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        """See `Adapted`."""
        return self._seen(self.environment.reset(*self.params, key))

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        """See `Adapted`."""
        result = self.environment.step(*self.params, state, action)
        step = result[1] if isinstance(result, tuple) else result
        if hasattr(step, "discount"):
            ends = step.last(), step.discount > 0
            terminated, truncated = ends[0] & ~ends[1], ends[0] & ends[1]
        else:  # navix
            terminated, truncated = step.is_termination(), step.is_truncation()
        return *self._seen(result), step.reward, terminated, truncated, getattr(step, "extras", None) or {}

    def _seen(self, result: Any) -> tuple[Any, Any]:
        state, step = result if isinstance(result, tuple) else (result, result)
        return step.observation, state


def _converted(space: Any) -> spaces.Space[Any]:
    """Returns the space of Gymnasium that is like one of gymnax or craftax."""
    if hasattr(space, "spaces"):
        return spaces.Dict({name: _converted(part) for name, part in space.spaces.items()})
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    low, high = (np.broadcast_to(np.asarray(bound), space.shape) for bound in (space.low, space.high))
    return spaces.Box(low, high, space.shape, np.dtype(space.dtype).type)


def _space_of(leaf: jax.ShapeDtypeStruct) -> spaces.Box:
    """Returns the space of arrays of a shape and dtype, by which images are recognized."""
    if leaf.dtype == bool:
        return spaces.Box(0, 1, leaf.shape, np.int8)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        limits = np.iinfo(leaf.dtype)
        return spaces.Box(limits.min, limits.max, leaf.shape, leaf.dtype)  # type: ignore[arg-type]
    return spaces.Box(-np.inf, np.inf, leaf.shape, np.float32)
