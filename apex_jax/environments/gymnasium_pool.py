"""Environments of Gymnasium behind the interface of EnvPool's pools: `send`, `recv`, `async_reset`, `render`, `close`.

They are Gymnasium's own vector environments, one for each group that is acted on at once, so that one group steps while
the actor computes the actions of another. They reset on the step after an episode's end, as EnvPool does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.util import Finalize
from typing import Any

import gymnasium
import numpy as np
from gymnasium import logger
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.async_vector_env import _async_worker
from gymnasium.vector.utils import batch_space

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.environments.gymnasium_tasks import BEYOND, NOTES, BrokenEnvironment, Looked, described, look, make
from apex_jax.environments.task import action_space, observation_space
from apex_jax.types import EnvironmentSpec, Observation

ANSWER_SECONDS = 50.0  # of a step or reset; the supervisor kills an actor that makes no progress for 60

_log = logging.getLogger(__name__)

Result = tuple[Observation, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]


class GymnasiumPool:
    """Environments in groups; `recv` returns the groups in the order in which they were sent.

    With `environment.own_processes`, each environment runs in a process of its own. Its methods raise BrokenEnvironment
    if an environment fails, ends its process, or does not answer in time.
    """

    def __init__(
        self,
        environment: EnvironmentConfig,
        described: EnvironmentSpec,
        seeds: np.ndarray,
        max_steps: int,
        per_step: int,
        rendered: bool,
        info: tuple[str, ...] = (),
    ):
        """`described`: the task; `seeds`: int[E]; `max_steps`: of an episode; `per_step`: environments of a group.

        `rendered`: environment 0 can be rendered; `info`: numbers that `recv` returns of the end of an episode.
        """
        logger.min_level = logger.ERROR + 1  # `_Group` raises what Gymnasium would log as well
        self._task = environment.task
        self._info = info
        self._beyond = 0  # observations beyond the bounds of their space
        self._noted = set[str]()  # of NOTES, each logged once
        members = np.array_split(np.arange(len(seeds)), -(-len(seeds) // per_step))
        parts = [
            functools.partial(
                make,
                environment.task,
                environment.settings,
                max_steps,
                rendered and i == 0,
                int(seed),
                environment.observation_layout,
                info,
                described.spec.action.is_masked,
            )
            for i, seed in enumerate(seeds)
        ]
        self._groups: list[_Group] = []
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            for ids in members:
                self._groups.append(_Group(environment, described, ids, [parts[i] for i in ids], seeds[ids]))
            failed.pop_all()
        self._sent: deque[_Group] = deque()

    def async_reset(self) -> None:
        """Starts a new episode in every environment."""
        for group in self._groups:
            group.reset()
        self._sent = deque(self._groups)

    def send(self, actions: np.ndarray, env_id: np.ndarray) -> None:
        """Starts the next step of whole groups; `actions` [A, ...] for the environments `env_id`, int[A]."""
        rows = np.full(sum(len(group.ids) for group in self._groups), -1)
        rows[env_id] = np.arange(len(env_id))
        for group in self._groups:
            if rows[group.ids[0]] >= 0:
                group.step(actions[rows[group.ids]])
                self._sent.append(group)

    def recv(self) -> Result:
        """Waits for the group that was sent first: observations [A, *O], rewards, terminated, truncated, infos."""
        group = self._sent.popleft()
        observation, reward, terminated, truncated, info = group.receive()
        infos = {"env_id": group.ids}
        self._beyond += int(np.sum(info.get(BEYOND, 0)))
        for name in {*NOTES} & info.keys() - self._noted:
            self._noted.add(name)
            _log.warning("environment.task=%s: %s", self._task, next(line for line in info[name] if line))
        if "lives" in info:
            infos["lives"] = np.asarray(info["lives"], np.int32)
        for name in self._info:
            if name in info:  # the info of at least one environment has it
                infos[name] = np.where(info[f"_{name}"], info[name], np.nan)
        return observation, reward, terminated, truncated, infos

    def render(self) -> tuple[np.ndarray | None, ...]:
        """Returns the frame of environment 0, uint8[height, width, 3]."""
        with self._groups[0].reported():
            return self._groups[0].vector.call("render")

    def close(self) -> None:
        """Ends the environments and their processes."""
        if self._beyond:
            _log.info("%d observations were beyond the bounds of their space", self._beyond)
        vectors = [group.vector for group in self._groups if isinstance(group.vector, _Processes)]
        pipes = [pipe for vector in vectors for pipe in vector.parent_pipes]
        _end(pipes, [process for vector in vectors for process in vector.processes])  # all at the same time
        for group in self._groups:
            with contextlib.suppress(Exception):  # of an environment's own `close`
                group.vector.close()


class _Processes(AsyncVectorEnv):
    """Environments in processes of their own.

    They are closed at the latest when this process ends, even if some have failed or hang; Gymnasium's own method
    would wait for those for ever.
    """

    def __init__(self, described: EnvironmentSpec, functions: list[Callable[[], Any]]):
        """`functions`: make the environments. Raises the error of a function that fails."""
        spec = described.spec
        frame_shape, masks = spec.frame_shape if spec.has_images else (), spec.action.is_masked
        space = observation_space(frame_shape, spec.vector_size, spec.action.num_actions if masks else 0)
        example = gymnasium.Env[Any, Any]()  # has the spaces, so that no environment is made in this process
        example.observation_space, example.action_space = space, action_space(described)
        self.parent_pipes, self.processes = [], []
        try:
            with fork_server():
                super().__init__(
                    [lambda: example] * len(functions),
                    context="forkserver",
                    daemon=False,  # an environment may start processes itself
                    worker=leader(_serve, functions),
                    observation_mode=(batch_space(space, len(functions)), space),  # type: ignore[arg-type]
                )
        except BaseException:
            self.closed = True
            _end(self.parent_pipes, self.processes)
            raise
        # Called before `multiprocessing` waits for processes at the end of this one.
        self._end = Finalize(self, _end, (self.parent_pipes, self.processes), exitpriority=1)

    def _check_spaces(self) -> None:
        self.call_async("vector_size")  # answered once the environment is made; Gymnasium would wait for ever
        self.call_wait(START_SECONDS)
        super()._check_spaces()

    def _poll_pipe_envs(self, timeout: float | None = None) -> bool:
        """Returns whether all processes answered. Raises EOFError if one has ended, even if children hold its pipe."""
        until = time.monotonic() + (ANSWER_SECONDS if timeout is None else timeout)
        for pipe, process in zip(self.parent_pipes, self.processes, strict=True):
            ready = wait([pipe, process.sentinel], max(0.0, until - time.monotonic()))
            if not pipe.poll():
                if ready:
                    raise EOFError
                return False
        return True

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the processes."""
        self._end()


