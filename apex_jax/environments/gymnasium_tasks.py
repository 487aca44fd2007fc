"""Environments of Gymnasium: `gymnasium:ID`, `gymnasium:MODULE:ID` or `gymnasium:MODULE:FUNCTION`.

`make` returns one of them, adapted to what actors exchange with environments. The processes of environments import
this module, so it imports neither EnvPool nor JAX.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import re
import socket
import traceback
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from apex_jax.config import Config
from apex_jax.environments.images import caution, image_specs, picture, reading
from apex_jax.environments.processes import Channel, ProcessEnvironment
from apex_jax.environments.served import WrongName, check_class, function_of, seed_generators
from apex_jax.environments.task import (
    Action,
    BrokenEnvironment,
    action_bounds,
    action_of,
    choices_of,
    environment_spec,
    leaves_of,
    observation_space,
    one_line,
    parts_of,
)
from apex_jax.host.errors import UsageError, short_repr
from apex_jax.host.user_code import imported_module, reported
from apex_jax.segment_codec import value_limits
from apex_jax.types import (
    ACTION_MASK,
    FRAMES,
    MASK,
    NUMBERS,
    EnvironmentSpec,
    ImageSpec,
    Observation,
    Part,
    frame_shape_of,
    frames_of,
    joined,
    named_parts,
    valid_actions,
)

PREFIX = "gymnasium:"
MANY_STEPS = 10**9  # no time limit
OF_OLD_GYM = "it is understood in a process of its own: leave environment.own_processes=false out"
BEYOND = "beyond_bounds"  # in the info of an observation outside its bounds: 1
NOTES = BOUNDS, LATE_MASK, FLAT_MASK = "note_of_bounds", "note_of_late_mask", "note_of_flat_mask"  # in `info`, once
LARGEST = float(np.finfo(np.float32).max)  # rewards and observations reach the learner as float32
NUMBER = "ENVIRONMENT_NUMBER"  # stands for the number of an environment in environment.settings
FRAMES_PER_SECOND = 30.0  # of the video of an environment that does not state its own


class Looked(NamedTuple):
    """What a look at an environment shows, whatever the other settings of a run."""

    frame_shape: tuple[int, ...]  # () without images
    vector_size: int
    action: Action
    parts: tuple[Part, ...] | None
    is_masked: bool
    images: tuple[ImageSpec, ...]
    frames_per_second: float | None  # None: it cannot be rendered
    reading: str
    caution: str
    largest: float  # number in the observations of the steps that were tried


def describe(config: Config, steps: int = 0) -> EnvironmentSpec:
    """Makes an environment and describes it; raises the errors of `look` and `described`."""
    environment = config.environment
    task, settings, layout = environment.task, environment.settings, environment.observation_layout
    return described(config, look(task, settings, layout, config.seed, steps))


def look(task: str, settings: str, layout: str, seed: int, steps: int = 0, channel: Channel | None = None) -> Looked:
    """Makes an environment and looks at it; raises the errors of `make`. Arguments as there.

    `steps`: random ones to try it with; then raises BrokenEnvironment, see `Adapted`.
    """
    adapted = make(task, settings, seed=seed, layout=layout, channel=channel)
    if adapted.num_actions and not adapted.is_masked:  # only its first `info` shows whether it has masks
        adapted.reset(seed=seed)
        adapted.is_masked = adapted.info_has_mask
    largest = _try(adapted, seed, steps) if steps else 0.0
    with reported_of(task):
        adapted.close()
    return looked_at(adapted, adapted.metadata, largest)


def looked_at(adapted: Adapted, metadata: dict[str, Any] | None, largest: float) -> Looked:
    """Returns what an environment shows; `largest`: see `Looked`."""
    task, images, size = adapted.task, adapted.images, adapted.vector_size
    can_render = "rgb_array" in ((metadata or {}).get("render_modes") or ())
    rate = float((metadata or {}).get("render_fps") or FRAMES_PER_SECOND) if can_render else None
    line = reading(task, adapted.original_space, images, size, adapted.num_actions * adapted.is_masked)
    about = rate, line, caution(task, adapted.leaves, images), largest
    action = action_of(task, adapted.env.action_space)
    return Looked(frame_shape_of(images), size, action, adapted.parts, adapted.is_masked, images, *about)


def described(config: Config, looked: Looked) -> EnvironmentSpec:
    """Returns the description of the run's task. Raises UsageError or BrokenEnvironment if it does not fit the run."""
    environment, task = config.environment, config.environment.task
    if environment.frame_skip > 1:
        fix = "set environment.frame_skip=1 environment.frame_stack=1, or leave them and --config out"
        raise UsageError(f"environment.task={task}: in this environment no frames are skipped; {fix}")
    if looked.largest > (most := value_limits(config).observation):
        what = f"a number of {looked.largest:g} in an observation, at most {most:g} can be learned from"
        fix = "set network.normalize_observations=true, or scale it in gymnasium.wrappers.TransformObservation"
        raise BrokenEnvironment(f"environment.task={task}: it returned {what}; {fix}")
    about = ("images", "frames_per_second", "reading", "caution")
    return environment_spec(config, *looked[:5], **{name: getattr(looked, name) for name in about})


