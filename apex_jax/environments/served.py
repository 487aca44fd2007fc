"""Serves environments to `processes`, in this interpreter or in one of the user's: `python served.py SETTINGS`.

It needs Python 3.8 and NumPy, and imports else only the user's package, with Gymnasium or gym from 0.21 on, whose
differences end here. Requests and what they return, in messages that `packed` writes:

    make     module, name, settings, seed, is_rendered, names   returns spaces, can be rendered, frames per second
    reset    seed or None, options                              returns observation, info
    step     action                                             returns observation, reward, terminated, truncated, info
    render                                                      returns the picture
    call     module, name, text                                 returns the text that a function returns

A reply is ("result", value) or ("usage" or "broken", line of the error). `info` keeps the number of lives and masks,
and at the end of an episode what `names` lists.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

KEPT = ("lives", "action_mask")  # of the info of every step
LIBRARIES = ("gymnasium", "gym")  # that have registries, in the order in which they are asked
FORMS = "give gymnasium:ID, or gymnasium:MODULE:ID for an environment that a module registers"
RECEIVED_BYTES = 2**16  # at most, of a message at once
CLOSE_SECONDS = 2.0  # for environments to close, once nobody needs them


class WrongName(Exception):
    """The settings name something that is not there."""


def packed(message: Any) -> bytes:
    """Returns a message: its size, that of its JSON, the JSON, and the elements of its arrays."""
    arrays: list = []
    text = json.dumps(_encoded(message, arrays)).encode()
    size = len(text) + sum(map(len, arrays))
    return b"".join([struct.pack("!QQ", size, len(text)), text, *arrays])


def _encoded(value: Any, arrays: list) -> Any:
    """Returns a value as JSON can hold it: tuples, lists, dicts and arrays as a kind with its content."""
    if value is None or type(value) in (bool, int, float, str):  # none of NumPy
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return "dict", [(_encoded(key, arrays), _encoded(part, arrays)) for key, part in value.items()]
    if isinstance(value, (tuple, list)):
        return "list" if isinstance(value, list) else "tuple", [_encoded(part, arrays) for part in value]
    import numpy as np

    array = np.asarray(value)
    array = np.asarray(array.tolist()) if array.dtype == object else array
    if array.dtype.kind not in "biuf":
        raise TypeError(f"it returned {str(value)[:80]!r}, of {type(value).__name__}, which is no number")
    arrays.append(array.tobytes())
    return "array", array.dtype.str, array.shape


def received(pipe: socket.socket) -> Any:
    """Waits for a message and returns it; arrays without axes as scalars of NumPy. Raises EOFError if it is closed."""
    content, size = bytearray(), 16
    while len(content) < size:
        if not (more := pipe.recv(max(RECEIVED_BYTES, size - len(content)))):
            raise EOFError
        content += more
        size = 16 + struct.unpack_from("!Q", content)[0] if len(content) >= 16 else 16
    arrays = 16 + struct.unpack_from("!Q", content, 8)[0]
    return _decoded(json.loads(content[16:arrays]), content, [arrays])


def _decoded(value: Any, content: bytearray, at: list) -> Any:
    """Returns a value; `at`: where the next array is, in one element."""
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == "array":
        import numpy as np

        dtype, shape = np.dtype(parts[0]), tuple(parts[1])
        array = np.ndarray(shape, dtype, content, at[0])  # without a copy
        at[0] += array.nbytes
        return array[()]
    if kind == "dict":
        return {_decoded(key, content, at): _decoded(part, content, at) for key, part in parts[0]}
    values = [_decoded(part, content, at) for part in parts[0]]
    return values if kind == "list" else tuple(values)


class Served:
    """An environment of Gymnasium or gym, behind requests."""

    environment: Any = None
    function: Any = None  # that makes it

    def make(self, module: str, name: str, settings: dict, seed: int, is_rendered: bool, names: tuple) -> tuple:
        """Makes the environment. Raises WrongName if there is none of that name."""
        seed_generators(seed)  # of which a module may draw, too
        self.function = function_of(_imported(module), name, is_rendered)
        seed_generators(seed)  # the module may have imported torch, whose first seed is always the same
        self.environment = environment = self.function(**settings)
        seed_generators(seed)  # and so may the constructor
        check_class(environment, name)
        self.names = names
        metadata = getattr(environment, "metadata", None) or {}
        self.has_old_render = "render_modes" not in metadata and "render.modes" in metadata
        can_render = "rgb_array" in (metadata.get("render_modes") or metadata.get("render.modes") or ())
        rate = metadata.get("render_fps") or metadata.get("video.frames_per_second")
        return _described(environment.observation_space), _described(environment.action_space), can_render, rate

    def reset(self, seed: Any, options: Any) -> tuple:
        """Starts an episode; gym before 0.26 returns no info, and before 0.22 takes no seed."""
        given, seeded = {"options": options} if options else {}, {} if seed is None else {"seed": seed}
        try:
            result = self.environment.reset(**seeded, **given)
        except TypeError as error:
            if "unexpected keyword argument 'seed'" not in str(error):
                raise
            with contextlib.suppress(TypeError, AttributeError):  # procgen's `seed` takes none
                self.environment.seed(seed)
            result = self.environment.reset(**given)
        is_new = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        observation, info = result if is_new else (result, {})
        return observation, self._kept(info, KEPT)

    def step(self, action: Any) -> tuple:
        """Steps the environment; of four values, of gym before 0.26, the third and the info make two of five."""
        observation, reward, *ends, info = self.environment.step(action)
        if len(ends) == 1:
            is_truncated = bool(ends[0]) and bool(info.get("TimeLimit.truncated", False))
            ends = [bool(ends[0]) and not is_truncated, is_truncated]
        terminated, truncated = ends
        kept = (*KEPT, *self.names) if terminated or truncated else KEPT
        return observation, reward, bool(terminated), bool(truncated), self._kept(info, kept)

    def render(self) -> Any:
        """Returns the picture."""
        return self.environment.render(mode="rgb_array") if self.has_old_render else self.environment.render()

    def call(self, module: str, name: str, text: str) -> str:
        """Calls a function of a module."""
        return getattr(importlib.import_module(module), name)(text)

    def _kept(self, info: Any, names: tuple) -> Any:
        return {name: info[name] for name in names if name in info} if isinstance(info, dict) else str(info)


def seed_generators(seed: int) -> None:
    """Seeds the global generators."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def function_of(module: Any, name: str, is_rendered: bool) -> functools.partial:
    """Returns the function that makes an environment from its settings: of a module, or of a registry.

    Raises WrongName if there is none.
    """
    mode: dict = {"render_mode": "rgb_array"} if is_rendered else {}
    function = getattr(module, name, None)
    if callable(function):
        return rendering(function, is_rendered)
    problems = []
    for library in LIBRARIES:
        try:
            package = importlib.import_module(library)
            package.spec(name)
        except Exception as error:  # each version has its own for an unknown name
            if not isinstance(error, ModuleNotFoundError):
                problems.append(_first_line(error))
            continue
        is_new = "disable_env_checker" in inspect.signature(package.make).parameters  # gym from 0.24 on
        return functools.partial(package.make, name, **({**mode, "disable_env_checker": True} if is_new else {}))
    where = f"{module.__name__} has no function {name}, and registers no such environment; " if module else ""
    what = problems[0] if problems else f"neither {' nor '.join(LIBRARIES)} is installed"
    raise WrongName(f"{where}{what}; {'give gymnasium:ale_py:' + name if name.startswith('ALE/') else FORMS}")


