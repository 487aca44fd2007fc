"""A replay with a journal and without sockets, which tests fill, kill and restart."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import Config
from apex_jax.replay.replay import Replay
from apex_jax.segment_codec import decode_frames, encode_record
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, segment_of

RUN = 77  # peer id of the actor from whom the segments are


def config_of(directory: Path, **replay: Any) -> Config:
    settings = {"min_size_to_sample": 1, "error_buffer": 1000.0} | replay
    return CONFIG.replace(run_directory=str(directory), replay=replace(CONFIG.replay, **settings))


class World(Replay):
    """A replay of `capacity` segments that continues from its directory."""

    def __init__(self, directory: Path, capacity: int = 4, config: Config | None = None) -> None:
        config = config or config_of(directory)
        settings = replace(config.replay, capacity_transitions=capacity * TRANSITIONS)
        super().__init__(config.replace(replay=settings), SPEC, np.random.default_rng(0))
        try:
            self.restore(0.0)
        except BaseException:
            self.journal.close()
            raise

    def store(self, *numbers: int, now_seconds: float = 0.0) -> None:
        """Stores segments as a server does."""
        for number in numbers:
            segment = segment_of(number)
            self.insert(encode_record(segment, SPEC, RUN, number, 10 * number), segment.columns, now_seconds)
        self.journal.flush(now_seconds)

    def save(self) -> None:
        """Writes a snapshot, and waits for it."""
        self.finish(0.0)

    def kill(self) -> None:
        """Disappears without a message, as after SIGKILL."""
        self.journal.close()

    def stop(self) -> None:
        """Leaves with a goodbye."""
        self.save()
        self.kill()

    def numbers(self) -> list[int]:
        """Of the live segments, oldest first."""
        bodies = self.buffer.segments_since(0, 10**6).bodies
        return [int(decode_frames(body, SPEC)[0, 0]) for body in bodies]

    def leaves(self) -> dict[int, list[float]]:
        """Leaves of each live segment, by its number."""
        slots = self.buffer.segments_since(0, 10**6).ring_slots
        leaves = self.buffer.tree.leaves.reshape(-1, SPEC.slots)
        return {number: leaves[slot].tolist() for number, slot in zip(self.numbers(), slots, strict=True)}

    def learn(self, number: int, priority: float) -> None:
        """Sets a new priority for the transitions of a live segment."""
        run = self.buffer.segments_since(0, 10**6)
        place = self.numbers().index(number)
        frames = np.flatnonzero(segment_of(number).columns["priority"])
        indices = run.ring_slots[place] * SPEC.slots + frames
        generations = np.repeat(run.generations[place : place + 1], len(frames))
        result = self.buffer.update_priorities(indices, generations, np.full(len(frames), priority, np.float32))
        assert result.applied == len(frames)


def wait_for_snapshots() -> None:
    """Returns once no snapshot is being written."""
    for thread in threading.enumerate():
        if thread.name == "replay snapshot":
            thread.join()


def first_leaves(number: int) -> list[float]:
    """Initial priorities of a segment, raised to the exponent."""
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
