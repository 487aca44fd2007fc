"""A real replay server over tcp, on one core: segments in, index batches out, priorities back, a fleet that joins.

One server has plain links and one encrypted links; they are measured in turns. For comparison, a server that sends
batches of the same size as pixels, which index batches make unnecessary.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.transport import keys
from apex_jax.transport.security import LinkContext, Security, security_of
from benchmarks.load import (
    BATCH_SIZE,
    PAPER_BATCHES_PER_SECOND,
    PAPER_TRANSITIONS_PER_SECOND,
    ActorLoad,
    DrawFigures,
    DrawingClient,
    Recording,
    SimulatedActor,
    record,
)
from benchmarks.report import finish, ratio, say, target
from benchmarks.roles import ROOT, free_tcp_addresses, role, server_settings, split_cores

SEGMENTS = 256  # distinct segments, sent repeatedly
ACTORS = 8
FLEET = 360  # actors that join at the same time
PIXEL_BATCHES = 30
PAUSED = 1e-9  # transitions per second: practically none, whereas 0 would mean as many as the server accepts
PATH = ROOT / "configs" / "paper.yaml"


class Link(NamedTuple):
    """A replay server with or without keys, and its peers."""

    config: Config
    actor: Security
    learner: Security
    actors: ActorLoad


def main() -> None:
    """Measures both servers in turns, then the plain one further, and the pixel server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind")
    parser.add_argument("--capacity", type=int, default=2_000_000, help="of each server; at least 50,000")
    arguments = parser.parse_args()
    server_core, other_cores = split_cores()
    recording = record(load(PATH), SEGMENTS)
    figures: dict[str, dict[str, list[float]]] = {"plain": {}, "encrypted": {}}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        keys.create(Path(folder, "keys"))
        links = {
            name: start(stack, arguments.capacity, directory, recording, server_core, other_cores)
            for name, directory in (("plain", ""), ("encrypted", f"{folder}/keys"))
        }
        os.sched_setaffinity(0, other_cores)
        for link in links.values():
            link.actors.set_rate(0.0)
            link.actors.fill(arguments.capacity)
            link.actors.set_rate(PAUSED)
        for _ in range(arguments.rounds):
            for name, link in links.items():
                for figure, value in measure(link, arguments.seconds).items():
                    figures[name].setdefault(figure, []).append(value)
                say(f"{name}: {', '.join(f'{values[-1]:,.2f} {figure}' for figure, values in figures[name].items())}")
        singly, _ = draw(links["plain"], 1, PAPER_TRANSITIONS_PER_SECOND, arguments.seconds)
        flood, flooded = draw(links["plain"], 8, 0.0, arguments.seconds)
    report(figures, {
        "batches/s drawn one by one": singly.batches_per_second,
        "latency of 1 batch, ms: median, 99 %, largest": singly.latency_milliseconds,
        "batches/s while actors send all they can": flood.batches_per_second,
        "transitions/s that come in meanwhile": flooded,
        "batches/s as pixels": pixel_batches_per_second(load(PATH), server_core),
    })  # fmt: skip


def start(
    stack: contextlib.ExitStack,
    capacity: int,
    directory: str,
    recording: Recording,
    server_core: set[int],
    other_cores: set[int],
) -> Link:
    """Starts a server and its actors, which do not send segments yet; closing `stack` ends them."""
    experience, sampling = free_tcp_addresses(2)
    settings = [*server_settings(experience, sampling, capacity), f"security.keys={directory}"]
    config = load(PATH, settings)
    stack.enter_context(role("replay", PATH, settings, server_core))
    actor = security_of(config, "actor")
    actors = ActorLoad(experience, config, recording, ACTORS, PAUSED, other_cores, actor)
    stack.callback(actors.close)
    return Link(config, actor, security_of(config, "learner"), actors)


