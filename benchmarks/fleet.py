"""The paper's fleet: 360 simulated actors and one learner client use one replay server on one core, over tcp."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from apex_jax.config.load import load
from apex_jax.transport import keys
from apex_jax.transport.security import security_of
from benchmarks.load import (
    PAPER_BATCHES_PER_SECOND,
    PAPER_TRANSITIONS_PER_SECOND,
    ActorLoad,
    DrawingClient,
    record,
)
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT, free_tcp_addresses, resident_bytes, role, server_settings, split_cores

ACTORS, PROCESSES = 360, 2
SEGMENTS = 360
BATCHES_AT_ONCE = 8
WINDOWS = 6  # parts of the measurement; memory growth is measured from the second to the last


class Windows(NamedTuple):
    """The figures of each window of the measurement."""

    frames_per_second: list[float]  # sent by the actors
    batches_per_second: list[float]  # sent by the server
    server_bytes: list[float]  # resident memory
    latency_milliseconds: Any  # of the last window: median, 99th percentile, maximum


def main() -> None:
    """Measures frames in, batches out and the server's memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring")
    parser.add_argument("--capacity", type=int, default=2_000_000, help="transitions that the server holds")
    parser.add_argument("--curve", action="store_true", help="encrypt both links")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "keys")
        if arguments.curve:
            keys.create(directory)
        windows = measure(arguments.seconds, arguments.capacity, str(directory) if arguments.curve else "")
    report(windows, arguments.curve)


def measure(seconds: float, capacity: int, keys_directory: str) -> Windows:
    """Runs server, fleet and client; `keys_directory`: "" = no encryption."""
    experience, sampling = free_tcp_addresses(2)
    settings = [*server_settings(experience, sampling, capacity), f"security.keys={keys_directory}"]
    path = ROOT / "configs" / "paper.yaml"
    config = load(path, settings)
    server_core, other_cores = split_cores()
    recording = record(config, SEGMENTS)
    actor, learner = security_of(config, "actor"), security_of(config, "learner")
    windows = Windows([], [], [], [])
    with role("replay", path, settings, server_core) as directory:
        fleet = [
            ActorLoad(experience, config, recording, ACTORS // PROCESSES, 0.0, other_cores, actor)
            for _ in range(PROCESSES)
        ]
        os.sched_setaffinity(0, other_cores)
        say(f"{ACTORS} actors fill the replay of {capacity:,} transitions")
        for part in fleet:
            part.fill(capacity / PROCESSES)
            part.set_rate(PAPER_TRANSITIONS_PER_SECOND / PROCESSES)
        client = DrawingClient(sampling, config, BATCHES_AT_ONCE, learner)
        for _ in range(WINDOWS):
            before = sum(part.sent_transitions for part in fleet)
            drawn = client.draw(seconds / WINDOWS)
            sent = sum(part.sent_transitions for part in fleet) - before
            frames = sent * config.environment.frame_skip / (seconds / WINDOWS)
            windows.frames_per_second.append(frames)
            windows.batches_per_second.append(drawn.batches_per_second)
            windows.server_bytes.append(resident_bytes(directory, "replay"))
            say(f"{frames:,.0f} frames/s in, {drawn.batches_per_second:,.0f} batches/s out")
        client.close()
        for part in fleet:
            part.close()
    return windows._replace(latency_milliseconds=drawn.latency_milliseconds)


def report(windows: Windows, is_encrypted: bool) -> None:
    """Prints the report."""
    frames, batches, memory = windows.frames_per_second, windows.batches_per_second, windows.server_bytes
    frame_skip = load(ROOT / "configs" / "paper.yaml").environment.frame_skip
    targets = {
        "frames/s in": target(sum(frames) / WINDOWS, at_least=0.98 * PAPER_TRANSITIONS_PER_SECOND * frame_skip),
        "batches/s out": target(min(batches), at_least=1000),
        "growth of the server's memory": target(memory[-1] / memory[1] - 1, at_most=0.01),
    }
    figures = {
        "actors": ACTORS,
        "encrypted": is_encrypted,
        "times the paper's 19 batches/s": min(batches) / PAPER_BATCHES_PER_SECOND,
        "latency of 8 batches, ms: median, 99 %, largest": windows.latency_milliseconds,
        "resident bytes of the server": memory[-1],
    }
    finish("fleet", figures, targets)


if __name__ == "__main__":
    main()
