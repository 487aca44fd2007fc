"""The paper's fleet: 360 simulated actors and one learner client against one replay server on one core, over tcp."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path

from apex_jax.command_line import load
from apex_jax.transport import keys
from apex_jax.transport.security import security_of
from benchmarks.load import ActorLoad, DrawingClient, split_cores
from benchmarks.recorded import as_messages, num_transitions, record_segments
from benchmarks.replay_server import (
    BATCH_SIZE,
    GROUPS,
    PAPER_BATCHES_PER_SECOND,
    PAPER_TRANSITIONS_PER_SECOND,
    fill,
    free_tcp_addresses,
    server_settings,
)
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT, resident_bytes, role

ACTORS, PROCESSES = 360, 2
SEGMENTS = 360
BATCHES_AT_ONCE = 8
WINDOWS = 6  # of the measurement: memory is compared from the second to the last


def main() -> None:
    """Measures frames in, batches out and the server's memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring")
    parser.add_argument("--capacity", type=int, default=2_000_000, help="transitions that the server holds")
    parser.add_argument("--curve", action="store_true", help="encrypt both links")
    arguments = parser.parse_args()
    experience, sampling = free_tcp_addresses(2)
    settings = server_settings(experience, sampling, arguments.capacity)
    folder = contextlib.ExitStack()
    if arguments.curve:
        directory = Path(folder.enter_context(tempfile.TemporaryDirectory()), "keys")
        keys.create(directory)
        settings.append(f"security.keys={directory}")
    path = ROOT / "configs" / "paper.yaml"
    config = load(path, settings)
    frame_skip = config.environment.frame_skip
    server_core, other_cores = split_cores()
    say(f"recording {SEGMENTS} segments of {config.environment.task}")
    segments = record_segments(config, SEGMENTS, epsilon=0.1)
    per_segment = num_transitions(segments) / SEGMENTS
    messages = as_messages(config, segments)
    with folder, role("replay", path, settings, server_core) as run_directory:
        per_process = ACTORS // PROCESSES
        fleet = [
            ActorLoad(
                experience, config.agreement, messages, per_process, 0.0, other_cores, security_of(config, "actor")
            )
            for _ in range(PROCESSES)
        ]
        os.sched_setaffinity(0, other_cores)
        say(f"{ACTORS} actors fill the replay of {arguments.capacity:,} transitions")
        for part in fleet:
            fill(part, arguments.capacity / per_segment / PROCESSES)
            part.set_rate(PAPER_TRANSITIONS_PER_SECOND / per_segment / PROCESSES)
        groups, learner = GROUPS[BATCHES_AT_ONCE], security_of(config, "learner")
        client = DrawingClient(sampling, config.agreement, BATCHES_AT_ONCE, BATCH_SIZE, groups, learner)
        while not client.draw(1.0).batches_per_second:  # first it takes the live segments
            pass
        batches, frames, memory = [], [], []
        for _ in range(WINDOWS):
            before = sum(part.sent_segments for part in fleet)
            seconds = arguments.seconds / WINDOWS
            drawn = client.draw(seconds)
            sent = sum(part.sent_segments for part in fleet) - before
            batches.append(drawn.batches_per_second)
            frames.append(sent * per_segment * frame_skip / seconds)
            memory.append(resident_bytes(run_directory, "replay"))
            say(f"{frames[-1]:,.0f} frames/s in, {batches[-1]:,.0f} batches/s out, {memory[-1] / 1e6:.0f} MB")
        client.close()
        for part in fleet:
            part.close()
    targets = {
        "frames/s in": target(sum(frames) / WINDOWS, at_least=0.98 * PAPER_TRANSITIONS_PER_SECOND * frame_skip),
        "batches/s out": target(min(batches), at_least=1000),
        "growth of the server's memory": target(memory[-1] / memory[1] - 1, at_most=0.01),
    }
    figures = {
        "actors": ACTORS,
        "encrypted": arguments.curve,
        "times the paper's 19 batches/s": min(batches) / PAPER_BATCHES_PER_SECOND,
        "latency of 8 batches, ms: median, 99 %, largest": drawn.latency_milliseconds,
        "resident bytes of the server": memory[-1],
    }
    finish("fleet", figures, targets)


if __name__ == "__main__":
    main()
