"""Compiles numeric loops to machine code, for arrays so small that NumPy's overhead per call exceeds the work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import numba

FLOATS_READ = numba.types.Array(numba.types.float64, 1, "C", readonly=True)  # accepts read-only and writable arrays
INTEGERS_READ = numba.types.Array(numba.types.int64, 1, "C", readonly=True)

# Errors of numba's cache: no cache folder is writable, the disk is full, or a cache file is truncated.
NO_CACHE = (RuntimeError, OSError, EOFError)

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(*signature: Any) -> Callable[[Function], Function]:
    """Returns a decorator that compiles: at once for the types of `signature`, or at the first call if there is none.

    Compilation takes about a second; later starts read the machine code from a cache if a cache can be written.
    """
    njit: Any = partial(numba.njit, signature or None)

    def decorate(function: Function) -> Function:
        try:
            machine_code = njit(cache=True)(function)
        except NO_CACHE:
            machine_code = njit()(function)
        if signature:
            return cast(Function, machine_code)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            nonlocal machine_code
            try:
                return machine_code(*arguments)
            except NO_CACHE:
                machine_code = njit()(function)
                return machine_code(*arguments)

        return cast(Function, call)

    return decorate
