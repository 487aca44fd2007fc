"""Updates/s of a real learner process, fed by a real replay server over ipc, relative to its limit: the bare update.

The bare update is the same jitted function on random data that are already on the device; it is measured before and
after the learner, because a machine's speed drifts. While the learner runs, simulated actors send real segments, which
it decodes and stores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax

from apex_jax.run.metrics import read_metrics
from apex_jax.settings import load
from apex_jax.transport.sockets import LocalLinks
from apex_jax.workers.learner import compute_dtype
from benchmarks.load import ActorLoad
from benchmarks.recorded import as_messages, num_transitions, record_segments
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT, role
from benchmarks.update import BareUpdate

CASES = {"pong_cpu": 1_000.0, "paper": 1_000.0, "walker": 1_500.0}  # transitions/s that the actors send
GPU_TRANSITIONS_PER_SECOND = 12_500.0  # the paper's
CAPACITY = 100_000  # transitions
METRICS_SECONDS = 1.0
SEGMENTS = 128


def main() -> None:
    """Measures every configuration; reports the round with the median share of the bare update."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring the learner")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for name, transitions_per_second in CASES.items():
        if jax.default_backend() != "cpu":
            transitions_per_second = GPU_TRANSITIONS_PER_SECOND
        rounds = [measure(name, transitions_per_second, arguments.seconds) for _ in range(arguments.rounds)]
        figures[name] = sorted(rounds, key=lambda figure: figure["of the bare update"])[len(rounds) // 2]
        targets[f"{name}: of the bare update"] = target(figures[name]["of the bare update"], at_least=0.95)
        say(f"{name}: " + ", ".join(f"{key} {value:,.4g}" for key, value in figures[name].items()))
    finish("learner", figures, targets)


def measure(
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
    segments = record_segments(config, SEGMENTS, exploration=0.1)
    per_segment = num_transitions(segments) / SEGMENTS
    bare = BareUpdate(config, compute_dtype(config))
    before = bare.per_second(seconds / 4)
    with role("replay", path, settings), role("learner", path, settings) as directory:
        rate = transitions_per_second / per_segment
        actors = ActorLoad(links.experience, config.compatibility_key, as_messages(config, segments), 4, rate, None)
        learner = steady_rates(directory / "metrics" / "learner.jsonl", seconds)
        actors.close()
    after = bare.per_second(seconds / 4)
    links.close()
    limit = 2 / (1 / before + 1 / after)
    return {"learner, updates/s": learner, "bare update, updates/s": limit, "of the bare update": learner / limit}


def steady_rates(metrics: Any, seconds: float) -> float:
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
