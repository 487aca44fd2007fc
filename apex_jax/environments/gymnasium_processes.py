"""The processes in which environments of Gymnasium run, and those that an environment starts itself.

They are forked from a fork server, not from this process, whose threads, JAX's among them, may hold locks. Each leads
a process group: a program that an environment starts, such as a simulator, is in that group and killed with it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

from apex_jax.config import Config
from apex_jax.environments import gymnasium_tasks
from apex_jax.environments.gymnasium_tasks import BrokenEnvironment
from apex_jax.types import EnvironmentSpec

PRELOADED = ["apex_jax.environments.gymnasium_pool"]  # by the fork server
PATH_VARIABLES = ("PYTHONPATH", "PYTHONSAFEPATH")  # the fork server is started with these
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
    before = _path_variables()
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
    return functools.partial(lead_group, _path_variables(), function, *arguments)


def _path_variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in PATH_VARIABLES}


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def describe(config: Config, is_tried: bool) -> EnvironmentSpec:
    """Makes and closes an environment in a process of its own, and describes it; `is_tried`: makes some steps, too.

    So no code of a user runs in learner and replay server, and no process of an environment inherits a lock of this
    one. Raises UsageError or BrokenEnvironment, see `gymnasium_tasks.describe`.
    """
    task, seconds = config.environment.task, START_SECONDS + is_tried * TRIED_STEPS * STEP_SECONDS
    what = f"was not made{' and stepped' * is_tried} within {seconds:.0f} s"
    with fork_server() as context:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=leader(_send_description, sender, config, is_tried))
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
        what = what if code is None else f"ended its process, exit code {code}"
        raise BrokenEnvironment(f"environment.task={task}: it {what}")
    if isinstance(result, Exception):
        raise result
    return result


def _send_description(sender: Connection, config: Config, is_tried: bool) -> None:
    try:
        result: Any = gymnasium_tasks.describe(config, TRIED_STEPS if is_tried else 0)
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
