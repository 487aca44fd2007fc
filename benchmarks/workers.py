"""A real actor or learner process, relative to the limit of its parts: `python -m benchmarks.workers actor`.

actor     Its steps/s, sent to a sink. The limit is an actor that only steps a batch of environments and then runs the
          policy on it, one after the other, each with all cores: 1 / (1 / EnvPool's steps per second + 1 / the
          policy's observations per second). EnvPool alone runs as many environments as the actor, twice the batch
          size, and also returns the half that is ready first.
learner   Its updates/s, fed by a real replay server over ipc to which simulated actors send real segments. The limit
          is the bare update: the same jitted function on random data that are already on the device.

The parts are measured before and after the process, because a machine's speed drifts.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import zmq

from apex_jax.agent.registry import make_algorithm
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.links.connection import LinkEnd
from apex_jax.links.weights_server import WeightsServer
from apex_jax.process import new_peer_id
from apex_jax.run.metrics import read_metrics
from apex_jax.transport import sockets
from apex_jax.transport.messages import ActorHello, ActorStatus, ActorWelcome, EpisodeStatistics, Goodbye, SegmentAck
from apex_jax.transport.params_codec import architecture_of
from apex_jax.transport.sockets import LocalLinks
from apex_jax.types import ActionSpec, SegmentRecord
from apex_jax.workers.learner import compute_dtype
from benchmarks.load import PAPER_TRANSITIONS_PER_SECOND, ActorLoad, record
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT, free_tcp_addresses, role
from benchmarks.update import BareUpdate

BATCH_SIZES = (16, 64, 256)  # of an actor
CASES = {"pong_cpu": 1_000.0, "paper": 1_000.0, "walker": 1_500.0}  # transitions/s that the learner stores
CAPACITY = 100_000  # transitions
METRICS_SECONDS = 1.0
WARM_UP_SECONDS = 2.0  # of an actor
SEGMENTS = 128


def main() -> None:
    """Measures the cases of a role; reports of each the round with the median share of the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("actor", "learner"))
    parser.add_argument("--seconds", type=float, help="of each measurement of the process: 8, of a learner 20")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--configs", nargs="+", default=tuple(CASES), help="names of files in configs/")
    arguments = parser.parse_args()
    is_actor = arguments.role == "actor"
    seconds = arguments.seconds or (8.0 if is_actor else 20.0)
    figures: dict[str, dict[str, float]] = {}
    targets: dict[str, Any] = {}
    for case, measure in (actor_cases if is_actor else learner_cases)(arguments.configs, seconds):
        rounds = sorted((measure() for _ in range(arguments.rounds)), key=lambda figure: figure["of the limit"])
        figures[case] = rounds[len(rounds) // 2]
        targets[f"{case}: of the limit"] = target(figures[case]["of the limit"], at_least=0.95)
        say(f"{case}: " + ", ".join(f"{key} {value:,.4g}" for key, value in figures[case].items()))
    finish(f"workers {arguments.role}", figures, targets)


def actor_cases(configs: Sequence[str], seconds: float) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Returns the name and the measurement of every case of an actor."""
    for name in configs:
        for batch_size in BATCH_SIZES:
            settings = [f"actor.environments={2 * batch_size}", "actor.ladder_size=0"]
            yield f"{name}, batch {batch_size}", partial(measure_actor, name, settings, seconds)


def learner_cases(configs: Sequence[str], seconds: float) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Returns the name and the measurement of every case of a learner."""
    for name in configs:
        on_cpu = jax.default_backend() == "cpu"
        yield name, partial(measure_learner, name, CASES[name] if on_cpu else PAPER_TRANSITIONS_PER_SECOND, seconds)


def measure_actor(name: str, settings: list[str], seconds: float) -> dict[str, float]:
    """Returns the rates of the actor and of its parts, which are measured before and after it because speed drifts."""
    config = load(ROOT / "configs" / f"{name}.yaml", settings)
    before = parts_alone(config, seconds / 4)
    actor = actor_steps_per_second(name, settings, seconds)
    after = parts_alone(config, seconds / 4)
    environment, policy = (2 / (1 / a + 1 / b) for a, b in zip(before, after, strict=True))
    limit = 1 / (1 / environment + 1 / policy)
    return {
        "actor, steps/s": actor,
        "EnvPool alone, steps/s": environment,
        "policy alone, observations/s": policy,
        "of the limit": actor / limit,
    }


def actor_steps_per_second(name: str, settings: list[str], seconds: float) -> float:
    """Returns the steps/s of an actor process whose segments go to a sink."""
    experience, weights = free_tcp_addresses(2)
    settings = [
        *settings,
        f"addresses.experience={experience}",
        f"addresses.weights={weights}",
        f"metrics_interval_seconds={METRICS_SECONDS}",
    ]
    path = ROOT / "configs" / f"{name}.yaml"
    config = load(path, settings)
    context = zmq.Context()
    algorithm = make_algorithm(config, describe(config).spec)
    params = algorithm.acting_params(algorithm.init(jax.random.key(0)))
    server = WeightsServer(
        LinkEnd(context, weights), new_peer_id(), 0, config.weights_compatibility_key, architecture_of(params)
    )
    server.publish(params, 0, 0)
    sink = Sink(context, experience)
    with role("actor", path, settings) as directory:
        metrics = directory / "metrics" / "actor.jsonl"
        while not metrics.exists() or len(read_metrics(metrics)) < 1 + WARM_UP_SECONDS / METRICS_SECONDS:
            time.sleep(0.1)
        skip = len(read_metrics(metrics))
        time.sleep(seconds)
        rates = [line["actor/steps_per_second"] for line in read_metrics(metrics)[skip:]]
    sink.close()
    server.close()
    context.term()
    return float(np.mean(rates))


def parts_alone(config: Config, seconds: float) -> tuple[float, float]:
    """Returns steps/s of EnvPool with random actions, and observations/s of the policy."""
    environment_spec = describe(config)
    spec = environment_spec.spec
    batch_size = config.actor.batch_size
    rng = np.random.default_rng(0)
    environment = VectorEnvironment(
        config,
        environment_spec,
        np.arange(config.actor.environments),
        config.environment.max_episode_frames,
        config.actor.environment_threads,
        batch_size,
    )
    step = environment.receive()

    def step_batch() -> None:
        nonlocal step
        environment.send(random_actions(rng, spec.action, batch_size), step.env_id)
        step = environment.receive()

    algorithm = make_algorithm(config, spec)
    params, key = algorithm.acting_params(algorithm.init(jax.random.key(0))), jax.random.key(1)
    exploration = np.full(batch_size, 0.1, np.float32)

    def act() -> None:
        for output in algorithm.act(params, step.observation, exploration, key, 0):
            np.asarray(output)

    rates = (calls_per_second(step_batch, seconds) * batch_size, calls_per_second(act, seconds) * batch_size)
    environment.close()
    return rates


def random_actions(rng: np.random.Generator, action: ActionSpec, count: int) -> np.ndarray:
    """Returns `count` uniformly drawn actions."""
    if action.dtype == "int32":
        return rng.integers(action.num_actions, size=count, dtype=np.int32)
    return rng.uniform(action.low, action.high, (count, *action.shape)).astype(np.float32)


def calls_per_second(call: Callable[[], None], seconds: float) -> float:
    """Returns the calls per second, after a first call that compiles."""
    call()
    calls, start = 0, time.monotonic()
    while time.monotonic() < start + seconds:
        call()
        calls += 1
    return calls / (time.monotonic() - start)


class Sink:
    """Welcomes actors and acknowledges their segments as a replay server does, on a thread; stores nothing."""

    def __init__(self, context: zmq.Context, address: str):
        """Binds the socket and starts the thread."""
        self._socket = sockets.serve("experience", context, address)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        kinds = (ActorHello, ActorStatus, SegmentRecord, EpisodeStatistics, Goodbye)
        with self._socket as socket:
            while not self._closing.is_set():
                socket.poll(200)
                while (received := sockets.receive_from(socket, kinds, Counter())) is not None:
                    identity, message = received
                    if isinstance(message, ActorHello):
                        ladder_indices = np.arange(message.num_environments, dtype=np.int32)
                        sockets.send(socket, ActorWelcome(1, ladder_indices, max(2, len(ladder_indices)), 64), identity)
                    elif isinstance(message, SegmentRecord):
                        sockets.send(socket, SegmentAck(message.sequence), identity)


def measure_learner(
    name: str, transitions_per_second: float, seconds: float, more_settings: Sequence[str] = ()
) -> dict[str, float]:
    """Returns updates/s of the learner and of the bare update."""
    links = LocalLinks()
    settings = [
        f"addresses.experience={links.experience}",
        f"addresses.sampling={links.sampling}",
        f"addresses.weights={links.weights}",
        f"metrics_interval_seconds={METRICS_SECONDS}",
        f"replay.capacity_transitions={CAPACITY}",
        "replay.min_size_to_sample=5000",
        "replay.samples_per_insert=0",
        "total_minutes=0",
        *more_settings,
    ]
    path = ROOT / "configs" / f"{name}.yaml"
    config = load(path, settings)
    recording = record(config, SEGMENTS)
    bare = BareUpdate(config, compute_dtype(config))
    before = bare.per_second(seconds / 4)
    with role("replay", path, settings), role("learner", path, settings) as directory:
        actors = ActorLoad(links.experience, config, recording, 4, transitions_per_second)
        learner = steady_rates(directory / "metrics" / "learner.jsonl", seconds)
        actors.close()
    after = bare.per_second(seconds / 4)
    links.close()
    limit = 2 / (1 / before + 1 / after)
    return {"learner, updates/s": learner, "bare update, updates/s": limit, "of the limit": learner / limit}


def steady_rates(metrics: Path, seconds: float) -> float:
    """Returns the mean updates/s over `seconds`, after 5 lines of metrics that report a loss."""

    def rates() -> list[float]:
        lines = read_metrics(metrics) if metrics.exists() else []
        return [line["charts/updates_per_second"] for line in lines if line.get("losses/td_loss") is not None]

    while len(rates()) < 5:
        time.sleep(0.2)
    skip = len(rates())
    time.sleep(seconds)
    while len(rates()) == skip:
        time.sleep(0.2)
    return sum(rates()[skip:]) / len(rates()[skip:])


if __name__ == "__main__":
    main()
