"""The real replay server over tcp, on one core: segments in, index batches out, priorities back.

For comparison, a server that sends batches of the same size as pixels, which index batches make unnecessary.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
from typing import Any

import numpy as np
import zmq

from apex_jax.config import Config
from apex_jax.environments.environment import segment_spec
from apex_jax.settings import load
from apex_jax.transport.security import NO_KEYS, Security
from benchmarks.load import PATIENCE_SECONDS, ActorLoad, DrawFigures, DrawingClient, split_cores
from benchmarks.recorded import as_messages, num_transitions, record_segments
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT, role

PAPER_TRANSITIONS_PER_SECOND = 12_500  # 360 actors of 139 frames/s, 4 frames a step
PAPER_BATCHES_PER_SECOND = 19
BATCH_SIZE = 512
GROUPS = {8: 4, 1: 16}  # batches per group: number of groups requested at any time
SEGMENTS = 256  # distinct segments, sent repeatedly
ACTORS = 8
PIXEL_BATCHES = 30


def main() -> None:
    """Measures ingest, draws, both at the same time, and the pixel server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--capacity", type=int, default=2_000_000, help="transitions that the server holds")
    arguments = parser.parse_args()
    experience, sampling = free_tcp_addresses(2)
    settings = server_settings(experience, sampling, arguments.capacity)
    path = ROOT / "configs" / "paper.yaml"
    config = load(path, settings)
    server_core, other_cores = split_cores()
    say(f"recording {SEGMENTS} segments of {config.environment.task}")
    segments = record_segments(config, SEGMENTS, exploration=0.1)
    per_segment = num_transitions(segments) / SEGMENTS
    messages = as_messages(config, segments)
    with role("replay", path, settings, server_core):
        actors = ActorLoad(experience, config.compatibility_key, messages, ACTORS, 0.0, other_cores)
        os.sched_setaffinity(0, other_cores)
        ingest = fill(actors, arguments.capacity / per_segment) * per_segment
        say(f"ingest alone: {ingest:,.0f} transitions/s")
        actors.set_rate(PAPER_TRANSITIONS_PER_SECOND / per_segment)
        paced = {}
        for batches_at_once in GROUPS:
            paced[batches_at_once] = draw(sampling, config, actors, batches_at_once, arguments.seconds, per_segment)
        actors.set_rate(0.0)
        flood = draw(sampling, config, actors, 8, arguments.seconds, per_segment)
        actors.close()
    pixels = pixel_batches_per_second(config, server_core)
    say(f"the same batches as pixels: {pixels:.1f} batches/s")
    draws, alone = paced[8][0], paced[1][0]
    targets = {
        "batches/s, 12,500 transitions/s coming in": target(draws.batches_per_second, at_least=3000),
        "times the paper's 19 batches/s": target(draws.batches_per_second / PAPER_BATCHES_PER_SECOND, at_least=1),
        "ingest alone, transitions/s": target(ingest, at_least=500_000),
        "ingest kept up while drawing": target(paced[8][1] / PAPER_TRANSITIONS_PER_SECOND, at_least=0.98),
    }
    figures = {
        "latency of 8 batches, ms: median, 99 %, largest": draws.latency_milliseconds,
        "batches/s drawn one by one": alone.batches_per_second,
        "latency of 1 batch, ms: median, 99 %, largest": alone.latency_milliseconds,
        "batches/s while actors send all they can": flood[0].batches_per_second,
        "transitions/s that come in meanwhile": flood[1],
        "batches/s as pixels": pixels,
        "times the batches/s of pixels": draws.batches_per_second / pixels,
    }
    finish("replay_server", figures, targets)


def fill(actors: ActorLoad, num_segments: float) -> float:
    """Waits for `num_segments` to be sent; returns segments/s. Raises TimeoutError if none is sent for 60 s."""
    _wait_for_segments(actors, 1)
    start, first = time.monotonic(), actors.sent_segments
    _wait_for_segments(actors, num_segments)
    return (actors.sent_segments - first) / (time.monotonic() - start)


def _wait_for_segments(actors: ActorLoad, num_segments: float) -> None:
    last_sent, last_change = 0, time.monotonic()
    while (sent := actors.sent_segments) < num_segments:
        now = time.monotonic()
        if sent > last_sent:
            last_sent, last_change = sent, now
        elif now > last_change + PATIENCE_SECONDS:
            raise TimeoutError(f"the server accepted {sent} of {num_segments:.0f} segments, then none for a minute")
        time.sleep(0.01)


def draw(
    address: str,
    config: Config,
    actors: ActorLoad,
    batches_at_once: int,
    seconds: float,
    per_segment: float,
    security: Security = NO_KEYS,
) -> tuple[DrawFigures, float]:
    """Waits until a client has all live segments; then returns its figures, and the transitions/s sent meanwhile."""
    client = DrawingClient(
        address, config.compatibility_key, batches_at_once, BATCH_SIZE, GROUPS[batches_at_once], security
    )
    while not client.draw(0.5).batches_per_second:
        pass
    start, first = time.monotonic(), actors.sent_segments
    figures = client.draw(seconds)
    ingest = (actors.sent_segments - first) / (time.monotonic() - start) * per_segment
    client.close()
    say(
        f"{batches_at_once} at once: {figures.batches_per_second:,.0f} batches/s and {ingest:,.0f} transitions/s,"
        f" latency {figures.latency_milliseconds[0]:.1f} ms, 99 % below {figures.latency_milliseconds[1]:.1f} ms"
    )
    return figures, ingest


def pixel_batches_per_second(config: Config, cores: set[int]) -> float:
    """Returns the batches/s that a client receives as pixels, over tcp, from a server that only gathers and sends."""
    (address,) = free_tcp_addresses(1)
    frames = segment_spec(config).frame_shape
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve_pixels, args=(address, (config.environment.frame_stack, *frames), cores))
    server.start()
    client: Any = zmq.Context().socket(zmq.REQ)
    client.connect(address)
    for batch in range(PIXEL_BATCHES + 1):
        client.send(b"")
        client.recv(copy=False)
        if batch == 0:
            start = time.monotonic()
    seconds = time.monotonic() - start
    server.terminate()
    server.join()
    client.close(linger=0)
    return PIXEL_BATCHES / seconds


def _serve_pixels(address: str, stack_shape: tuple[int, ...], cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    rng = np.random.default_rng(0)
    stacks = rng.integers(256, size=(10_000, *stack_shape), dtype=np.uint8)
    server: Any = zmq.Context().socket(zmq.REP)
    server.bind(address)
    while True:
        server.recv()
        server.send(stacks[rng.integers(len(stacks), size=2 * BATCH_SIZE)], copy=False)  # both observations


def server_settings(experience: str, sampling: str, capacity: int) -> list[str]:
    """Returns the settings of a server on these addresses, which writes metrics once a second."""
    return [
        f"addresses.experience={experience}",
        f"addresses.sampling={sampling}",
        f"replay.capacity_transitions={capacity}",
        "metrics_interval_seconds=1",
    ]


def free_tcp_addresses(count: int) -> list[str]:
    """Returns loopback addresses whose ports are free now."""
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"tcp://127.0.0.1:{server.getsockname()[1]}" for server in found]
    for server in found:
        server.close()
    return addresses


if __name__ == "__main__":
    main()
