"""Loops over numbers as machine code, where NumPy would take longer to begin than to compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numba

FLOATS_READ = numba.types.Array(numba.types.float64, 1, "C", readonly=True)  # takes arrays of either kind
INTEGERS_READ = numba.types.Array(numba.types.int64, 1, "C", readonly=True)

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(*signature: Any) -> Callable[[Function], Function]:
    """Returns a decorator that compiles: at once for the types of a `signature`, without one when first called.

    That takes about a second, the first time; later starts read it from a cache, where one can be written.
    """
    njit: Any = partial(numba.njit, signature or None)

    def decorate(function: Function) -> Function:
        try:
            return cast(Function, njit(cache=True)(function))
        except RuntimeError:  # neither this folder nor the user's cache folder can be written
            return cast(Function, njit()(function))

    return decorate