def measure(link: Link, seconds: float) -> dict[str, float]:
    """Returns the figures of one round, each measured separately, while the other server's actors are paused."""
    link.actors.set_rate(0.0)
    time.sleep(0.5)
    started, first = time.monotonic(), link.actors.sent_transitions
    time.sleep(seconds)
    ingest = (link.actors.sent_transitions - first) / (time.monotonic() - started)
    drawn, meanwhile = draw(link, 8, PAPER_TRANSITIONS_PER_SECOND, seconds)
    joined = seconds_to_join(link)
    return {
        "transitions/s in": ingest,
        "batches/s out": drawn.batches_per_second,
        "ms latency of 8 batches": drawn.latency_milliseconds[0],
        "of 12,500 transitions/s in meanwhile": meanwhile / PAPER_TRANSITIONS_PER_SECOND,
        "s for 360 actors to join": joined,
    }


def draw(link: Link, batches_at_once: int, transitions_per_second: float, seconds: float) -> tuple[DrawFigures, float]:
    """Returns the figures of a client, and the transitions/s sent meanwhile; then the actors are paused."""
    link.actors.set_rate(transitions_per_second)
    client = DrawingClient(link.config.addresses.sampling, link.config, batches_at_once, link.learner)
    start, first = time.monotonic(), link.actors.sent_transitions
    figures = client.draw(seconds)
    ingest = (link.actors.sent_transitions - first) / (time.monotonic() - start)
    client.close()
    link.actors.set_rate(PAUSED)
    say(
        f"{batches_at_once} at once: {figures.batches_per_second:,.0f} batches/s and {ingest:,.0f} transitions/s,"
        f" latency {figures.latency_milliseconds[0]:.1f} ms, 99 % below {figures.latency_milliseconds[1]:.1f} ms"
    )
    return figures, ingest


def seconds_to_join(link: Link) -> float:
    """Returns the seconds until the server has welcomed a fleet whose actors all connect at the same time."""
    context = LinkContext.of(link.actor)
    started = time.monotonic()
    address, compatibility_key = link.config.addresses.experience, link.config.compatibility_key
    fleet = [SimulatedActor(context, address, compatibility_key) for _ in range(FLEET)]
    waiting = fleet
    while waiting:
        for actor in waiting:
            actor.read(time.monotonic())
        waiting = [actor for actor in waiting if not actor.is_welcome]
        time.sleep(0.005)
    seconds = time.monotonic() - started
    for actor in fleet:
        actor.socket.close()
    context.term()
    return seconds


def pixel_batches_per_second(config: Config, cores: set[int]) -> float:
    """Returns the batches/s that a client receives as pixels, over tcp, from a server that only gathers and sends."""
    (address,) = free_tcp_addresses(1)
    frames = describe(config).spec.frame_shape
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


def report(measured: dict[str, dict[str, list[float]]], of_the_plain_server: dict[str, Any]) -> None:
    """Prints the report: the medians of all rounds."""
    medians = {
        name: {figure: statistics.median(values) for figure, values in rounds.items()}
        for name, rounds in measured.items()
    }
    plain, encrypted = measured["plain"], measured["encrypted"]
    targets: dict[str, Any] = {}
    for name, values in medians.items():
        targets |= {
            f"{name}: transitions/s in": target(values["transitions/s in"], at_least=500_000),
            f"{name}: batches/s out, 12,500 transitions/s coming in": target(values["batches/s out"], at_least=3000),
            f"{name}: of these transitions": target(values["of 12,500 transitions/s in meanwhile"], at_least=0.98),
            f"{name}: s for 360 actors to join": target(values["s for 360 actors to join"], at_most=10.0),
        }
    batches = medians["plain"]["batches/s out"]
    figures = medians | of_the_plain_server
    figures["times the paper's 19 batches/s"] = batches / PAPER_BATCHES_PER_SECOND
    figures["times the batches/s of pixels"] = batches / of_the_plain_server["batches/s as pixels"]
    figures["share that is left with encryption"] = {
        figure: ratio(encrypted[figure], plain[figure]) for figure in ("transitions/s in", "batches/s out")
    }
    finish("replay_server", figures, targets)


if __name__ == "__main__":
    main()
