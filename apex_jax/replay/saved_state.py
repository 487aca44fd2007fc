"""The content of a snapshot as facts and arrays: priorities, counters, random state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config import Config
from apex_jax.replay.buffer import BufferState
from apex_jax.replay.file_heads import CorruptFile
from apex_jax.replay.ledger import COLUMNS, REFUSALS, REMEMBERED_RUNS, TOTALS, Ledger
from apex_jax.replay.rate_limiter import RateLimiter

MAX_POWER = 1e295  # above MAX_PRIORITY ** MAX_EXPONENT


class Counters(NamedTuple):
    """The counters that survive a restart of the server."""

    ledger: Ledger
    environment_steps: int
    incarnations: int  # number of actors welcomed so far


class Saved(NamedTuple):
    """A snapshot whose values have been checked."""

    event: int  # number of the last event that it contains
    buffer: BufferState
    limiter: dict[str, Any]
    counters: Counters


def ratio_of(config: Config) -> list[float]:
    """Returns the settings that must not have changed if saved counters of the rate limiter are to be used."""
    return [config.replay.samples_per_insert, float(config.replay.min_size_to_sample)]


def pack_state(
    event: int, state: BufferState, limiter: RateLimiter, config: Config, counters: Counters
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the facts and arrays of a snapshot, as `unpack_state` takes them."""
    facts = {
        "event": event,
        "inserted_segments": state.inserted_segments,
        "priority_exponent": float(state.priority_exponent),
        "max_priority": state.max_priority,
        "random_state": state.random_state,
        "limiter": {"inserted": limiter.inserted, "sampled": limiter.sampled, "ratio": ratio_of(config)},
        "environment_steps": counters.environment_steps,
        "welcomed": counters.incarnations,
        "refused": dict(counters.ledger.refused),
        "forgotten": dict(counters.ledger.forgotten),
    }
    arrays = {
        "insertion_ids": state.insertion_ids,
        "leaves": state.leaves,
        "ages_seconds": state.ages_seconds,
        "accounts": counters.ledger.to_array(),
    }
    return facts, arrays


def unpack_state(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], slots: int) -> Saved:
    """Returns the checked content of a snapshot. `slots`: frame slots of a segment.

    Raises CorruptFile, or KeyError, TypeError, AttributeError or ValueError for values of a wrong type.
    """
    insertion_ids, leaves, ages, accounts = (
        arrays[name] for name in ("insertion_ids", "leaves", "ages_seconds", "accounts")
    )
    used = len(insertion_ids)
    _check(insertion_ids.dtype == accounts.dtype == np.int64 and leaves.dtype == ages.dtype == np.float64, "dtypes")
    _check(insertion_ids.shape == ages.shape == (used,) and leaves.shape == (used, slots), "shapes")
    _check(bool((leaves >= 0).all() and (leaves <= MAX_POWER).all()), "leaves")
    _check(bool(np.isfinite(ages).all()), "ages_seconds")
    _check(accounts.shape[1:] == (COLUMNS,) and len(accounts) <= REMEMBERED_RUNS, "accounts")
    _check(bool((accounts >= 0).all() and (accounts[:, 2:] <= 2**60).all()), "accounts")
    limiter = facts["limiter"]
    ratio = limiter["ratio"]
    _check(type(ratio) is list and all(type(number) is float for number in ratio), "ratio")
    for counts, names in ((facts["refused"], REFUSALS), (facts["forgotten"], TOTALS)):
        _check(all(name in names and type(n) is int and n >= 0 for name, n in counts.items()), "ledger")
    state = BufferState(
        inserted_segments=_count(facts["inserted_segments"]),
        priority_exponent=_real(facts["priority_exponent"]),
        max_priority=_real(facts["max_priority"]),
        random_state=_random_state(facts["random_state"]),
        insertion_ids=insertion_ids,
        leaves=leaves,
        ages_seconds=ages,
    )
    _check(bool((insertion_ids >= 0).all() and (insertion_ids <= state.inserted_segments).all()), "insertion_ids")
    counters = Counters(
        ledger=Ledger.from_array(accounts, Counter(facts["refused"]), Counter(facts["forgotten"])),
        environment_steps=_count(facts["environment_steps"]),
        incarnations=_count(facts["welcomed"]),
    )
    saved_limiter = {name: _count(limiter[name]) for name in ("inserted", "sampled")} | {"ratio": ratio}
    return Saved(_count(facts["event"]), state, saved_limiter, counters)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise CorruptFile(f"{what} cannot be what was written")


def _count(value: Any) -> int:
    _check(type(value) is int and 0 <= value <= 2**62, "a count")
    return int(value)


def _real(value: Any) -> float:
    _check(type(value) is float and 0 <= value < np.inf, "a number")
    return float(value)


def _random_state(state: Any) -> dict[str, Any]:
    """Returns the checked state of a PCG64 generator."""
    inner = state["state"]
    _check(state["bit_generator"] == "PCG64", "bit_generator")
    for number, bits in ((inner["state"], 128), (inner["inc"], 128), (state["has_uint32"], 1), (state["uinteger"], 32)):
        _check(type(number) is int and 0 <= number < 2**bits, "random_state")
    return {
        "bit_generator": "PCG64",
        "state": {"state": inner["state"], "inc": inner["inc"]},
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }
