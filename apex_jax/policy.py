"""A trained agent in a program of your own: no sockets, no EnvPool.

from apex_jax import load_policy

policy = load_policy("runs/CartPole-v1-1")  # or the folder that `python main.py export` has written
action = policy(observation)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from apex_jax.agent.algorithm import Algorithm, Params
from apex_jax.agent.policy_function import observation_shape
from apex_jax.agent.registry import make_algorithm, resolved
from apex_jax.config import Config
from apex_jax.config.keys import names_code
from apex_jax.config.load import RESULT_KEYS, check_trusted, config_of, load_run, parse_overrides
from apex_jax.host.disk import run_of_checkpoint
from apex_jax.host.errors import RunError, UsageError, first_line
from apex_jax.host.machine import usable_memory_bytes
from apex_jax.host.user_code import reported
from apex_jax.run import params_file
from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.run.checkpoint_files import CheckpointError
from apex_jax.run.environment_spec import of_record, read_environment_spec
from apex_jax.run.evaluations import run_directory_of
from apex_jax.run.provenance import PARAMS_NAME, find_code
from apex_jax.transport.params_codec import architecture_of
from apex_jax.types import (
    ACTION_MASK,
    FRAMES,
    MASK,
    NUMBERS,
    EnvironmentSpec,
    ImageSpec,
    Observation,
    Part,
    frames_of,
    joined,
    map_parts,
    valid_actions,
)

Given: TypeAlias = Any  # an observation of the environment: a number, an array, or a mapping or tuple of them


def load_policy(
    run: str | os.PathLike[str], updates: int | None = None, exploration: float = 0.0, code: Sequence[str] = ()
) -> Policy:
    """Returns the agent that a run has trained.

    `run`: the run directory, one of its `checkpoints/<updates>`, its `best` (the params of the best evaluation), or the
    folder of an exported policy; `updates`: the checkpoint of this number of updates instead of the newest undamaged
    one; `exploration`: the rate of random actions (DQN) or the standard deviation of the noise (DPG); evaluations of
    DQN use `evaluator.epsilon`, because some games loop for ever without it; `code`: the algorithm or network of the
    run, such as "algorithm.name=my_file:make", if it is the user's, whose module is not imported otherwise.
    Raises RunError or UsageError, with a message of one line, if there is no such run or checkpoint, or if its
    configuration cannot be read.
    """
    agent = load_agent(run, updates, parse_overrides(code, ""))
    return Policy(agent.algorithm, agent.params, agent.environment_spec, agent.progress.updates, exploration)


class Agent(NamedTuple):
    """A trained agent, its configuration, and its progress."""

    config: Config  # as `agent.registry.resolved` returns it
    environment_spec: EnvironmentSpec
    algorithm: Algorithm
    params: Params
    progress: Progress


def load_agent(run: str | os.PathLike[str], updates: int | None, code: Mapping[str, Any]) -> Agent:
    """Returns the agent of a run, or of an exported policy. Arguments and errors: see `load_policy`."""
    directory, step = run_of_checkpoint(run)
    exported = Path(directory, PARAMS_NAME)
    with _read_as_written(directory):
        if exported.is_file():
            metadata = params_file.read_metadata(exported)
            environment_spec = of_record(json.loads(metadata["interface"]))
            written = config_of(json.loads(metadata["config"]))
        else:
            environment_spec, written = read_environment_spec(directory), load_run(directory, RESULT_KEYS)
        config = resolved(written, environment_spec.spec)
        check_trusted(config, run, code, ("algorithm.", "network."))
    find_code(run_directory_of(directory), is_named=bool(code))
    own = config.network.name
    with reported(f"network.name={own}", RunError) if names_code(own) else _read_as_written(directory):
        algorithm = make_algorithm(config, environment_spec.spec)
        restored = restore_params(config, directory, algorithm, step if updates is None else updates)
    return Agent(config, environment_spec, algorithm, *restored)


@contextlib.contextmanager
def _read_as_written(directory: str) -> Iterator[None]:
    """Raises RunError for an exception of any other type but UsageError: the files may describe any network."""
    try:
        yield
    except (RunError, UsageError):
        raise
    except Exception as error:
        what = f"{directory} is no run or exported policy of this release: {first_line(error)}"
        raise RunError(f"{what}; give the folder of an exported policy, or a run directory") from error


def restore_params(
    config: Config, run: str, algorithm: Algorithm, updates: int | None = None
) -> tuple[Params, Progress]:
    """Returns the params of a run's newest checkpoint, or of that after `updates`, on the device.

    `config`: as `agent.registry.resolved` returns it; `run`: may also be the folder of the best evaluation, see
    `apex_jax.run.evaluations`, or of an exported policy. Raises RunError, see `Checkpointer.restore_newest`; also
    without a checkpoint.
    """
    state, key = _shapes_of(algorithm, run), config.checkpoint_compatibility_key
    like = algorithm.acting_params(state)
    architecture, exported = architecture_of(like), Path(run, PARAMS_NAME)
    if exported.is_file():
        with _read_as_written(run):
            metadata = params_file.read_metadata(exported)
            made, steps = int(metadata["updates"]), int(metadata.get("environment_steps", 0))
        params = params_file.load_params(exported, like)
    else:
        checkpointer = Checkpointer(run, read_only=True)
        restored = checkpointer.restore_newest(state, key, architecture, updates)
        if restored is None:
            if Path(run, "evaluation.json").exists():
                raise RunError(f"{run} is the best evaluation of an earlier release; play the run itself, or use that")
            raise RunError(f"{checkpointer.directory} holds no checkpoint yet; try again after a minute of training")
        saved, progress = restored
        # On the device, because a jitted call would copy NumPy arrays each time.
        return jax.device_put(algorithm.acting_params(type(state)(*saved))), progress
    if updates not in (None, made):
        raise CheckpointError(f"{run} holds the params after {made} updates, not {updates}; leave `updates` out")
    return jax.device_put(params), Progress(made, steps, 0.0, 0, key, architecture)


def _shapes_of(algorithm: Algorithm, run: str | os.PathLike[str]) -> Any:
    """Returns the shapes and dtypes of the state of a run's algorithm. Raises RunError if it does not fit in memory."""
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    if size > usable_memory_bytes():
        what = f"the network and the optimizer of {os.fspath(run)} have {size >> 30:,} GiB"
        raise RunError(f"{what}, more than the memory of this machine")
    return state


