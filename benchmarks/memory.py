"""Bytes per transition in the real replay server and in the learner's frame store, for real games.

For comparison, the bytes that other buffers need: cpprb with `next_of` and `stack_compress`, and raw stacks.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from apex_jax.agent.frame_store import store_bytes
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.run.metrics import resident_memory_bytes
from benchmarks.load import ActorLoad, Recording, record
from benchmarks.report import finish, peer, say, target
from benchmarks.roles import ROOT, free_tcp_addresses, resident_bytes, role

GAMES = ("Pong", "Seaquest", "Breakout", "MsPacman")
POLICIES = {"trained-like, epsilon 0.01": 0.01, "random": 1.0}
SEGMENTS = 1000  # distinct segments of each game and policy, sent repeatedly until the replay is full
ACTORS = 8
CPPRB_TRANSITIONS = 100_000


def main() -> None:
    """Measures every game with both policies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transitions", type=int, default=1_000_000, help="that the server is filled with")
    num_stored = parser.parse_args().transitions
    peer("cpprb")  # ends the benchmark before any measurement if it is not installed
    config = load(ROOT / "configs" / "atari.yaml", [f"replay.capacity_transitions={num_stored}"])
    spec = describe(config).spec
    in_store = store_bytes(spec, num_stored // spec.max_transitions) / num_stored
    say(f"frame store: {in_store:,.0f} B a transition")
    targets: dict[str, Any] = {"frame store, B": target(in_store, at_most=7_849)}
    for game in GAMES:
        for policy, epsilon in POLICIES.items():
            settings = [f"environment.task={game}-v5", f"replay.capacity_transitions={num_stored}"]
            recording = record(load(ROOT / "configs" / "atari.yaml", settings), SEGMENTS, epsilon)
            resident = server_bytes(settings, recording, num_stored)
            say(f"{game}, {policy}: {resident:.0f} B a transition resident in the server")
            targets[f"server, {game}, {policy}, B"] = target(resident, at_most=200)
    raw = 2 * spec.frame_stack * spec.frame_bytes
    figures = {
        "cpprb, next_of and stack_compress, B": cpprb_bytes(config, CPPRB_TRANSITIONS),
        "raw stacks of both observations, B": raw,
    }
    finish("memory", figures, targets)


def server_bytes(settings: list[str], recording: Recording, num_stored: int) -> float:
    """Returns the growth of the server's resident memory from empty to full, in bytes per transition."""
    (experience,) = free_tcp_addresses(1)
    settings = [*settings, f"addresses.experience={experience}", "metrics_interval_seconds=0.5"]
    settings.append("replay.samples_per_insert=0")  # no learner draws here: a rate limit would stop storing early
    config = load(ROOT / "configs" / "atari.yaml", settings)
    with role("replay", ROOT / "configs" / "atari.yaml", settings) as directory:
        actors = ActorLoad(experience, config, recording, ACTORS)
        actors.fill(0)
        empty = resident_bytes(directory, "replay")
        actors.fill(1.05 * num_stored)
        actors.close()
        full = resident_bytes(directory, "replay")
    return (full - empty) / num_stored


def cpprb_bytes(config: Config, num_stored: int) -> float:
    """Returns the bytes per transition of cpprb's own storage of observations of the same shape.

    cpprb allocates its buffers as a whole, before they hold data: the growth of this process's resident memory is
    therefore measured until they are full.
    """
    spec = describe(config).spec
    shape = (*spec.frame_shape, spec.frame_stack)  # consecutive stacks share frames along the last axis
    before = resident_memory_bytes()
    buffer = peer("cpprb").PrioritizedReplayBuffer(
        num_stored,
        {"obs": {"shape": shape, "dtype": np.uint8}, "act": {"dtype": np.int32}, "rew": {}, "done": {}},
        next_of="obs",
        stack_compress="obs",
    )
    frames = np.zeros((1, *shape), np.uint8)
    for _ in range(num_stored):
        buffer.add(obs=frames, next_obs=frames, act=np.zeros(1), rew=np.zeros(1), done=np.zeros(1))
    return (resident_memory_bytes() - before) / num_stored


if __name__ == "__main__":
    main()
