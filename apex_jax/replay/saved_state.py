"""The content of a snapshot as facts and arrays: priorities, counters, random state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config import Config
from apex_jax.replay.buffer import BufferState
from apex_jax.replay.ledger import Ledger
from apex_jax.replay.rate_limiter import RateLimiter


class Counters(NamedTuple):
    """The counters that survive a restart of the server."""

    ledger: Ledger
    environment_steps: int
    incarnations: int  # number of actors welcomed so far


class Saved(NamedTuple):
    """The content of a snapshot."""

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


def unpack_state(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Saved:
    """Returns the content of a snapshot whose checksums are right."""
    state = BufferState(
        inserted_segments=facts["inserted_segments"],
        priority_exponent=facts["priority_exponent"],
        max_priority=facts["max_priority"],
        random_state=facts["random_state"],
        insertion_ids=arrays["insertion_ids"],
        leaves=arrays["leaves"],
        ages_seconds=arrays["ages_seconds"],
    )
    counters = Counters(
        ledger=Ledger.from_array(arrays["accounts"], facts["refused"], facts["forgotten"]),
        environment_steps=facts["environment_steps"],
        incarnations=facts["welcomed"],
    )
    return Saved(facts["event"], state, facts["limiter"], counters)