def _try(adapted: Adapted, seed: int, steps: int) -> float:
    """Resets an environment and makes random steps; returns the largest number of its observations.

    Raises BrokenEnvironment.
    """
    rng, is_over, largest = np.random.default_rng(seed), True, 0.0
    for number in range(steps + 1):
        if is_over:
            observation, is_over = adapted.reset(seed=None if number else seed)[0], False
        else:
            observation, _, *ends, _ = adapted.step(adapted.random_action(observation, rng))
            is_over = any(ends)
        largest = max(largest, float(np.abs(named_parts(observation).get(NUMBERS, 0.0)).max(initial=0)))
    return largest


def make(
    task: str,
    settings: str,
    max_steps: int = MANY_STEPS,
    rendered: bool = False,
    seed: int = 0,
    layout: str = "auto",
    info: tuple[str, ...] = (),
    is_masked: bool = False,
    channel: Channel | None = None,
) -> Adapted:
    """Returns an environment.

    `task`: see above; `settings`: its keyword arguments, as the text of a JSON object; `max_steps`: of an episode, in
    addition to the environment's own limit; `rendered`: whether `render` is called; `seed`: of the global random
    generators; `layout`: of its observations, see `image_specs`; `info`, `is_masked`: see `Adapted`; `channel`: of the
    process in which it is made, if not in this one. Raises UsageError if there is no such environment,
    BrokenEnvironment if it cannot be made.
    """
    if channel is not None:
        function: functools.partial[Any] = functools.partial(ProcessEnvironment, channel, task, seed, rendered, info)
    else:
        function = _function_of(task, rendered)
    with reported_of(task, function.func), contextlib.ExitStack() as opened:
        if NUMBER in settings:
            number = opened.enter_context(_NumberedSocket()).number
            settings = re.sub(rf'"{NUMBER}"(?!:)', str(number), settings).replace(NUMBER, str(number))
        seed_generators(seed)
        environment = function(**json.loads(settings))
        seed_generators(seed)  # as in `served`
        check_class(environment, task.rpartition(":")[2])
        if not isinstance(environment, gymnasium.Env):
            raise TypeError(f"{type(environment).__name__} is of old gym; {OF_OLD_GYM}")
        opened.callback(environment.close)
        adapted = Adapted(gymnasium.wrappers.TimeLimit(environment, max_steps), task, layout, info, is_masked)
        adapted.opened = opened.pop_all()
        return adapted


