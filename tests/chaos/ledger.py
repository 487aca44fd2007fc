"""Checks of the ledger: it adds up, nothing stays in flight, and independent counts agree."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from apex_jax.config.load import load
from apex_jax.environments.environment import segment_spec
from apex_jax.process import digest_of_peer_id
from apex_jax.replay.ledger import DROPS, TransitionCounts
from apex_jax.replay.snapshots import FileHeader, Snapshots
from apex_jax.run.metric_files import read_metrics
from tests.chaos.watch import Life
from tests.rigs.fleet import role_of
from tests.rigs.processes import ROOT

PROCESS = re.compile(r"acting in .* \(process ([0-9a-f]{16})\)")  # the digest of an actor's peer id, in its log


class Books(NamedTuple):
    """Transitions as counted independently by actors, servers and learner."""

    ledger: dict[str, float]  # as the replay server wrote it last, by outcome
    accounts: dict[int, TransitionCounts]  # of which that is the sum, by the digest of the actor's peer id
    inserted: int  # into the replay, as its rate limiter counts
    steps: dict[int, int]  # of the environments, as the actors count that left in peace, by the same


def read_books(directory: Path, lives: Iterable[Life]) -> Books:
    """Reads the results of the replay server of an ended fleet; `lives`: the processes that ended regularly."""
    config = load(ROOT / "configs" / "catch.yaml")
    spec = segment_spec(config)
    saved = Snapshots(directory / "replay", FileHeader(config.compatibility_key, spec)).read_newest()
    assert saved is not None, "the replay server has left no snapshot"
    rows = saved.ledger.to_array().tolist()
    accounts = {int(digest_of_peer_id(peer_id), 16): TransitionCounts(*numbers) for peer_id, *numbers in rows}
    return Books(newest_ledger(directory), accounts, saved.limiter["inserted"], steps_of(lives))


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
    outcomes = sum(value for name, value in ledger.items() if name != "produced")
    if ledger["produced"] != outcomes:
        lines.append(f"the ledger does not add up: {ledger}")
    for name in ("in_flight", "lost_with_replay"):  # no actor is left
        if ledger[name]:
            lines.append(f"the ledger ends with {ledger[name]:g} transitions {name}")
    if ledger["stored"] != books.inserted:
        lines.append(f"the ledger has {ledger['stored']:g} transitions stored, the replay {books.inserted}")
    for peer_id, steps in books.steps.items():
        lines += account_violations(f"{peer_id:016x}", steps, books.accounts.get(peer_id, TransitionCounts()))
    return lines


def account_violations(run: str, steps: int, account: TransitionCounts) -> list[str]:
    """Returns the accounts that differ from the steps of their actors; each step is one transition."""
    outcomes = account.stored + account.refused + sum(getattr(account, reason) for reason in DROPS)
    return [
        f"actor {run} made {steps} transitions, its account has {number} {what}"
        for what, number in (("produced", account.produced), ("stored or dropped", outcomes))
        if number != steps
    ]
