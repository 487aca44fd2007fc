"""What one more actor, transition, batch and learner costs in CPU time, and which part of a fleet is full first.

Costs are CPU time, not wall-clock time, so that other work on the machine hardly changes them: of this process for what
actor and learner compute, of a real replay server for what it serves to simulated actors and a learner over tcp. The
table multiplies them by 1, 10, 100 and 1,000 times the paper's fleet, whose limits are those of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from apex_jax.agent.registry import make_algorithm
from apex_jax.config import Config
from apex_jax.environments.environment import segment_spec
from apex_jax.segment_codec import decode_segment, encode_segment
from apex_jax.settings import load
from apex_jax.transport.params_codec import encode_weights
from benchmarks.load import ActorLoad, DrawingClient
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
from benchmarks.roles import ROOT, role

SEGMENTS = 200
PAPER_ACTORS = 360  # each with one environment
ENVIRONMENTS = 128  # of an actor process here, configs/atari.yaml
STORED_TRANSITIONS = 200_000
BATCHES_AT_ONCE = 8
SIZES = (1, 10, 100, 1000)  # times the paper's fleet
SERVER_ACTORS = 1_000  # of one replay server, which takes at most 1,024
NETWORK_BYTES = 1.25e9  # a second on a line of 10 Gbit/s


class Costs(NamedTuple):
    """CPU seconds and bytes of one unit."""

    encode_seconds: float  # an actor's, of a transition
    decode_seconds: float  # the learner's, of a transition
    connected_seconds: float  # the replay server's, of a connected actor in a second
    insert_seconds: float  # the replay server's, of a transition
    draw_seconds: float  # the replay server's, of a batch of 512, with its priorities
    segment_bytes: float  # on the line and in the server, of a transition
    weights_bytes: float  # of one version of the parameters


def main() -> None:
    """Measures the costs, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement of the server (15)")
    seconds = parser.parse_args().seconds
    config = load(ROOT / "configs" / "paper.yaml")
    costs, predicted, measured = measure(config, seconds)
    for line in table(costs):
        print(line)
    figures = {"costs": costs._asdict(), "needed, by size of the fleet": loads_by_size(costs)}
    targets = {
        f"CPU of a server with {SERVER_ACTORS} actors, of what the costs predict": target(
            measured / predicted, 0.7, 1.3
        )
    }
    finish("scaling", figures, targets)


def measure(config: Config, seconds: float) -> tuple[Costs, float, float]:
    """Returns the costs; and what they predict for a server with more actors, beside what that takes, in cores."""
    spec = segment_spec(config)
    say(f"recording {SEGMENTS} segments of {config.environment.task}")
    segments = record_segments(config, SEGMENTS, exploration=0.1)
    count = num_transitions(segments)
    bodies = [encode_segment(segment, spec) for segment in segments]
    encode = cpu_seconds_of(lambda: [encode_segment(segment, spec) for segment in segments]) / count
    decode = cpu_seconds_of(lambda: [decode_segment(body, spec) for body in bodies]) / count
    algorithm = make_algorithm(config, spec)
    params = jax.device_get(algorithm.acting_params(algorithm.init(jax.random.key(1))))
    say(f"a transition: {1e6 * encode:.1f} us to encode, {1e6 * decode:.1f} us to decode")
    idle = server_cores(config, segments, seconds, PAPER_ACTORS, 1.0, is_drawn=False)
    busy = server_cores(config, segments, seconds, PAPER_ACTORS, PAPER_TRANSITIONS_PER_SECOND, is_drawn=False)
    drawn = server_cores(config, segments, seconds, PAPER_ACTORS, PAPER_TRANSITIONS_PER_SECOND, is_drawn=True)
    more = server_cores(config, segments, seconds, SERVER_ACTORS, PAPER_TRANSITIONS_PER_SECOND, is_drawn=False)
    costs = Costs(
        encode_seconds=encode,
        decode_seconds=decode,
        connected_seconds=idle.cores / PAPER_ACTORS,
        insert_seconds=(busy.cores - idle.cores) / busy.transitions_per_second,
        draw_seconds=(drawn.cores - busy.cores) / drawn.batches_per_second,
        segment_bytes=sum(map(len, bodies)) / count,
        weights_bytes=len(encode_weights(params)),
    )
    predicted = costs.connected_seconds * SERVER_ACTORS + costs.insert_seconds * more.transitions_per_second
    return costs, predicted, more.cores


