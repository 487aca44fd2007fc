"""What one more actor, transition, batch and learner costs in CPU time, and which part of a fleet is full first.

Costs are CPU time, not wall-clock time, so that other work on the machine hardly changes them: of this process for what
actor and learner compute, of a real replay server for what it serves to simulated actors and a learner over tcp. The
table multiplies them by 1, 10, 100 and 1,000 times the paper's fleet, whose limits are those of docs/scaling.md. Then,
what they predict is compared with fleets of 1,000 and 10,000 simulated actors, on 1 and 10 real replay servers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from apex_jax.agent.registry import make_algorithm
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.segment_codec import decode_segment, encode_segment
from apex_jax.transport.params_codec import encode_weights
from benchmarks.load import (
    PAPER_BATCHES_PER_SECOND,
    PAPER_TRANSITIONS_PER_SECOND,
    ActorLoad,
    DrawingClient,
    Recording,
    record,
)
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT, free_tcp_addresses, role, server_settings

SEGMENTS = 200
PAPER_ACTORS = 360  # each with one environment
ENVIRONMENTS = 128  # of an actor process here, configs/atari.yaml
STORED_TRANSITIONS = 200_000
BATCHES_AT_ONCE = 8
SIZES = (1, 10, 100, 1000)  # times the paper's fleet
SERVER_ACTORS = 1_000  # of one replay server, which takes at most 1,024
FLEETS = (1_000, 10_000)  # actors that what the costs predict is compared with
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
    recording = record(config, SEGMENTS)
    costs = measure(config, recording, seconds)
    for line in table(costs):
        print(line)
    targets = {}
    for actors in FLEETS:
        found = server_cores(recording, seconds, actors, PAPER_TRANSITIONS_PER_SECOND, is_drawn=False)
        predicted = costs.connected_seconds * actors + costs.insert_seconds * found.transitions_per_second
        of_fleet = f"CPU of the servers of {actors:,} actors, of what the costs predict"
        targets[of_fleet] = target(found.cores / predicted, 0.7, 1.3)
    finish("scaling", {"costs": costs._asdict(), "needed, by size of the fleet": loads_by_size(costs)}, targets)


def measure(config: Config, recording: Recording, seconds: float) -> Costs:
    """Returns the costs, those of the replay server from one with the paper's actors."""
    spec = describe(config).spec
    count = recording.per_segment * SEGMENTS
    bodies = [message.body for message in recording.messages]
    encode = cpu_seconds_of(lambda: [encode_segment(segment, spec) for segment in recording.segments]) / count
    decode = cpu_seconds_of(lambda: [decode_segment(body, spec) for body in bodies]) / count
    algorithm = make_algorithm(config, spec)
    params = jax.device_get(algorithm.acting_params(algorithm.init(jax.random.key(1))))
    say(f"a transition: {1e6 * encode:.1f} us to encode, {1e6 * decode:.1f} us to decode")
    idle = server_cores(recording, seconds, PAPER_ACTORS, 1.0, is_drawn=False)
    busy = server_cores(recording, seconds, PAPER_ACTORS, PAPER_TRANSITIONS_PER_SECOND, is_drawn=False)
    drawn = server_cores(recording, seconds, PAPER_ACTORS, PAPER_TRANSITIONS_PER_SECOND, is_drawn=True)
    return Costs(
        encode_seconds=encode,
        decode_seconds=decode,
        connected_seconds=idle.cores / PAPER_ACTORS,
        insert_seconds=(busy.cores - idle.cores) / busy.transitions_per_second,
        draw_seconds=(drawn.cores - busy.cores) / drawn.batches_per_second,
        segment_bytes=sum(map(len, bodies)) / count,
        weights_bytes=len(encode_weights(params)),
    )


def cpu_seconds_of(work: Callable[[], Any]) -> float:
    """Returns the CPU seconds of all threads of this process that one call takes: the least of three."""
    found = []
    for _ in range(3):
        before = time.process_time()
        work()
        found.append(time.process_time() - before)
    return min(found)


class ServerLoad(NamedTuple):
    """What the replay servers do and take together."""

    cores: float
    transitions_per_second: float
    batches_per_second: float


class Server(NamedTuple):
    """A replay server and the actors that send to it."""

    config: Config
    pid: int
    actors: ActorLoad
    sampling_address: str


def server_cores(
    recording: Recording, seconds: float, actors: int, transitions_per_second: float, is_drawn: bool
) -> ServerLoad:
    """Returns what the replay servers of so many actors take, SERVER_ACTORS each; one is drawn from if `is_drawn`."""
    number = -(-actors // SERVER_ACTORS)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server(recording, actors // number)) for _ in range(number)]
        for each in servers:
            each.actors.set_rate(transitions_per_second / number)
        client, batches = None, 0.0
        if is_drawn:
            client = DrawingClient(servers[0].sampling_address, servers[0].config, BATCHES_AT_ONCE)
            stack.callback(client.close)
        time.sleep(2.0)  # of the rate before

        def counted() -> tuple[float, float, float]:
            sent, cpu = (each.actors.sent_transitions for each in servers), (cpu_seconds(each.pid) for each in servers)
            return sum(sent), sum(cpu), time.monotonic()

        before = counted()
        if client is None:
            time.sleep(seconds)
        else:
            batches = client.draw(seconds).batches_per_second
        sent, cpu, elapsed = (after - value for after, value in zip(counted(), before, strict=True))
    cores, rate = cpu / elapsed, sent / elapsed
    say(f"{actors:,} actors, {rate:,.0f} transitions/s in, {batches:,.0f} batches/s out: {cores:.3f} of a core")
    return ServerLoad(cores, rate, batches)


@contextlib.contextmanager
def server(recording: Recording, actors: int) -> Iterator[Server]:
    """Starts a replay server with so many actors, which have filled it."""
    experience, sampling = free_tcp_addresses(2)
    settings = server_settings(experience, sampling, STORED_TRANSITIONS)
    config = load(ROOT / "configs" / "paper.yaml", settings)
    with role("replay", ROOT / "configs" / "paper.yaml", settings) as directory:
        peers = ActorLoad(experience, config, recording, actors)
        try:
            peers.fill(STORED_TRANSITIONS)
            peers.set_rate(recording.per_segment)  # until all are filled
            yield Server(config, process_of(directory), peers, sampling)
        finally:
            peers.close()


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
