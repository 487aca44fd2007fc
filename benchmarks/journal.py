"""The replay's journal: the cost of recording each segment, and the time to load 2 M transitions.

Storing segments as a server does is timed with and without a journal, in turn; then a full replay is saved and loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.replay.replay import Replay
from apex_jax.segment_codec import decode_columns
from apex_jax.types import Columns, SegmentRecord, SegmentSpec
from benchmarks.load import record
from benchmarks.report import finish, medians, say, side_by_side, target
from benchmarks.roles import ROOT

SEGMENTS = 256  # distinct segments, stored repeatedly
AT_ONCE = 16  # segments stored between two flushes; a server has about as many pending when actors send at full speed
PAPER_SEGMENTS_PER_SECOND = 250  # 12,500 transitions/s in segments of 50


class Stored(NamedTuple):
    """A received segment, with its decoded and checked columns."""

    segment: SegmentRecord
    columns: Columns


def replay_of(config: Config, spec: SegmentSpec, directory: str | None) -> Replay:
    """Returns a replay, restored from the journal, if any, in the run directory `directory`; None = no journal."""
    if directory is None:
        config = config.replace(replay=dataclasses.replace(config.replay, journal=False))
    replay = Replay(config.replace(run_directory=directory or ""), spec, np.random.default_rng(0))
    replay.restore(time.monotonic())
    return replay


def store(replay: Replay, segments: list[Stored]) -> None:
    """Stores segments and then flushes the journal, as a server does."""
    for segment, columns in segments:
        number = replay.buffer.inserted_segments + 1
        replay.insert(segment._replace(sequence=number), columns, 0.0)
    replay.journal.flush(time.monotonic())


def main() -> None:
    """Measures storing and loading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transitions", type=int, default=2_000_000, help="that the replay holds")
    parser.add_argument("--seconds", type=float, default=4.0, help="of storing, with and without a journal each")
    arguments = parser.parse_args()
    config = load(ROOT / "configs" / "paper.yaml", [f"replay.capacity_transitions={arguments.transitions}"])
    spec = describe(config).spec
    recording = record(config, SEGMENTS)
    segments = [stored(message, spec) for message in recording.messages]
    with tempfile.TemporaryDirectory(prefix="apex-jax-benchmark-") as directory:
        micros = append_microseconds(config, spec, segments, directory, arguments.seconds)
        say(f"storing a segment: {micros['none']:.1f} us, with a journal {micros['journal']:.1f} us")
    with tempfile.TemporaryDirectory(prefix="apex-jax-benchmark-") as directory:
        figures = full_replay(config, spec, segments, directory, arguments.transitions / recording.per_segment)
    cost = (micros["journal"] - micros["none"]) * 1e-6
    targets = {
        "share of a core at the paper's 12,500 transitions/s": target(cost * PAPER_SEGMENTS_PER_SECOND, at_most=0.02),
        "seconds to load": target(figures.pop("seconds to load"), at_most=10.0),
        "the serving thread's stall for a snapshot, ms": target(figures.pop("stall, ms"), at_most=20.0),
    }
    figures["us to store a segment: without, with a journal"] = [micros["none"], micros["journal"]]
    figures["transitions"] = arguments.transitions
    finish("journal", figures, targets)


def stored(message: SegmentRecord, spec: SegmentSpec) -> Stored:
    """Returns the segment of a message with its columns."""
    columns = decode_columns(message.body, spec)
    transitions = int(np.count_nonzero(columns["priority"]))
    record = message._replace(peer_id=1, transitions=transitions)
    return Stored(record, columns)


def append_microseconds(
    config: Config, spec: SegmentSpec, segments: list[Stored], directory: str, seconds: float
) -> dict[str, float]:
    """Returns the microseconds to store a segment, without and with a journal; medians exclude the rare snapshots."""
    small = config.replace(replay=dataclasses.replace(config.replay, capacity_transitions=200_000))
    replays = {"none": replay_of(small, spec, None), "journal": replay_of(small, spec, directory)}

    def storing(replay: Replay) -> Callable[[], None]:
        place = 0

        def call() -> None:
            nonlocal place
            store(replay, segments[place : place + AT_ONCE])
            place = (place + AT_ONCE) % len(segments)
            if place == 0:
                replay.snapshot_if_due(time.monotonic())

        return call

    times = side_by_side({name: storing(replay) for name, replay in replays.items()}, seconds)
    assert replays["journal"].metrics()["replay/journal_errors"] == 0
    wait_for_thread()
    replays["journal"].journal.close()
    return {name: 1e6 * median / AT_ONCE for name, median in medians(times).items()}


def full_replay(
    config: Config, spec: SegmentSpec, segments: list[Stored], directory: str, num_segments: float
) -> dict[str, Any]:
    """Fills a replay, saves it, and loads it again; returns figures in seconds, milliseconds and bytes."""
    replay = replay_of(config, spec, directory)
    while replay.buffer.inserted_segments < num_segments:
        store(replay, segments[:AT_ONCE])
        segments = segments[AT_ONCE:] + segments[:AT_ONCE]
    stalls = []
    for _ in range(5):
        wait_for_thread()
        start = time.perf_counter()
        replay.journal.request_snapshot()
        replay.snapshot_if_due(time.monotonic())
        stalls.append(time.perf_counter() - start)
    start = time.perf_counter()
    wait_for_thread()
    written = time.perf_counter() - start
    replay.journal.close()
    size = sum(path.stat().st_size for path in Path(directory, "replay").iterdir())
    say(f"{replay.buffer.size_transitions:,} transitions, {size / 2**20:,.0f} MiB; stall {1e3 * max(stalls):.1f} ms")
    loads = {}
    for state in ("cold", "warm"):
        if state == "cold":
            forget_pages(Path(directory, "replay"))
        start = time.perf_counter()
        again = replay_of(config, spec, directory)
        loads[state] = time.perf_counter() - start
        again.journal.close()
        assert again.buffer.size_transitions == replay.buffer.size_transitions
        say(f"loaded in {loads[state]:.2f} s, {state}")
    return {
        "seconds to load": loads["cold"],
        "seconds to load, files in memory": loads["warm"],
        "stall, ms": 1e3 * sorted(stalls)[len(stalls) // 2],
        "largest stall of 5, ms": 1e3 * max(stalls),
        "seconds to write a snapshot, in the background": written,
        "bytes on the disk a transition": size / replay.buffer.size_transitions,
    }


def wait_for_thread() -> None:
    """Waits until the thread that writes a snapshot has ended."""
    for thread in threading.enumerate():
        if thread.name == "replay snapshot":
            thread.join()


def forget_pages(directory: Path) -> None:
    """Asks the kernel to drop the directory's files from its cache, so that they are next read from the disk."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
