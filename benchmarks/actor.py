"""Steps/s of a real actor process that sends to a sink, relative to its limit: EnvPool and the policy in series.

The serial limit is the rate of an actor that only steps a batch of environments and then runs the policy on it, one
after the other, each with all cores: 1 / (1 / EnvPool's steps per second + 1 / the policy's observations per second).
EnvPool alone runs as many environments as the actor, twice the batch size, and also returns the half that is ready
first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import zmq

from apex_jax.agent.registry import make_algorithm
from apex_jax.config import Config
from apex_jax.environments.environment import Environment, segment_spec
from apex_jax.links.weights_server import WeightsServer
from apex_jax.process import new_peer_id
from apex_jax.run.metrics import read_metrics
from apex_jax.settings import load
from apex_jax.transport.params_codec import architecture_of
from apex_jax.types import ActionSpec
from benchmarks.load import Sink
from benchmarks.replay_server import free_tcp_addresses
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT, role

BATCH_SIZES = (16, 64, 256)
CONFIGS = ("pong_cpu", "paper", "walker")
METRICS_SECONDS = 1.0
WARM_UP_SECONDS = 2.0


def main() -> None:
    """Measures every configuration with every batch size; reports the round with the median share of the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement of the actor")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for name in CONFIGS:
        for batch_size in BATCH_SIZES:
            settings = [f"actor.environments={2 * batch_size}", "actor.ladder_size=0"]
            rounds = [measure(name, settings, arguments.seconds) for _ in range(arguments.rounds)]
            case = f"{name}, batch {batch_size}"
            figures[case] = sorted(rounds, key=lambda figure: figure["of the serial limit"])[len(rounds) // 2]
            targets[f"{case}: of the serial limit"] = target(figures[case]["of the serial limit"], at_least=0.95)
            say(f"{case}: " + ", ".join(f"{key} {value:,.4g}" for key, value in figures[case].items()))
    finish("actor", figures, targets)


def measure(name: str, settings: list[str], seconds: float) -> dict[str, float]:
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
        "of the serial limit": actor / limit,
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
    algorithm = make_algorithm(config, segment_spec(config))
    params = algorithm.acting_params(algorithm.init(jax.random.key(0)))
    server = WeightsServer(
        context, weights, new_peer_id(), 0, config.weights_compatibility_key, architecture_of(params)
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
    spec = segment_spec(config)
    batch_size = config.actor.batch_size
    rng = np.random.default_rng(0)
    environment = Environment(
        config,
        spec,
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


if __name__ == "__main__":
    main()
