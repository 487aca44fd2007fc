"""Code of the user that a setting names, such as `algorithm.name=my_file:make`: its import, and its errors in one line.

It runs with the rights of the user, so it is imported only if the user's own settings name it, see
`apex_jax.config.load.code_settings`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apex_jax.host.errors import RunError, UsageError, first_line

LIBRARIES = ("apex_jax", "gymnasium", "numpy", "jax", "flax", "optax")  # whose code is not the user's


_more_folders: list[str] = []  # of `look_in`


def look_in(*folders: str) -> None:
    """Lets `imported_module` find the modules that it is asked for in these folders, too, but no other import.

    Folders that were given before are forgotten: they are of another run, whose code nobody asked for now.
    """
    _more_folders[:] = folders


def search_path() -> list[str]:
    """Returns the folders in which another process finds the modules that `imported_module` does."""
    return list(dict.fromkeys(map(os.path.abspath, [*sys.path, os.getcwd(), *_more_folders])))


def imported_module(setting: str, name: str) -> Any:
    """Imports a module; the working directory is searched last, so that no file there replaces a package.

    `setting`: begins the message of an error, such as "algorithm.name=my_file:make". Raises UsageError if there is no
    such module, and the exceptions of the module's code.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that the module needs
        for folder in _more_folders:
            if folder not in sys.path and importlib.machinery.PathFinder.find_spec(name.partition(".")[0], [folder]):
                sys.path.append(folder)
                return imported_module(setting, name)
        fix = "start in its folder, or install its package"
        raise UsageError(f"{setting}: there is no module {error.name}; {fix}") from None


def imported_names(key: str, text: str) -> list[Any]:
    """Returns the callables that `text` names, as [jax: or vector:]MODULE:NAME or MODULE:NAME,NAME.

    `key`: the setting's key.
    Raises UsageError with the reason.
    """
    setting = f"{key}={text}"
    module_name, _, names = text.removeprefix("jax:").removeprefix("vector:").partition(":")
    with reported(setting, UsageError):
        module = imported_module(setting, module_name)
    found = [getattr(module, name, None) for name in names.split(",")]
    for name, value in zip(names.split(","), found, strict=True):
        if not callable(value):
            raise UsageError(f"{setting}: {module.__file__} has no function or class {name}; add it, or correct {key}")
    return found


def source_file(text: str) -> Path | None:
    """Returns the file of the module in MODULE:NAME, without importing it; None if there is none."""
    folders, spec = [*sys.path, os.getcwd()], None
    for name in text.partition(":")[0].split("."):
        spec = importlib.machinery.PathFinder.find_spec(name, folders)
        folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(spec.origin) if spec and spec.origin else None


@contextlib.contextmanager
def reported(setting: str, error_class: type[Exception], function: Any = None) -> Iterator[None]:
    """Prints the user's part of a traceback to the process's log, and raises `error_class` with one line.

    `function`: the user's function that is called; its file is named if no line of the user raised the exception.
    """
    try:
        yield
    except (RunError, UsageError):
        raise
    except Exception as error:
        _print_traceback(error)
        place = f" ({place})" if (place := _place(error, function)) else ""
        raise error_class(f"{setting}: {type(error).__name__}: {first_line(error)}{place}") from None


def _print_traceback(error: Exception) -> None:
    """Prints a traceback without the calls of libraries, of which JAX and Flax make dozens, if one is of the user."""
    report = traceback.TracebackException.from_exception(error)
    of_user = [call for call in report.stack if not call.filename.startswith((*_folders(), "<"))]
    report.stack = traceback.StackSummary.from_list(of_user or report.stack[-1:])
    print(*report.format(chain=False), sep="", end="", file=sys.stderr)


def _place(error: Exception, function: Any) -> str:
    """Returns the file and the line of the user's code that raised an exception; empty if only libraries did."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    calls = traceback.extract_tb(error.__traceback__)
    of_user = [call for call in calls if not call.filename.startswith((*_folders(), "<"))]
    return f"{of_user[-1].filename}, line {of_user[-1].lineno}" if of_user else place_of(function)


def place_of(function: Any) -> str:
    """Returns the file and the line where a function or class of the user's begins; empty for one of a library."""
    with contextlib.suppress(TypeError, OSError):
        function = inspect.unwrap(function)
        file, line = inspect.getsourcefile(function) or "", inspect.getsourcelines(function)[1]
        return "" if file.startswith(_folders()) else f"{file}, line {line}"
    return ""


@functools.cache
def _folders() -> tuple[str, ...]:
    specs = (importlib.util.find_spec(name) for name in LIBRARIES)
    return tuple(f"{folder}/" for spec in specs if spec for folder in spec.submodule_search_locations or ())
