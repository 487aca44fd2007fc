"""Loops over numbers as machine code, where NumPy would take longer to begin than to compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import numba

FLOATS_READ = numba.types.Array(numba.types.float64, 1, "C", readonly=True)  # takes arrays of either kind
INTEGERS_READ = numba.types.Array(numba.types.int64, 1, "C", readonly=True)

# No folder for the cache can be written, the disk is full, or a file of the cache was cut short.
NO_CACHE = (RuntimeError, OSError, EOFError)

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(*signature: Any) -> Callable[[Function], Function]:
    """Returns a decorator that compiles: at once for the types of a `signature`, without one when first called.

    That takes about a second, the first time; later starts read it from a cache, where one can be written.
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
