"""The cost of encryption: real replay servers over loopback tcp, with and without CURVE, in turns on one core."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from apex_jax.config import Config
from apex_jax.settings import load
from apex_jax.transport import keys
from apex_jax.transport.security import LinkContext, Security, security_of
from apex_jax.types import SegmentRecord
from benchmarks.load import ActorLoad, SimulatedActor, split_cores
from benchmarks.recorded import as_messages, num_transitions, record_segments
from benchmarks.replay_server import (
    ACTORS,
    PAPER_TRANSITIONS_PER_SECOND,
    SEGMENTS,
    draw,
    fill,
    free_tcp_addresses,
    server_settings,
)
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT, role
from benchmarks.timing import ratio

FLEET = 360  # actors that join at the same time
PAUSED = 1e-9  # segments per second: practically none, whereas a rate of 0 would mean as many as the server accepts
PATH = ROOT / "configs" / "paper.yaml"


class Link(NamedTuple):
    """A replay server with or without keys, and its peers."""

    config: Config
    actor: Security
    learner: Security
    load: ActorLoad


def main() -> None:
    """Measures ingest, draws and the joining of a fleet, with and without encryption in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--capacity", type=int, default=200_000, help="transitions that each server holds")
    arguments = parser.parse_args()
    server_core, other_cores = split_cores()
    say(f"recording {SEGMENTS} segments")
    segments = record_segments(load(PATH), SEGMENTS, exploration=0.1)
    per_segment = num_transitions(segments) / SEGMENTS
    figures: dict[str, dict[str, list[float]]] = {"plain": {}, "CURVE": {}}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        keys.create(Path(folder, "keys"))
        links = {}
        for name, setting in (("plain", ""), ("CURVE", f"{folder}/keys")):
            messages = as_messages(load(PATH), segments)
            links[name] = start(stack, arguments.capacity, setting, messages, server_core, other_cores)
        os.sched_setaffinity(0, other_cores)
        for link in links.values():
            link.load.set_rate(0.0)
            fill(link.load, arguments.capacity / per_segment)
            link.load.set_rate(PAUSED)
        for _ in range(arguments.rounds):
            for name, link in links.items():
                for figure, value in measure(link, arguments.seconds, per_segment).items():
                    figures[name].setdefault(figure, []).append(value)
                say(f"{name}: {', '.join(f'{values[-1]:,.2f} {figure}' for figure, values in figures[name].items())}")
    report(figures)


def start(
    stack: contextlib.ExitStack,
    capacity: int,
    directory: str,
    messages: list[SegmentRecord],
    server_core: set[int],
    other_cores: set[int],
) -> Link:
    """Starts a server and its actors, which do not send segments yet; closing `stack` ends them."""
    experience, sampling = free_tcp_addresses(2)
    settings = [*server_settings(experience, sampling, capacity), f"security.keys={directory}"]
    config = load(PATH, settings)
    stack.enter_context(role("replay", PATH, settings, server_core))
    actor = security_of(config, "actor")
    actors = ActorLoad(experience, config.compatibility_key, messages, ACTORS, PAUSED, other_cores, actor)
    stack.callback(actors.close)
    return Link(config, actor, security_of(config, "learner"), actors)


def measure(link: Link, seconds: float, per_segment: float) -> dict[str, float]:
    """Returns the figures of one round, each measured separately, while the other server's actors are paused."""
    link.load.set_rate(0.0)
    time.sleep(0.5)
    started, first = time.monotonic(), link.load.sent_segments
    time.sleep(seconds)
    ingest = (link.load.sent_segments - first) / (time.monotonic() - started) * per_segment
    link.load.set_rate(PAPER_TRANSITIONS_PER_SECOND / per_segment)
    addresses = link.config.addresses
    drawn, _ = draw(addresses.sampling[0], link.config, link.load, 8, seconds, per_segment, link.learner)
    link.load.set_rate(PAUSED)
    joined = seconds_to_join(link)
    return {"transitions/s in": ingest, "batches/s out": drawn.batches_per_second, "s for 360 actors to join": joined}


def seconds_to_join(link: Link) -> float:
    """Returns the seconds until the server has welcomed a fleet whose actors all connect at the same time."""
    context = LinkContext.of(link.actor)
    started = time.monotonic()
    address, compatibility_key = link.config.addresses.experience[0], link.config.compatibility_key
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


def report(figures: dict[str, dict[str, list[float]]]) -> None:
    """Prints the report: the medians of all rounds."""
    plain, curve = figures["plain"], figures["CURVE"]
    values = {
        f"{figure}, {name}": statistics.median(rounds)
        for name, measured in figures.items()
        for figure, rounds in measured.items()
    }
    shares = {
        f"share of {figure} that is left with CURVE": ratio(curve[figure], plain[figure])
        for figure in ("transitions/s in", "batches/s out")
    }
    targets = {
        "transitions/s in, CURVE": target(values["transitions/s in, CURVE"], at_least=500_000),
        "batches/s out, CURVE, 12,500 transitions/s coming in": target(values["batches/s out, CURVE"], at_least=3000),
        "s for 360 actors to join, CURVE": target(values["s for 360 actors to join, CURVE"], at_most=10.0),
    }
    finish("curve", values | shares, targets)


if __name__ == "__main__":
    main()