class Adapted(gymnasium.Wrapper[Observation, Any, Any, Any]):
    """An environment whose observations are images uint8[H, W] or [H, W, C], a vector float32[D], or both.

    Images of one size are one frame, channels side by side; the vector holds the other parts of the original
    observation in the order of its space. With them comes the mask, if there is one: 1 for each action that is valid, 0
    for the others. Rewards and flags are Python's; `info` keeps only the number of lives and, at the end of an episode,
    the numbers with the names that are given. BEYOND in it is 1 if a number of the observation exceeds the bounds of
    its space, which are a hint; each of NOTES is a warning, given once.
    Every method raises BrokenEnvironment if the environment fails.
    """

    opened = contextlib.ExitStack()  # closes the environment, and frees its number

    def __init__(
        self,
        environment: gymnasium.Env[Any, Any],
        task: str,
        layout: str,
        info: tuple[str, ...] = (),
        is_masked: bool = False,
    ):
        """`layout`: see `image_specs`; `info`: names; `is_masked`: whether the environment's `info` has action masks.

        Raises UsageError for spaces that no agent here can learn.
        """
        super().__init__(environment)
        self.task = task
        self._info = info
        self._noted = set[str]()  # of NOTES
        self._cannot_render = False
        space, action = environment.observation_space, action_of(task, environment.action_space, is_bounded=True).spec
        self.num_actions = action.num_actions if action.dtype == "int32" else 0
        self._choices = choices_of(environment.action_space) if self.num_actions else Part((), ())
        self.counts = self._choices.counts  # of each part of an action
        if isinstance(environment.action_space, spaces.MultiBinary):
            self.action_space = spaces.MultiDiscrete(np.full(self._choices.shape, 2), np.int8)
        self.masks_are_observed = False
        if self.num_actions and isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces:
            self.masks_are_observed = True
            space = spaces.Dict({key: part for key, part in space.items() if key != ACTION_MASK})
        self.is_masked = is_masked or self.masks_are_observed
        self.original_space = space  # without the mask
        self.leaves = leaves_of(space)
        self.images = image_specs(task, self.leaves, layout)
        of_images = {image.path for image in self.images}
        self._image_spaces = [dict(self.leaves)[image.path] for image in self.images]
        self.number_leaves = [leaf for leaf in self.leaves if leaf[0] not in of_images]
        self.vector_size = sum(_vector_size(task, space) for _, space in self.number_leaves)
        self.parts = parts_of(self.number_leaves)
        if not self.leaves or (self.images and self.parts is None):
            what = f"its observations are {one_line(space)}: nothing but a mask, or images and a text"
            raise UsageError(f"environment.task={task}: {what}; wrap it in gymnasium.wrappers.TransformObservation")
        mask_size = self.num_actions * self.is_masked
        self.observation_space = observation_space(frame_shape_of(self.images), self.vector_size, mask_size)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        """Starts an episode."""
        with reported_of(self.task, self.unwrapped.reset):
            result = self.env.reset(seed=seed, options=options)
            if not isinstance(result, tuple):  # a dict or array of two elements could be unpacked
                raise TypeError(f"reset returned a {type(result).__name__}, not the tuple (observation, info)")
            observation, info = result
            kept = _lives(info)
            self.info_has_mask = ACTION_MASK in info
            adapted, beyond = self._adapted(observation, info)
            return adapted, kept | beyond

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict]:
        """`action`: int, an array of ints, or float[A] within the bounds."""
        with reported_of(self.task, self.unwrapped.step):
            try:
                observation, reward, terminated, truncated, info = self.env.step(self.accepted(action))
            except ValueError as error:
                if "expected 5, got 4" not in str(error):
                    raise
                raise TypeError(f"step returned four values, as in gym before 0.26; {OF_OLD_GYM}") from None
            if not abs(_number("the reward", reward)) <= LARGEST:  # true for NaN, too
                raise BrokenEnvironment(f"environment.task={self.task}: it returned a reward of {reward}")
            kept = _lives(info)
            if terminated or truncated:
                kept |= {name: _number(name, info[name]) for name in self._info if name in info}
            adapted, beyond = self._adapted(observation, info, bool(terminated))
            return adapted, float(reward), bool(terminated), bool(truncated), kept | beyond

    def accepted(self, action: Any) -> Any:
        """Returns an action of `step` as the environment takes it."""
        space: Any = self.env.action_space
        if isinstance(space, spaces.Box):
            return np.clip(np.asarray(action, space.dtype), space.low, space.high)
        return int(action) if isinstance(space, spaces.Discrete) else action

    def random_action(self, observation: Observation, rng: np.random.Generator) -> Any:
        """Returns a valid action of the environment's own space; `observation`: the last one."""
        space: Any = self.env.action_space
        if not self.num_actions:
            low, high = action_bounds(space)
            return rng.uniform(low, high).astype(space.dtype)
        valid = np.flatnonzero(observation[MASK]) if self.is_masked else np.arange(self.num_actions)
        number = int(rng.choice(valid))
        choices = np.array(np.unravel_index(number, self.counts)) + self._choices.starts
        return int(choices[0]) if isinstance(space, spaces.Discrete) else choices.reshape(space.shape)

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        """Returns the frame, uint8[height, width, 3]; None if it cannot be rendered, now or at an earlier call."""
        if self._cannot_render:  # MuJoCo without its libraries ends the process at the second call
            return None
        try:
            return picture(self.env.render())
        except Exception:  # the caller makes no video, and the run continues
            traceback.print_exc()
            self._cannot_render = True
            return None

    def close(self) -> None:
        """Closes the environment, and frees its number."""
        self.opened.close()

    def _adapted(
        self, observation: Any, info: dict[str, Any], is_over: bool = False
    ) -> tuple[Observation, dict[str, Any]]:
        """Returns the observation, and what `info` has of numbers beyond its bounds, and notes."""
        parts: dict[str, Any] = {}
        if self.images:
            parts[FRAMES] = self._frame(observation)
        found = [(path, space, self._value_at(observation, path)) for path, space in self.number_leaves]
        if found:
            parts[NUMBERS] = self._numbers(found)
        notes = self._beyond_bounds(found)
        if self.is_masked:
            parts[MASK], of_mask = self._mask(observation if self.masks_are_observed else info, is_over)
            return parts, notes | of_mask
        late = "info has an action_mask, which is ignored: reset gave none; give it there, too"
        return joined(parts), notes | (self._note(LATE_MASK, late) if self.num_actions and ACTION_MASK in info else {})

    def _value_at(self, observation: Any, path: tuple[str | int, ...]) -> Any:
        for depth, key in enumerate(path):
            try:
                observation = observation[key]
            except (KeyError, IndexError):
                what = f"an observation{_name(path[:depth])} without {key}"
                raise BrokenEnvironment(f"environment.task={self.task}: it returned {what}") from None
        return observation

    def _frame(self, observation: Any) -> np.ndarray:
        """Returns the images of an observation as one frame, uint8."""
        frames = []
        for image, space in zip(self.images, self._image_spaces, strict=True):
            value = self._value_at(observation, image.path)
            _check(self.task, _name(image.path), space, value, is_image=True)
            try:
                frames.append(image.frames(np.asarray(value)))
            except ValueError as error:
                raise BrokenEnvironment(f"environment.task={self.task}: it returned {error}") from None
        return np.asarray(frames_of(self.images, frames))

    def _numbers(self, found: list[tuple[tuple[str | int, ...], Any, Any]]) -> np.ndarray:
        """Returns the parts of an observation that are no images as one vector, float32[D]."""
        vectors = []
        for path, space, value in found:
            _check(self.task, _name(path), space, value, is_image=False)
            with np.errstate(over="ignore"):  # a number that is too large becomes infinite
                vectors.append(np.asarray(spaces.flatten(space, value), np.float32))
            if not np.isfinite(vectors[-1]).all():
                what = f"an observation{_name(path)} that is not finite as float32"
                raise BrokenEnvironment(f"environment.task={self.task}: it returned {what}")
        return vectors[0] if len(vectors) == 1 else np.concatenate(vectors)

    def _beyond_bounds(self, found: list[tuple[tuple[str | int, ...], Any, Any]]) -> dict[str, Any]:
        for path, space, leaf in found:
            if not isinstance(space, spaces.Box):
                continue
            array, low, high = (np.asarray(each, space.dtype).ravel() for each in (leaf, space.low, space.high))
            if (outside := np.flatnonzero((array < low) | (array > high))).size:
                at = int(outside[0])
                what = f"{array[at]:.8g}, beyond its bounds {low[at]:g} to {high[at]:g}"
                line = f"number {at} of an observation{_name(path)} is {what}; it is used as it is"
                return {BEYOND: 1} | self._note(BOUNDS, line)
        return {}

    def _note(self, name: str, line: str) -> dict[str, str]:
        """Returns an item of `info` the first time."""
        is_new = name not in self._noted
        self._noted.add(name)
        return {name: line} if is_new else {}

    def _mask(self, source: Any, is_over: bool) -> tuple[np.ndarray, dict[str, str]]:
        """Returns the mask, uint8[A], and a note; all ones if the game is over, because no action follows."""
        flat = f"an action_mask of {self.num_actions} numbers is read as one of combinations, not of each part"
        fits_both = len(self.counts) > 1 and sum(self.counts) == self.num_actions
        is_flat = fits_both and not isinstance(given := source.get(ACTION_MASK, 0), tuple) and np.ndim(given) == 1
        note = self._note(FLAT_MASK, f"{flat}; give a tuple of arrays for that") if is_flat else {}
        if is_over:
            return np.ones(self.num_actions, np.uint8), note
        what, fix = "an action_mask without a valid action", "set one of its elements to 1, or return terminated"
        try:
            valid = valid_actions(source[ACTION_MASK], self.counts)
            if valid.shape != (self.num_actions,):
                raise ValueError(f"{valid.dtype}{list(valid.shape)}")
            if valid.any():
                return valid.astype(np.uint8), note
        except (KeyError, ValueError) as error:
            what = f"{error} as action_mask" if ACTION_MASK in source else "no action_mask"
            fix = f"give {self.num_actions} numbers at each reset and step, 1 for a valid action, 0 for another"
        raise BrokenEnvironment(f"environment.task={self.task}: it returned {what}; {fix}")