def rendering(function: Callable[..., Any], is_rendered: bool) -> functools.partial:
    """Returns a function of the user's that renders, if it takes `render_mode`."""
    parameters = inspect.signature(function).parameters.values()
    takes_mode = any(item.name == "render_mode" or item.kind == item.VAR_KEYWORD for item in parameters)
    return functools.partial(function, **({"render_mode": "rgb_array"} if is_rendered and takes_mode else {}))


def check_class(environment: Any, name: str) -> None:
    """Raises TypeError if what a function returned is no environment of Gymnasium or gym."""
    what = f"{name} returned {type(environment).__name__}, not an environment of Gymnasium"
    if hasattr(environment, "num_envs"):
        raise TypeError(f"{what}; it is a batch: name it vector:MODULE:FUNCTION, or make one environment")
    if hasattr(environment, "possible_agents"):
        raise TypeError(f"{what}, but one of PettingZoo; wrap it so that it has one agent, the others a part of it")
    if not all(hasattr(environment, part) for part in ("reset", "step", "observation_space", "action_space")):
        raise TypeError(what)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name) if name else None
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that the module needs
        raise WrongName(f"there is no module {error.name}; start in its folder, or install its package") from None


def _kind(space: Any) -> str:
    """Returns the name of the class of Gymnasium's or gym's that a space is of; "" if it is of no such class."""
    names = (each.__name__ for each in type(space).__mro__ if each.__module__.split(".")[0] in LIBRARIES)
    return next(names, "")


