"""A snapshot restores the very state that was saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apex_jax.replay.file_heads import Identity
from apex_jax.replay.ledger import ActorCounts, Ledger
from apex_jax.replay.rate_limiter import RateLimiter
from apex_jax.replay.saved_state import Counters, pack_state, ratio_of, unpack_state
from apex_jax.replay.snapshots import Snapshots
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, buffer_of, segment_of


@pytest.mark.parametrize("num_segments", [0, 1, 6], ids=["empty", "one segment", "after evictions"])
def test_unpacked_state_equals_the_packed_one(tmp_path: Path, num_segments: int) -> None:
    buffer, limiter, ledger = buffer_of(4), RateLimiter(1, 0.0, 0.0, 1, 1), Ledger()
    for number in range(1, num_segments + 1):
        buffer.insert(b"body", segment_of(number).columns, 1.0)
        limiter.insert(TRANSITIONS)
        ledger.store(2**63 - number, number, TRANSITIONS)
        ledger.refuse(7, number, 3, "bad_checksum")
        ledger.report(7, ActorCounts(2**48, 1, 2, 3, 4))
        buffer.sample(2, 3, 2.0)
        limiter.sample(6)
    state, counters = buffer.state(5.0), Counters(ledger, 10 * num_segments, 9)
    snapshots = Snapshots(tmp_path, Identity(CONFIG.compatibility_key, SPEC))
    snapshots.write(*pack_state(11, state, limiter, CONFIG, counters))
    snapshot = snapshots.read_newest()
    assert snapshot is not None
    saved = unpack_state(*snapshot)
    assert saved.event == 11
    assert saved.limiter == {"inserted": limiter.inserted, "sampled": limiter.sampled, "ratio": ratio_of(CONFIG)}
    assert saved.counters[1:] == counters[1:]
    np.testing.assert_array_equal(saved.counters.ledger.to_array(), ledger.to_array())
    assert saved.counters.ledger.totals((), {}) == ledger.totals((), {})
    for name, value in state._asdict().items():
        np.testing.assert_array_equal(getattr(saved.buffer, name), value, err_msg=name)
        assert type(getattr(saved.buffer, name)) is type(value), name