def _name(path: tuple[str | int, ...]) -> str:
    """Returns a path as it is written in Python, such as [arm][0]."""
    return "".join(f"[{key}]" for key in path)


def _vector_size(task: str, space: spaces.Space[Any]) -> int:
    """Returns the size of flattened observations. Raises UsageError for a space whose observations vary in size."""
    with contextlib.suppress(NotImplementedError):  # a space of another package
        vector = spaces.flatten_space(space)
        if isinstance(vector, spaces.Box):
            return vector.shape[0]
    what = f"no vector can be made of its observations, {one_line(space)}"
    fix = "wrap it in one that returns arrays: minigrid's ImgObsWrapper, gymnasium.wrappers.FilterObservation"
    raise UsageError(f"environment.task={task}: {what}; {fix} or TransformObservation")


def _check(task: str, name: str, space: spaces.Space[Any], observation: Any, is_image: bool) -> None:
    """Raises BrokenEnvironment if the part `name` of an observation has another type or shape, or is no whole number of
    its space.

    Gymnasium would convert it to another one. A number that is not finite or beyond the bounds of a Box of floats is no
    error here, nor is an element of an image: `ImageSpec.frames` checks those.
    """
    if isinstance(space, spaces.Box):
        array = np.asarray(observation)
        of_bytes = array.dtype == np.uint8 or (array.dtype == bool and not is_image)
        is_other = array.dtype.kind not in "biuf" or (space.dtype == np.uint8 and not of_bytes)
        if is_other or array.shape != space.shape:
            found, promised = f"{array.dtype}{list(array.shape)}", f"{space.dtype}{list(space.shape)}"
            what = f"an observation{name} of {found}, and its observation_space has {promised}"
            raise BrokenEnvironment(f"environment.task={task}: it returned {what}")
        outside: Any = [] if is_image or space.dtype.kind == "f" else _outside(space, array)
    else:
        outside = [] if space.contains(observation) else [observation]
    if len(outside):
        value = f"an observation{name} with the value {short_repr(outside[0])}"
        what = f"{value}, which its space {short_repr(space)} excludes"
        raise BrokenEnvironment(f"environment.task={task}: it returned {what}; correct the one or the other")