class Policy:
    """A trained agent: takes observations of its environment, returns actions that the environment accepts.

    An observation is what the environment returned: a number, an array, or a mapping or tuple of such parts, nested as
    Gymnasium's `Dict` and `Tuple` are; or, without images, the vector float[D] that its parts make. In a batch of N
    observations each array has one more axis in front. An agent that sees stacks of F frames takes stacks [F, *O] or
    [N, F, *O], or one frame [*O] at a time, which it stacks itself: then call `reset` at the start of each episode.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        params: Params,
        environment_spec: EnvironmentSpec,
        updates: int = 0,
        exploration: float = 0,
    ):
        """`updates`: number of updates that made the params; `exploration`: see `load_policy`."""
        self.environment_spec = environment_spec
        self.updates = updates
        self._act = algorithm.act
        self._params = params
        self._exploration = exploration
        self._key = jax.random.key(0)
        self._calls = 0
        self._stack: dict[str, np.ndarray] = {}  # by part

    def __repr__(self) -> str:
        shapes = map_parts(lambda part: part.shape, self.environment_spec.spec.observation)
        return f"Policy(observation={shapes}, updates={self.updates:,})"

    def reset(self) -> None:
        """Discards the frames seen so far: the next one starts an episode."""
        self._stack = {}

    def __call__(self, observation: Given, mask: Any = None) -> Any:
        """Returns the action for an observation, or an array of the actions for a batch.

        Discrete: int, or int32[N]. Continuous: [A] or [N, A] of the environment's dtype, within its bounds. `mask`: see
        `act`.
        """
        return self.act(observation, mask)[0]

    def act(self, observation: Given, mask: Any = None) -> tuple[Any, Any]:
        """Returns the action and its value, or for a batch the actions and their values, float32[N].

        `mask`: of the valid actions, [A] or [N, A], 1 for each of those chosen from; `info["action_mask"]` of an
        environment that has masks there. One that is part of the observation need not be given again.
        The value estimates the discounted return from here, q(s, a), of the rewards that the agent was trained on
        (Atari: clipped ones, of one life). Raises ValueError if the observation has another
        shape, dtype or range than those that the agent was trained on, or if no action is valid.
        """
        if mask is not None and not self.environment_spec.spec.action.is_masked:
            raise ValueError("a mask, but the agent was trained without masks; leave it out, or train the agent again")
        stacks, batch = self._stacks(observation, mask)
        exploration = np.full(math.prod(batch), self._exploration, np.float32)
        output = self._act(self._params, stacks, exploration, self._key, self._calls)
        self._calls += 1
        actions, values = self.environment_spec.scaled(np.asarray(output.action)), np.asarray(output.value)
        if batch:
            return actions, values
        return (int(actions[0]) if actions.ndim == 1 else actions[0]), float(values[0])

    def _stacks(self, observation: Given, mask: Any) -> tuple[Observation, tuple[int, ...]]:
        """Returns observations [N, F, *O], and (N,); or () if one was given, which is N = 1."""
        spec, arrays = self.environment_spec.spec, self._arrays(observation, mask)
        if spec.frame_stack > 1 and all(arrays[name].shape == part.shape for name, part in spec.parts.items()):
            arrays = {name: self._pushed(name, arrays[name], part.stack) for name, part in spec.parts.items()}
        batches = set()
        for name, part in spec.parts.items():
            item = observation_shape(part)
            axes = arrays[name].ndim - len(item)
            batches.add(arrays[name].shape[: max(0, axes)])
            if axes not in (0, 1) or arrays[name].shape[axes:] != item or len(batches) > 1:
                raise ValueError(self._mismatch(f"an observation of shape {arrays[name].shape}"))
        if MASK in arrays and not arrays[MASK].any(axis=-1).all():
            raise ValueError(f"a mask without a valid action: one of its {spec.action.num_actions} elements must be 1")
        stacks = {name: arrays[name].reshape(-1, part.stack, *part.shape) for name, part in spec.parts.items()}
        return joined(stacks), batches.pop()

    def _arrays(self, observation: Given, mask: Any) -> dict[str, np.ndarray]:
        """Returns the parts of observations as the agent sees them: [*O], or [F, *O] or [N, ...] of those."""
        described, spec = self.environment_spec, self.environment_spec.spec
        arrays = {}
        if spec.has_images:
            frames = [self._frames(image, _value_at(observation, image.path)) for image in described.images]
            arrays[FRAMES] = frames_of(described.images, frames) if frames else np.asarray(observation)
        if spec.vector_size:
            arrays[NUMBERS] = self._vectors(observation) if described.parts else np.asarray(observation)
        for name, array in arrays.items():
            if array.dtype.kind not in "biuf" or (name == FRAMES and array.dtype != np.uint8):
                raise ValueError(self._mismatch(f"an observation of {array.dtype}"))
            arrays[name] = array.astype(spec.parts[name].dtype, copy=False)
        if spec.action.is_masked:
            arrays[MASK] = self._mask(_value_at(observation, (ACTION_MASK,)) if mask is None else mask)
        if arrays.keys() == {NUMBERS} and spec.frame_stack == 1 and arrays[NUMBERS].shape[-1:] != spec.frame_shape:
            numbers = arrays[NUMBERS]  # perhaps a matrix or a number, such as those of Catch and Taxi
            arrays[NUMBERS] = numbers.reshape(spec.frame_shape) if numbers.size == spec.vector_size else numbers
        return arrays

    def _frames(self, image: ImageSpec, value: Any) -> np.ndarray:
        """Returns images [..., *image.shape] as frames [..., *O]."""
        images = np.asarray(value)
        is_other = images.dtype.kind not in "biuf" or (image.dtype == "uint8" and images.dtype != np.uint8)
        if is_other or images.shape[-len(image.shape) :] != image.shape:
            raise ValueError(self._mismatch(f"an observation of {images.dtype} {images.shape}"))
        return image.frames(images)

    def _mask(self, mask: Any) -> np.ndarray:
        """Returns a mask of an environment as uint8[A] or [N, A]."""
        if mask is None:
            raise ValueError(self._mismatch(f"an observation without {ACTION_MASK}"))
        part = self.environment_spec.action_part
        counts = part.counts if part is not None else (self.environment_spec.spec.action.num_actions,)
        try:
            return valid_actions(mask, counts).astype(np.uint8)
        except ValueError as error:
            raise ValueError(f"{error} as action_mask; expected {math.prod(counts)} numbers, 1 or 0") from None

    def _pushed(self, name: str, newest: np.ndarray, stack: int) -> np.ndarray:
        """Returns the stack of a part that ends with its newest value; that of an episode's first one repeats it."""
        if stack == 1:
            return newest
        before = self._stack.get(name, np.repeat(newest[None], stack, axis=0))
        self._stack[name] = np.concatenate([before[1:], newest[None]])
        return self._stack[name]

    def _vectors(self, observation: Given) -> np.ndarray:
        """Returns the parts of one observation as one vector [D], or those of a batch as [N, D], or of stacks."""
        parts = self.environment_spec.parts
        assert parts is not None
        if _is_flat(observation, parts, self.environment_spec.spec.vector_size):
            return np.asarray(observation)
        found = [_value_at(observation, part.path) for part in parts]
        if missing := [part.name for part, value in zip(parts, found, strict=True) if value is None]:
            raise ValueError(self._mismatch(f"an observation without {', '.join(missing)}"))
        arrays = [np.asarray(value) for value in found]
        batch = arrays[0].shape[: arrays[0].ndim - len(parts[0].shape)]  # (), (N,) or, of stacks, (F,) or (N, F)
        most = 2 if self.environment_spec.spec.frame_stack > 1 else 1
        for part, array in zip(parts, arrays, strict=True):
            if array.dtype.kind not in ("iu" if part.counts else "biuf"):
                raise ValueError(self._mismatch(f"an observation of {_with_name(part, array.dtype)}"))
            if array.shape != batch + part.shape or len(batch) > most:
                shapes = (f"{part.name or 'shape'} {array.shape}" for part, array in zip(parts, arrays, strict=True))
                raise ValueError(self._mismatch(f"an observation of {', '.join(shapes)}"))
        try:
            flat = [part.flattened(array, batch) for part, array in zip(parts, arrays, strict=True)]
        except ValueError as error:
            raise ValueError(self._mismatch(str(error))) from None
        return np.concatenate(flat, axis=-1)

    def _mismatch(self, found: str) -> str:
        described, spec = self.environment_spec, self.environment_spec.spec
        names = [_with_name(Part(image.path, ()), f"{image.dtype} {image.shape}") for image in described.images]
        names += map(_describe, described.parts or ())
        if not names:
            names = [f"{spec.frame_dtype} {spec.frame_shape}"]
        if spec.action.is_masked:
            names.append(_describe(Part((ACTION_MASK,), (spec.action.num_actions,))))
        stacks = f"; in stacks of {spec.frame_stack}, or one at a time" if spec.frame_stack > 1 else ""
        return f"{found}; expected {', '.join(names)}, or a batch of them (N, ...){stacks}"