def _end(pipes: list[Any], processes: list[Any]) -> None:
    """Asks the processes to close their environments, waits up to CLOSE_SECONDS, and kills what remains of them."""
    pipes = [pipe for pipe in pipes if pipe is not None and not pipe.closed]  # failed environments have closed theirs
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(("close", None))
    end_groups(processes, CLOSE_SECONDS)
    for pipe in pipes:
        pipe.close()


def _serve(functions: list[Callable[[], Any]], index: int, _: Any, pipe: Any, parent_pipe: Any, *others: Any) -> None:
    """Makes an environment and serves it to `_Processes` by `_async_worker`; an error of `make` is sent there, too."""
    parent_pipe.close()  # before the environment starts processes, which would inherit it
    try:
        environment = functions[index]()
    except Exception as error:
        errors = others[1]
        errors.put((index, type(error), error, ""))
        pipe.recv()
        pipe.send((None, False))
    else:
        _async_worker(index, lambda: environment, pipe, parent_pipe, *others)


class _Group:
    """Environments that step together."""

    def __init__(
        self,
        environment: EnvironmentConfig,
        described: EnvironmentSpec,
        ids: np.ndarray,
        functions: list[Callable[[], Any]],
        seeds: np.ndarray,
    ):
        self.ids = ids.astype(np.int32)
        self._task = environment.task
        self._seeds: list[int | None] | None = [int(seed) for seed in seeds]
        self._actions: np.ndarray | None = None  # None: reset
        self.vector: AsyncVectorEnv | SyncVectorEnv
        if environment.own_processes:
            with self.reported():
                self.vector = _Processes(described, functions)
        else:
            self.vector = SyncVectorEnv(functions)

    def reset(self) -> None:
        self._actions = None
        if isinstance(self.vector, AsyncVectorEnv):
            with self.reported():
                self.vector.reset_async(seed=self._seeds)

    def step(self, actions: np.ndarray) -> None:
        self._actions = actions
        if isinstance(self.vector, AsyncVectorEnv):
            with self.reported():
                self.vector.step_async(actions)

    def receive(self) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Returns the result of `reset` or `step`: observations, rewards, terminated, truncated, infos."""
        with self.reported():
            if self._actions is not None:
                if isinstance(self.vector, AsyncVectorEnv):
                    return self.vector.step_wait(timeout=ANSWER_SECONDS)
                return self.vector.step(self._actions)
            if isinstance(self.vector, AsyncVectorEnv):
                observation, info = self.vector.reset_wait(START_SECONDS if self._seeds else ANSWER_SECONDS)
            else:
                observation, info = self.vector.reset(seed=self._seeds)
        self._seeds = None
        none = np.zeros(len(self.ids), bool)
        return observation, np.zeros(len(self.ids)), none, none, info

    @contextlib.contextmanager
    def reported(self) -> Any:
        """Raises BrokenEnvironment if a process of an environment has ended or does not answer."""
        try:
            yield
        except (multiprocessing.TimeoutError, EOFError, OSError) as error:
            processes = getattr(getattr(self, "vector", None), "processes", [])
            for process in processes:
                process.join(0.1)
            codes = [process.exitcode for process in processes if process.exitcode is not None]
            what = f"the process of an environment ended{f' with exit code {codes[0]}' if any(codes) else ''}"
            if isinstance(error, multiprocessing.TimeoutError):
                hangs = "has not answered in time; it hangs, or a step of it is too slow"
                what = f"one of {len(self.ids)} environments {hangs}"
            raise BrokenEnvironment(f"environment.task={self._task}: {what}") from None


# The processes in which environments run, and those that an environment starts itself -------------------------------


PRELOADED = ["apex_jax.environments.gymnasium_pool"]  # by the fork server
OF_JAX = ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE", "PJRT_NPROC", "JAX_COMPILATION_CACHE_DIR")
VARIABLES = ("PYTHONPATH", "PYTHONSAFEPATH", *OF_JAX)  # as they are when a process starts, not when the server did
START_SECONDS = 240.0  # until an environment is made, or has returned its first observation
CLOSE_SECONDS = 2.0  # for environments to close
TRIED_STEPS = 10  # before anything starts
STEP_SECONDS = 50.0  # longest step, as for an actor
LONGEST_TMPDIR = 71  # bytes; a Unix socket's path has at most 107


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServerContext]:
    """Yields the context of processes that are forked from the fork server, which has the `sys.path` of this process.

    Otherwise the server would look for modules as a new interpreter does, in the working directory first. Processes
    that are started within do not run the main module of this process, which need not guard its call of `train`.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        usual, tempfile.tempdir = tempfile.tempdir, "/tmp"
        multiprocessing.util.get_temp_dir()  # of the server's sockets, from now on
        tempfile.tempdir = usual
    before = _variables()
    _set({"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONSAFEPATH": "1"})
    try:
        forkserver.ensure_running()
    finally:
        _set(before)
    spawn.get_preparation_data = _preparation_data  # type: ignore[assignment]
    _thread.starts_without_main = True
    try:
        yield multiprocessing.get_context("forkserver")
    finally:
        _thread.starts_without_main = False


