"""A replay with a journal and without sockets, which tests fill, kill and restart."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import Config
from apex_jax.replay import experience_log
from apex_jax.replay.buffer import ReplayBuffer
from apex_jax.replay.journal import Journal
from apex_jax.replay.rate_limiter import RateLimiter
from apex_jax.replay.snapshots import pack_head
from apex_jax.segment_codec import decode_frames, encode_record
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, buffer_of, segment_of

RUN = 77  # peer id of the actor from whom the segments are


def config_of(directory: Path, **replay: Any) -> Config:
    return CONFIG.replace(run_directory=str(directory), replay=replace(CONFIG.replay, **replay))


class World:
    """A replay of `capacity` segments that continues from its directory."""

    def __init__(self, directory: Path, capacity: int = 4, config: Config | None = None) -> None:
        self.config = config or config_of(directory)
        self.buffer: ReplayBuffer = buffer_of(capacity)
        self.limiter = RateLimiter(1, 0.0, 0.0)
        self.journal = Journal(self.config, SPEC, capacity)
        try:
            self.counters = self.journal.restore(self.buffer, self.limiter, 0.0)
        except BaseException:
            self.journal.close()
            raise

    def store(self, *numbers: int, now_seconds: float = 0.0) -> None:
        """Stores segments as a server does."""
        for number in numbers:
            segment = segment_of(number)
            record = encode_record(segment, SPEC, RUN, number, 10 * number)
            self.buffer.insert(record.body, segment.columns, now_seconds)
            self.limiter.insert(TRANSITIONS)
            self.counters.ledger.store(RUN, number, record.produced, TRANSITIONS)
            self.journal.on_segment(self.buffer.inserted_segments, record)
        self.journal.flush(now_seconds)

    def save(self, now_seconds: float = 0.0) -> None:
        """Writes a snapshot, and waits for it."""
        self.journal.finish(self.buffer, self.limiter, self.counters, now_seconds)

    def kill(self) -> None:
        """Disappears without a message, as after SIGKILL."""
        self.journal.close()

    def stop(self) -> None:
        """Leaves with a goodbye."""
        self.journal.finish(self.buffer, self.limiter, self.counters, 0.0)
        self.journal.close()

    def numbers(self) -> list[int]:
        """Of the live segments, oldest first."""
        bodies = self.buffer.segments_since(0, 10**6).bodies
        return [int(decode_frames(body, SPEC)[0, 0]) for body in bodies]

    def leaves(self) -> dict[int, list[float]]:
        """Leaves of each live segment, by its number."""
        run = self.buffer.segments_since(0, 10**6)
        leaves = self.buffer.tree.leaves.reshape(-1, SPEC.slots)
        numbers = (int(decode_frames(body, SPEC)[0, 0]) for body in run.bodies)
        return {number: leaves[slot].tolist() for number, slot in zip(numbers, run.ring_slots, strict=True)}

    def learn(self, number: int, priority: float) -> None:
        """Sets a new priority for the transitions of a live segment."""
        run = self.buffer.segments_since(0, 10**6)
        place = self.numbers().index(number)
        frames = np.flatnonzero(segment_of(number).columns["priority"])
        indices = run.ring_slots[place] * SPEC.slots + frames
        generations = np.repeat(run.generations[place : place + 1], len(frames))
        result = self.buffer.update_priorities(indices, generations, np.full(len(frames), priority, np.float32))
        assert result.applied == len(frames)


def first_leaves(number: int) -> list[float]:
    """Initial priorities of a segment, raised to the exponent of `buffer_of`."""
    priority = segment_of(number).columns["priority"].astype(np.float64)
    return np.where(priority > 0, priority**0.6, 0.0).tolist()


def files(directory: Path, kind: str) -> list[Path]:
    """Files of the journal that are complete, oldest first: "segments" or "snapshot"."""
    return sorted((directory / "replay").glob(f"{kind}-*"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the warnings logged since the last call."""
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return messages


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def head_bytes(world: World) -> int:
    return len(pack_head(experience_log.MAGIC, world.journal.log._header.facts))