def _is_flat(observation: Given, parts: tuple[Part, ...], size: int) -> bool:
    """Returns whether an observation, or a batch, was given as vectors [D] that hold all parts; `size`: D."""
    first = parts[0]
    if first.path:
        is_vector = isinstance(observation, list) and isinstance(first.path[0], str)
        return is_vector or not isinstance(observation, Mapping | tuple | list)
    array = np.asarray(observation)
    if first.counts:
        return array.dtype.kind == "f"
    axes = array.ndim - len(first.shape)
    return array.shape[-1:] == (size,) and (axes not in (0, 1) or array.shape[axes:] != first.shape)


def _value_at(observation: Given, path: tuple[str | int, ...]) -> Any:
    """Returns the part of an observation at a path, None if there is none."""
    for key in path:
        try:
            observation = observation[key]
        except (KeyError, IndexError, TypeError):
            return None
    return observation


def _with_name(part: Part, value: Any) -> str:
    return f"{part.name} {value}".lstrip()


def _describe(part: Part) -> str:
    """Returns a part as a message names it, such as `arm/0 (3,)`."""
    values = {f"{start} to {start + count - 1}" for start, count in zip(part.starts, part.counts, strict=True)}
    if values:
        return _with_name(part, f"{part.shape} of whole numbers {', '.join(sorted(values))}")
    return _with_name(part, part.shape) if part.path else f"float32 {part.shape}"