_thread = threading.local()
_usual_preparation_data = spawn.get_preparation_data


def _preparation_data(name: str) -> dict[str, Any]:
    """Returns what a new process is prepared with, without the main module if this thread asks for that."""
    data: dict[str, Any] = _usual_preparation_data(name)
    if getattr(_thread, "starts_without_main", False):
        data = {key: value for key, value in data.items() if not key.startswith("init_main_from_")}
    return data


def leader(function: Callable[..., None], *arguments: Any) -> Callable[..., None]:
    """Returns `lead_group` with a function, as the target of a process of the fork server."""
    return functools.partial(lead_group, _variables(), function, *arguments)


def _variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES}


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


_looked_before: dict[tuple[Any, ...], Looked] = {}  # by the arguments of `look`: for the next description alone


def describe(config: Config, is_tried: bool, is_kept: bool = False) -> EnvironmentSpec:
    """Makes and closes an environment in a process of its own, and describes it; `is_tried`: makes some steps, too.

    So no code of a user runs in learner and replay server, and no process of an environment inherits a lock of this
    one. `is_kept`: the next description is of what this one has seen, since some environments take long to make. Raises
    UsageError or BrokenEnvironment, see `gymnasium_tasks.describe`.
    """
    environment, steps = config.environment, TRIED_STEPS if is_tried else 0
    arguments = environment.task, environment.settings, environment.observation_layout, config.seed
    looked = None if is_kept else _looked_before.pop(arguments, None)
    if looked is None:
        seconds = START_SECONDS + steps * STEP_SECONDS
        looked = apart(look, (*arguments, steps), environment.task, seconds)
    result = described(config, looked)
    if is_kept:
        _looked_before[arguments] = looked
    return result