def _described(space: Any) -> Any:
    """Returns a space as `processes` reads it: the name of its class, and its arguments."""
    kind = _kind(space)
    if kind == "Box":
        low, high = space.low, space.high
        if space.dtype.kind in "iu" and (high < low).any():  # gym 0.21 overflows if there is no bound
            high = high * 0 + 2 ** (8 * space.dtype.itemsize - 1) - 1
        return kind, {"low": low, "high": high, "shape": tuple(space.shape), "dtype": str(space.dtype)}
    if kind == "Discrete":
        other = {} if str(space.dtype) == "int64" else {"dtype": str(space.dtype)}  # which Gymnasium 1.0 does not know
        return kind, {"n": int(space.n), "start": int(getattr(space, "start", 0)), **other}
    if kind == "MultiDiscrete":
        return kind, {"nvec": space.nvec, "dtype": str(space.dtype), "start": getattr(space, "start", 0 * space.nvec)}
    if kind == "MultiBinary":
        return kind, {"n": int(space.shape[0]) if len(space.shape) == 1 else list(space.shape)}
    if kind == "Text":
        return kind, {"min_length": space.min_length, "max_length": space.max_length, "charset": space.characters}
    if kind == "Dict":
        return kind, {"spaces": [(key, _described(part)) for key, part in space.spaces.items()]}
    if kind == "Tuple":
        return kind, {"spaces": [_described(part) for part in space.spaces]}
    what, fix = f"no vector can be made of {str(space)[:200]}", "wrap it in one that returns arrays"
    raise WrongName(f"{what}; {fix}: minigrid's ImgObsWrapper, gymnasium.wrappers.FilterObservation")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _line_of(error: Exception, function: Any) -> str:
    """Returns an error in one line, with the user's file and line; `function`: whose file is named if no line is."""
    calls = [(call.filename, call.lineno) for call in traceback.extract_tb(error.__traceback__)]
    modules = (sys.modules[name] for name in (*LIBRARIES, "numpy") if name in sys.modules)
    folders = [os.path.dirname(str(module.__file__)) + os.sep for module in modules]
    of_user = [call for call in calls if not call[0].startswith((*folders, __file__, "<"))]
    with contextlib.suppress(TypeError, OSError):
        function = getattr(function, "func", function)
        calls.append((inspect.getsourcefile(function) or "", inspect.getsourcelines(function)[1]))
    file, line = (of_user or calls)[-1]
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno
    return f"{type(error).__name__}: {_first_line(error)} ({file}, line {line})"


# Processes ----------------------------------------------------------------------------------------------------------


