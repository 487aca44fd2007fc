"""Environments written in JAX: `jax:PACKAGE:ID` of a package, `jax:MODULE:FUNCTION` of the user, `gymnax:NAME`.

The function is called with `environment.settings`, and returns one of a package (see `jax_packages`) or an object with

    observation_space, action_space   spaces of Gymnasium: a Box, or a Dict or Tuple of Box, Discrete, MultiBinary;
                                      Discrete or MultiDiscrete, or a Box of one axis with finite bounds
    reset(key)                        returns observation, state
    step(key, state, action)          returns observation, state, reward, terminated, truncated, info

`reset` and `step` are pure functions for one environment, and are compiled: `state` is any pytree of arrays, which
keeps its shapes and dtypes. `info` is a dict, of which `metrics.info` names the numbers that become curves. The key
`action_mask` of a Dict of observations has a number for each action, or combination, and says which are valid. A method
`render(state)`, which is not compiled, may return uint8[height, width, 3] for the video; without one, the video shows
observations that are images.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from apex_jax.config import Config
from apex_jax.environments import jax_packages
from apex_jax.environments.images import caution, image_specs, picture, reading
from apex_jax.environments.jax_packages import adapted
from apex_jax.environments.task import (
    BrokenEnvironment,
    Leaf,
    action_bounds,
    action_of,
    choices_of,
    environment_spec,
    leaves_of,
    one_line,
    parts_of,
)
from apex_jax.host.errors import UsageError, first_line
from apex_jax.host.program import installing
from apex_jax.host.user_code import imported_module, reported
from apex_jax.types import (
    ACTION_MASK,
    FRAMES,
    MASK,
    NUMBERS,
    EnvironmentSpec,
    ImageSpec,
    Observation,
    frame_shape_of,
    frames_of,
    joined,
    map_parts,
    named_parts,
)

FRAMES_PER_SECOND = 15.0  # of the video: most of these games are slow
PICTURE_SIZE = 160  # least pixels of a side of the video
COLORS = ((90, 160, 240), (250, 250, 250), (130, 130, 130), (230, 120, 50), (90, 190, 110), (200, 90, 170))
STEP_RETURNS = ("observation", "state", "reward", "terminated", "truncated", "info")


class Played(NamedTuple):
    """An environment after its last step: what a `types.Step` holds, and what the next step needs."""

    observation: Any  # [F, *O], or a dict of its parts
    reward: jax.Array  # float32[]
    first: jax.Array  # bool[], an episode starts with this observation; the last action was ignored
    terminated: jax.Array  # bool[]
    truncated: jax.Array  # bool[]
    info: jax.Array  # float32[K], see `types.Step`
    state: Any  # of the user's environment
    steps: jax.Array  # int32[], of the episode
    key: jax.Array  # of the environment; that of a step is folded from it and `calls`
    calls: jax.Array  # int32[], steps and resets so far


class JaxEnvironment:
    """One environment of the run's task, as pure functions that JAX can compile and map over many."""

    def __init__(self, config: Config, max_steps: int):
        """`max_steps`: of an episode, beside the environment's own limit. Raises as `describe`."""
        self._task, self._info, self._max_steps = config.environment.task, config.metrics.info, max_steps
        self._environment = _made(config)
        space, self._action = self._environment.observation_space, self._environment.action_space
        is_discrete = isinstance(self._action, spaces.Discrete | spaces.MultiDiscrete)
        self._is_masked = is_discrete and isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces
        if self._is_masked:
            space = spaces.Dict({key: part for key, part in space.items() if key != ACTION_MASK})
        self._leaves = leaves_of(space)
        is_known = all(isinstance(leaf, spaces.Box | spaces.Discrete | spaces.MultiBinary) for _, leaf in self._leaves)
        if not self._leaves or not is_known or not (is_discrete or isinstance(self._action, spaces.Box)):
            what = f"its spaces are {one_line(space)} and {one_line(self._action)}"
            fix = "observations must be Box, Discrete, MultiBinary or a Dict or Tuple of them"
            raise UsageError(f"environment.task={self._task}: {what}; {fix}, actions Box, Discrete or MultiDiscrete")
        self._action_of = action_of(self._task, self._action, is_bounded=True)
        self.no_action: np.ndarray = np.zeros_like(self._action.sample())
        self._images = image_specs(self._task, self._leaves, config.environment.observation_layout)
        self.description = self._description(config, space)
        self._parts = self.description.spec.observation
        self._check()

    def _description(self, config: Config, space: spaces.Space[Any]) -> EnvironmentSpec:
        if config.environment.frame_skip != 1:
            fix = "set environment.frame_skip=1 environment.frame_stack=1, or leave them and --config out"
            raise UsageError(f"environment.task={self._task}: no frames are skipped in JAX; {fix}")
        parts, masks = parts_of(self._number_leaves), self._action_of.spec.num_actions if self._is_masked else 0
        size = sum(spaces.flatdim(leaf) for _, leaf in self._number_leaves)
        rate = FRAMES_PER_SECOND if self._images or hasattr(self._environment, "render") else None
        about: dict[str, Any] = {
            "images": self._images,
            "frames_per_second": rate,
            "reading": reading(self._task, space, self._images, size, masks),
            "caution": caution(self._task, self._leaves, self._images),
        }
        of_agent = self._action_of, parts, self._is_masked
        return environment_spec(config, frame_shape_of(self._images), size, *of_agent, **about)

    @property
    def _number_leaves(self) -> list[Leaf]:
        of_images = [image.path for image in self._images]
        return [leaf for leaf in self._leaves if leaf[0] not in of_images]

    def _check(self) -> None:
        """Traces a reset and a step. Raises BrokenEnvironment, with the user's line, if they do not fit together."""
        setting, environment = f"environment.task={self._task}", self._environment
        with reported(setting, BrokenEnvironment, environment.reset):
            played = jax.eval_shape(self.begin, jax.random.key(0))
        with reported(setting, BrokenEnvironment, environment.step):
            result = jax.eval_shape(environment.step, jax.random.key(0), played.state, self.no_action)
            if len(result) != len(STEP_RETURNS):
                raise TypeError(f"step returned {len(result)} values, not {', '.join(STEP_RETURNS)}")
            before, after = (jax.tree_util.tree_leaves_with_path(state) for state in (played.state, result[1]))
            for (path, old), (_, new) in zip(before, after, strict=True):
                if old.shape != new.shape or not _can_be(new, old.dtype):
                    name = f"state{jax.tree_util.keystr(path)}"
                    kinds = f"{old.dtype}{list(old.shape)}, step as {new.dtype}{list(new.shape)}"
                    raise TypeError(f"reset returns {name} as {kinds}; make them equal")
            jax.eval_shape(self.advance, played, self.no_action)

    def begin(self, key: jax.Array) -> Played:
        """Returns the environment at the start of its first episode."""
        return self._reset(key, jnp.int32(0))

    def advance(self, played: Played, action: jax.Array) -> Played:
        """Returns the environment after an action in its action space, which is ignored after an episode's end."""
        again, on = self._reset(played.key, played.calls), self._step(played, action)
        has_ended = played.terminated | played.truncated
        return jax.tree.map(functools.partial(jnp.where, has_ended), again, on)

    def _reset(self, key: jax.Array, calls: jax.Array) -> Played:
        observation, state = self._environment.reset(jax.random.fold_in(key, calls))
        no, none = jnp.zeros((), bool), jnp.full(len(self._info), jnp.nan, jnp.float32)
        state = jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)), state)
        counts = jnp.int32(0), key, calls + 1
        stacks = map_parts(
            lambda part, newest: jnp.repeat(newest[None], part.stack, axis=0), self._parts, self._newest(observation)
        )
        return Played(stacks, self._reward(0, observation), ~no, no, no, none, state, *counts)

    def _step(self, played: Played, action: jax.Array) -> Played:
        key = jax.random.fold_in(played.key, played.calls)
        before = jax.tree.map(lambda leaf: leaf, played.state)  # in new dicts, which `step` may change in place
        observation, state, reward, terminated, truncated, info = self._environment.step(key, before, action)
        if ACTION_MASK in (info or {}):
            what = "info has an action_mask, which is a key of the observation in environments written in JAX"
            raise TypeError(f"{what}; give it and its space there, in a Dict")
        steps = played.steps + 1
        flags = (jnp.asarray(flag).astype(bool).reshape(()) for flag in (terminated, truncated))
        terminated, truncated = flags
        numbers = [jnp.asarray(info.get(name, jnp.nan), jnp.float32).reshape(()) for name in self._info]
        stacks = map_parts(
            lambda stack, newest: jnp.concatenate([stack[1:], newest[None]]),
            played.observation,
            self._newest(observation),
        )
        return Played(
            stacks,
            self._reward(reward, observation),
            jnp.zeros((), bool),
            terminated,
            ~terminated & (truncated | (steps >= self._max_steps)),
            jnp.array(numbers, jnp.float32),
            jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), state, played.state),
            steps,
            played.key,
            played.calls + 1,
        )

    def _reward(self, reward: Any, observation: Any) -> jax.Array:
        """Returns the reward; NaN, which ends the run, if an image of floats is not finite: its frame has no NaN."""
        reward = jnp.asarray(reward, jnp.float32).reshape(())
        for image in self._images:
            pixels = _value_at(observation, image.path)
            if jnp.issubdtype(pixels.dtype, jnp.floating):
                reward = jnp.where(jnp.isfinite(pixels).all(), reward, jnp.nan)
        return reward

    def _newest(self, observation: Any) -> Any:
        """Returns the parts of an observation: a frame of uint8, a vector and a mask, those that it has."""
        for path, space in self._leaves:
            if jnp.shape(value := _value_at(observation, path)) != space.shape:
                name = "".join(f"[{key}]" for key in path)
                raise TypeError(f"the observation{name} has shape {jnp.shape(value)}, its space {space.shape}")
        parts = {}
        if self._images:
            parts[FRAMES] = frames_of(self._images, [_frame(image, observation) for image in self._images], jnp)
        if self._number_leaves:
            vectors = [_vector(space, _value_at(observation, path)) for path, space in self._number_leaves]
            parts[NUMBERS] = vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors)
        if self._is_masked:
            mask = jnp.asarray(observation[ACTION_MASK])
            counts = choices_of(self._action).counts
            if mask.shape not in ((self._action_of.spec.num_actions,), counts):
                raise TypeError(f"action_mask has shape {mask.shape}, not ({self._action_of.spec.num_actions},)")
            parts[MASK] = (mask != 0).astype(jnp.uint8).reshape(-1)
        return joined(parts)

    def scaled(self, action: jax.Array) -> jax.Array:
        """Returns an agent's action, int32 or float32[A] in [-1, 1], as one of the action space."""
        if isinstance(self._action, spaces.Discrete):
            return action + jnp.int32(self._action.start)
        if isinstance(self._action, spaces.MultiDiscrete):
            part = choices_of(self._action)
            choices = jnp.stack(jnp.unravel_index(action, part.counts)) + jnp.array(part.starts)
            return choices.reshape(part.shape).astype(self._action.dtype)
        low, high = action_bounds(self._action)
        return (low + (action + 1) / 2 * (high - low)).astype(self._action.dtype)

    def resets_with(self, key: jax.Array, observation: Any) -> bool:
        """Returns whether `reset` gives this observation with the key of a step, or with the half that gymnax takes."""
        seen = jax.tree.map(lambda stack: stack[-1], observation)
        first = (self._newest(self._environment.reset(each)[0]) for each in (key, jax.random.split(key)[1]))
        return any(all(jax.tree.leaves(jax.tree.map(np.array_equal, each, seen))) for each in first)

    def wrong_levels(self, key: jax.Array) -> str:
        """Returns a warning if a first observation, an image, exceeds the bounds by which its levels are scaled."""
        observation = self._environment.reset(key)[0] if self._images else None  # not compiled, so it may take long
        for image in self._images:
            pixels, low, high = _value_at(observation, image.path), image.low, image.high
            if not (low <= (least := pixels.min()) and (most := pixels.max()) <= high):
                what = f"an image has numbers from {least:g} to {most:g}, its observation_space {low:g} to {high:g}"
                return f"{what}; those beyond are read as the nearest bound; correct the space"
        return ""

    def render(self, played: Played) -> np.ndarray | None:
        """Returns a picture of one environment, uint8[height, width, 3]; None if what it renders is no picture."""
        if hasattr(self._environment, "render"):
            return picture(self._environment.render(played.state))
        frame = np.asarray(named_parts(played.observation)[FRAMES])[-1]
        frame = frame if frame.ndim == 3 else frame[..., None]
        if frame.shape[2] not in (1, 3):  # each channel shows where something is
            shown = np.zeros((*frame.shape[:2], 3), np.uint8)
            for channel in range(frame.shape[2]):
                shown[frame[..., channel] > 0] = COLORS[channel % len(COLORS)]
            frame = shown
        scale = -(-PICTURE_SIZE // max(frame.shape[:2]))
        return np.broadcast_to(frame, (*frame.shape[:2], 3)).repeat(scale, axis=0).repeat(scale, axis=1)


def _value_at(observation: Any, path: tuple[str | int, ...]) -> Any:
    """Returns the part of an observation at a path. Raises TypeError if there is none."""
    for key in path:
        try:
            observation = observation[key]
        except (KeyError, IndexError):
            raise TypeError(f"the observation has no {key}, which its space has") from None
    return observation


def _frame(image: ImageSpec, observation: Any) -> jax.Array:
    """Returns an image of an observation as a frame of uint8; elements beyond its bounds are clipped."""
    order = sorted(range(len(image.shape)), key=lambda axis: "HWC".index(image.layout[axis]))
    frame = jnp.transpose(_value_at(observation, image.path), order).reshape(image.frame_shape)
    if (image.dtype, image.low, image.high) == ("uint8", 0, 255):
        if frame.dtype != jnp.uint8:
            cast = "return it as observation.astype(jnp.uint8), or give the space its dtype and bounds"
            raise TypeError(f"the observation is an image of {frame.dtype}, its space has uint8; {cast}")
        return frame
    levels = jnp.rint((frame.astype(jnp.float32) - image.low) * (255 / (image.high - image.low)))
    return jnp.clip(levels, 0, 255).astype(jnp.uint8)


def _vector(space: spaces.Space[Any], value: Any) -> jax.Array:
    """Returns a part of an observation as float32[D], as `gymnasium.spaces.flatten` does."""
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(value - space.start, int(space.n))
    return jnp.asarray(value, jnp.float32).reshape(-1)


def _can_be(value: Any, dtype: Any) -> bool:
    """Returns whether a value of the user's, whose type Python may have chosen, is one of `dtype` without a loss."""
    return value.dtype == dtype or (value.weak_type and jnp.promote_types(value.dtype, dtype) == dtype)


def describe(config: Config) -> EnvironmentSpec:
    """Describes the run's task.

    Raises UsageError if the task does not exist or no agent here can learn it, BrokenEnvironment if its code raises an
    exception or its functions do not fit together.
    """
    return JaxEnvironment(config, 1).description


def _made(config: Config) -> Any:
    """Returns the environment of the task."""
    task, settings = config.environment.task, json.loads(config.environment.settings)
    setting = f"environment.task={task}"
    package, _, name = task.removeprefix("jax:").partition(":")
    if package == "gymnax" and importlib.util.find_spec("gymnax") is None:
        raise UsageError(f"{setting}: gymnax is not installed; {installing('jax-envs')}")
    with reported(setting, UsageError):
        module = imported_module(setting, package)
    if callable(function := getattr(module, name, None)):
        with reported(setting, BrokenEnvironment, function):
            return adapted(function(**settings))
    if not jax_packages.makes(module):
        what = f"{setting}: {module.__file__} has no function or class {name}"
        raise UsageError(f"{what}; add it, or correct environment.task")
    try:
        return adapted(jax_packages.made(package, name, settings))
    except (ValueError, TypeError, KeyError) as error:  # an unknown name, or a parameter that it does not have
        see = "; see gymnax.registered_envs" * (package == "gymnax")
        raise UsageError(f"{setting}: {first_line(error)}{see}") from None


# JAX environments behind the interface of EnvPool's pools, for the evaluator; actors use `workers.actor` ------------


Result = tuple[Observation, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]


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
        """Returns the next group: observations [A, F, *O], rewards, terminated, truncated, infos."""
        ids = self._ready.popleft()
        rows = (self._played.reward, self._played.terminated, self._played.truncated)
        reward, terminated, truncated = (np.asarray(row)[ids] for row in rows)
        observation = map_parts(lambda part: np.asarray(part)[ids], self._played.observation)
        if not np.isfinite(reward).all():
            what = "it returned a reward or an image that is not finite"
            raise BrokenEnvironment(f"environment.task={self._task}: {what}")
        numbers = dict(zip(self._info, np.asarray(self._played.info)[ids].T, strict=True))
        return observation, reward, terminated, truncated, {"env_id": ids.astype(np.int32), **numbers}

    def render(self) -> tuple[np.ndarray | None]:
        """Returns the picture of environment 0, uint8[height, width, 3]."""
        return (self._environment.render(jax.tree.map(lambda leaf: leaf[0], self._played)),)

    def close(self) -> None:
        """Does nothing: an environment is a few arrays."""


def environment_keys(seeds: np.ndarray) -> jax.Array:
    """Returns the key of each environment; `seeds`: int[E]."""
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