def apart(function: Callable[..., Any], arguments: tuple[Any, ...], task: str, seconds: float) -> Any:
    """Returns what a function returns in a process of its own. Raises its errors, and BrokenEnvironment if it hangs."""
    with fork_server() as context:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=leader(_send_result, sender, function, *arguments))
        process.start()
    sender.close()
    result = None
    with receiver, contextlib.suppress(EOFError):
        try:
            wait([receiver, process.sentinel], seconds)
            if receiver.poll():
                result = receiver.recv()
        finally:
            process.join(CLOSE_SECONDS)
            code = process.exitcode
            end_groups([process], 0.0)
    if result is None:
        late, ended = f"was not made and stepped within {seconds:.0f} s", f"ended its process, exit code {code}"
        raise BrokenEnvironment(f"environment.task={task}: it {late if code is None else ended}")
    if isinstance(result, Exception):
        raise result
    return result


def _send_result(sender: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        result: Any = function(*arguments)
    except Exception as error:
        result = error
    sender.send(result)


def lead_group(variables: dict[str, str | None], function: Callable[..., None], *arguments: Any) -> None:
    """Runs a function, the whole work of this process, as the leader of a group that ends with the parent process.

    Once the parent has ended, even by SIGKILL, the function has CLOSE_SECONDS to return. Ignores Ctrl-C.
    `variables`: environment variables of the parent, which programs that an environment starts inherit.
    """
    _set(variables)
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def kill_when_over() -> None:
        wait([parent.sentinel])
        time.sleep(CLOSE_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=kill_when_over, name="end with the parent", daemon=True).start()
    try:
        function(*arguments)
    finally:
        for child in multiprocessing.active_children():  # otherwise this process would wait for them
            child.kill()
        if wait([parent.sentinel], 0.05):  # a parent that dies may close the function's pipe before its sentinel
            os.killpg(0, signal.SIGKILL)


def end_groups(processes: Sequence[Any], seconds: float) -> None:
    """Waits up to `seconds` for processes to end, then kills them with their groups."""
    until = time.monotonic() + seconds
    processes = [process for process in processes if process.pid]  # the others could not be started
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the leader may have ended before its group
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