def cpu_seconds_of(work: Callable[[], Any]) -> float:
    """Returns the CPU seconds of all threads of this process that one call takes: the least of three."""
    found = []
    for _ in range(3):
        before = time.process_time()
        work()
        found.append(time.process_time() - before)
    return min(found)


class ServerLoad(NamedTuple):
    """What a replay server does and takes."""

    cores: float
    transitions_per_second: float
    batches_per_second: float


def server_cores(
    config: Config, segments: list[Any], seconds: float, actors: int, transitions_per_second: float, is_drawn: bool
) -> ServerLoad:
    """Returns the CPU time a second of a replay server that so many actors, and a learner if `is_drawn`, use."""
    experience, sampling = free_tcp_addresses(2)
    settings = server_settings(experience, sampling, STORED_TRANSITIONS)
    path = ROOT / "configs" / "paper.yaml"
    config = load(path, settings)
    per_segment = num_transitions(segments) / len(segments)
    with role("replay", path, settings) as directory:
        fleet = ActorLoad(experience, config.compatibility_key, as_messages(config, segments), actors, 0.0, None)
        fill(fleet, STORED_TRANSITIONS / per_segment)
        fleet.set_rate(transitions_per_second / per_segment)
        client, batches = None, 0.0
        if is_drawn:
            client = DrawingClient(
                sampling, config.compatibility_key, BATCHES_AT_ONCE, BATCH_SIZE, GROUPS[BATCHES_AT_ONCE]
            )
            while not client.draw(1.0).batches_per_second:
                pass
        time.sleep(2.0)  # of the rate before
        pid = process_of(directory)
        sent, cpu, start = fleet.sent_segments, cpu_seconds(pid), time.monotonic()
        if client is None:
            time.sleep(seconds)
        else:
            batches = client.draw(seconds).batches_per_second
        elapsed = time.monotonic() - start
        cores = (cpu_seconds(pid) - cpu) / elapsed
        rate = (fleet.sent_segments - sent) * per_segment / elapsed
        if client is not None:
            client.close()
        fleet.close()
    say(f"{actors} actors, {rate:,.0f} transitions/s in, {batches:,.0f} batches/s out: {cores:.3f} of a core")
    return ServerLoad(cores, rate, batches)


def process_of(directory: Path) -> int:
    """Returns the id of the process that runs in a directory."""
    mark = f"run_directory={directory}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if path.parent.name != str(os.getpid()) and mark in path.read_bytes().split(b"\0"):
            return int(path.parent.name)
    raise RuntimeError(f"no process runs in {directory}")


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds that all threads of a process have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loads(costs: Costs, size: float) -> dict[str, float]:
    """Returns how many cores, servers and lines a fleet of `size` times the paper's needs."""
    transitions, batches, actors = (
        size * each for each in (PAPER_TRANSITIONS_PER_SECOND, PAPER_BATCHES_PER_SECOND, PAPER_ACTORS)
    )
    interval = load(ROOT / "configs" / "paper.yaml").learner.publish_interval_seconds
    server = costs.connected_seconds * actors + costs.insert_seconds * transitions + costs.draw_seconds * batches
    parameters = costs.weights_bytes * actors / interval / NETWORK_BYTES
    return {
        "cores of all actors, to encode": costs.encode_seconds * transitions,
        "cores of the learner, to decode": costs.decode_seconds * transitions,
        "replay servers, of one core each": server,
        f"replay servers, of {SERVER_ACTORS:,} actors each": actors / SERVER_ACTORS,
        "lines of 10 Gbit/s, segments": costs.segment_bytes * transitions / NETWORK_BYTES,
        "lines of 10 Gbit/s, parameters to actors of one environment": parameters,
        f"lines of 10 Gbit/s, parameters to actors of {ENVIRONMENTS}": parameters / ENVIRONMENTS,
    }


def loads_by_size(costs: Costs) -> dict[str, dict[str, float]]:
    """Returns `loads` of each of SIZES."""
    return {str(size): loads(costs, size) for size in SIZES}


def table(costs: Costs) -> list[str]:
    """Returns a Markdown table of `loads`."""
    columns = [loads(costs, size) for size in SIZES]
    rows = ["| needed | " + " | ".join(f"{size:,}" for size in SIZES) + " |", "|---|" + "--:|" * len(SIZES)]
    rows += [f"| {name} | " + " | ".join(f"{column[name]:.2g}" for column in columns) + " |" for name in columns[0]]
    return rows


if __name__ == "__main__":
    main()
