"""Checks of the ledger: independent counts of actors, servers and learner agree with it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.process import digest_of_peer_id
from apex_jax.replay.header import Header
from apex_jax.replay.snapshots import Snapshots
from apex_jax.run.metric_files import read_metrics
from tests.chaos.watch import Life
from tests.rigs.fleet import role_of
from tests.rigs.processes import ROOT

PROCESS = re.compile(r"acting in .* \(process ([0-9a-f]{16})\)")  # the digest of an actor's peer id, in its log


class Books(NamedTuple):
    """Transitions as counted independently by actors, servers and learner."""

    ledger: dict[str, float]  # as the replay server wrote it last, by name
    produced: dict[int, int]  # transitions as the replay server counts them, by the digest of the actor's peer id
    inserted: int  # into the replay, as its rate limiter counts
    steps: dict[int, int]  # of the environments, as the actors count that left in peace, by the same


def read_books(directory: Path, lives: Iterable[Life]) -> Books:
    """Reads the results of the replay server of an ended fleet; `lives`: the processes that ended regularly."""
    config = load(ROOT / "configs" / "catch.yaml")
    spec = describe(config).spec
    header = Header(directory / "replay", config.compatibility_key, spec)
    saved = Snapshots(directory / "replay", header).read_newest()
    assert saved is not None, "the replay server has left no snapshot"
    actors = saved.ledger.actors().tolist()
    produced = {int(digest_of_peer_id(peer_id), 16): number for peer_id, _, number in actors}
    return Books(newest_ledger(directory), produced, saved.limiter["inserted"], steps_of(lives))


def newest_ledger(directory: Path) -> dict[str, float]:
    """Returns the newest ledger that the replay server wrote to its metrics, by name; empty before the first."""
    line = read_metrics(directory / "metrics" / "replay.jsonl")[-1]
    return {tag.removeprefix("ledger/"): value for tag, value in line.items() if tag.startswith("ledger/")}


def steps_of(lives: Iterable[Life]) -> dict[int, int]:
    """Returns the environment steps of each actor among these, by the digest of its peer id."""
    steps = {}
    for life in lives:
        if role_of(life.name) == "actor" and len(found := PROCESS.findall(life.program.stderr)) == 1:
            steps[int(found[0], 16)] = int(read_metrics(life.metrics)[-1]["actor/environment_steps"])
    return steps


def ledger_violations(books: Books) -> list[str]:
    """Returns the violated invariants after the actors, and then all others, have ended."""
    ledger, lines = books.ledger, []
    if ledger["produced"] < sum(ledger.values()) - ledger["produced"]:
        lines.append(f"the ledger has more outcomes than transitions: {ledger}")
    if ledger["stored"] != books.inserted:
        lines.append(f"the ledger has {ledger['stored']:g} transitions stored, the replay {books.inserted}")
    for peer_id, steps in books.steps.items():
        if (produced := books.produced.get(peer_id, 0)) != steps:  # each step is one transition
            lines.append(f"actor {peer_id:016x} made {steps} transitions, the ledger has {produced}")
    return lines