def serve(pipe: socket.socket) -> None:
    """Answers requests until the other end is closed, as the leader of a session of its own."""
    os.setsid()
    served = Served()
    while True:
        try:
            method, arguments = received(pipe)
        except (EOFError, OSError):
            if served.environment is not None:
                served.environment.close()
            return
        try:
            reply = packed(("result", getattr(served, method)(*arguments)))
        except WrongName as error:
            reply = packed(("usage", str(error)))
        except Exception as error:
            traceback.print_exc()
            reply = packed(("broken", _line_of(error, served.function)))
        pipe.sendall(reply)


def _end_all(ended: int, leaders: dict) -> None:
    """Kills the processes of environments, CLOSE_SECONDS after the other end of `ended` is closed.

    They could not do so themselves while their own code keeps Python's lock.
    """
    poll = select.poll()
    poll.register(ended, 0)  # an error is reported anyway
    poll.poll()
    time.sleep(CLOSE_SECONDS)
    for leader in [*leaders]:
        _kill_group(leader)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _import_for_all(task: str) -> bool:
    """Imports the modules of a task, which processes then share; returns whether they may be forked.

    They may not if the modules have threads, which a fork stops wherever they are, JAX's for example, or processes, or
    have drawn random numbers or keep a generator of them, which would be the same in all.
    """
    module, _, name = task.partition(":")[2].rpartition(":")
    before = _generators()
    with contextlib.suppress(Exception):  # the processes import it again, and report it
        _imported(module)
        for library in sys.modules.keys() & LIBRARIES:
            importlib.import_module(sys.modules[library].spec(name).entry_point.partition(":")[0])
    os.waitpid(os.fork() or os._exit(0), 0)  # now the threads of NumPy and its like have ended by themselves
    with contextlib.suppress(ChildProcessError):  # no process was started
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return False
    return len(os.listdir("/proc/self/task")) == 1 and "jax" not in sys.modules and before == _generators()


def _generators() -> tuple:
    """Returns the number of generators of random numbers that there are, and the states of the global ones."""
    from numpy.random import BitGenerator, get_state

    drawn = get_state(legacy=False)["state"]["pos"], random.getstate()
    return sum(issubclass(type(each), (random.Random, BitGenerator)) for each in gc.get_objects()), *drawn


def main(pipes: list, ended: int, path: list, task: str) -> None:
    """Forks a process for each pipe; writes the number of one that has ended, and its exit code, to `ended`.

    `pipes`, `ended`: file descriptors; `path`: for `sys.path`, or empty; `task`: gymnasium:..., or empty.
    """
    here = os.path.dirname(os.path.abspath(__file__))  # its modules are not the user's
    sys.path[:] = path or [folder for folder in sys.path if os.path.abspath(folder) != here] + [os.getcwd()]
    for name in ("numpy", *LIBRARIES):  # once for all; gym only if there is no Gymnasium
        with contextlib.suppress(Exception):
            importlib.import_module(name)
            if name in LIBRARIES:
                break
    warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # the threads of NumPy end before it
    if task and len(pipes) > 1 and "numpy" in sys.modules and not _import_for_all(task):
        settings = {"pipes": pipes, "ended": ended, "path": path, "task": ""}
        os.execv(sys.executable, [sys.executable, __file__, json.dumps(settings)])
    numbers = {}
    for number, pipe in enumerate(pipes):
        if not (process := os.fork()):
            for other in {ended, *pipes} - {pipe}:
                os.close(other)
            os.set_inheritable(pipe, False)
            serve(socket.socket(fileno=pipe))
            sys.stdout.flush()
            os._exit(0)
        numbers[process] = number
    for pipe in pipes:
        os.close(pipe)
    threading.Thread(target=_end_all, args=[ended, numbers], daemon=True).start()
    while numbers:
        process, status = os.wait()
        if process in numbers:  # not one that a module has started
            _kill_group(process)  # processes that it started
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(ended, struct.pack("!ii", numbers.pop(process), code))
    os.killpg(0, signal.SIGKILL)  # processes that modules have started for all, and this one


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