def _outside(space: spaces.Box, array: np.ndarray) -> np.ndarray:
    """Returns the elements that a space of integers excludes, [N]. int64 is right for int8."""
    is_whole = array.dtype.kind != "f"
    return array[(array < space.low) | (array > space.high)] if is_whole else array.ravel()


def _number(name: str, value: Any) -> float:
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "biuf":
        raise TypeError(f"{name} is {short_repr(str(value))}, not one number")
    return float(value)


def _lives(info: dict[str, Any]) -> dict[str, float]:
    if not isinstance(info, dict):
        raise TypeError(f"the info is {short_repr(str(info))}, not a dict")
    return {"lives": int(info["lives"])} if "lives" in info else {}


# What environments must not share ---------------------------------------------------------------------------------


class _NumberedSocket(socket.socket):
    """Holds the lowest number that no other environment on this machine has, until it is closed.

    If the process is killed, the kernel frees the number.
    """

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX)
        for self.number in itertools.count():
            try:
                return self.bind(f"\0apex_jax environment {self.number}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise


# Names and failures ----------------------------------------------------------------------------------------------


def _function_of(task: str, rendered: bool) -> functools.partial[Any]:
    """Returns the function that makes the environment from its settings."""
    module, _, name = task.removeprefix(PREFIX).rpartition(":")
    with reported_of(task):
        try:
            return function_of(imported_module(f"environment.task={task}", module) if module else None, name, rendered)
        except WrongName as error:
            raise UsageError(f"environment.task={task}: {error}") from None


def reported_of(task: str, function: Any = None) -> contextlib.AbstractContextManager[None]:
    """See `reported`; raises BrokenEnvironment."""
    return reported(f"environment.task={task}", BrokenEnvironment, function)
