"""Peers with a sound key that use what they are let in for against the run: every message is well formed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.transport import sockets, wire
from apex_jax.types import Credit, EpisodeStatistics, IndexBatches, StreamedSegments
from tests.fuzz_targets import fuzz_config
from tests.served import Served, stores_for

MOST_GAMES = 4096  # in one message


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(fuzz_config(tmp_path))
    yield served
    served.close()


def statistics(run_id: int, number: int) -> EpisodeStatistics:
    """Games with epsilons in all bands."""
    epsilon = np.linspace(0, 1, number, dtype=np.float32)
    return EpisodeStatistics(run_id, epsilon, np.ones(number, np.float32), np.ones(number, np.int32))


def calls_of(action: Callable[[], Any]) -> int:
    """Returns how many functions, of Python and of C, are called meanwhile."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


# One client's work, and the turns of the others -------------------------------------------------------------------


def test_fault_39_the_work_for_a_message_of_statistics_does_not_grow_with_its_games(served: Served) -> None:
    actor, episodes = served.actor(1), served.server.experience.episodes

    def calls_for(number: int) -> int:
        actor.send(statistics(1, number))
        served.server._experience_socket.poll(10_000)
        before = episodes.length.count
        calls = calls_of(served.serve)
        assert episodes.length.count == before + number
        return calls

    calls_for(8)  # a mean for each band is made once
    assert calls_for(MOST_GAMES) < calls_for(8) + 50


def test_fault_39_a_backlog_of_slow_messages_leaves_the_learner_its_turn(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, learner = served.actor(1), served.learner()
    stores_for(served, actor, 1, 1)
    learner.send(Credit(5, groups=1, segments=10))
    learner.receive(StreamedSegments)
    learner.receive(IndexBatches)
    monkeypatch.setattr(sockets, "READING_TURN_SECONDS", 0.0, raising=False)  # one message takes a whole turn
    experience, sampling = served.server._experience_socket, served.server._sampling_socket
    serve, learner._meanwhile = learner._meanwhile, lambda: None
    for _ in range(20):
        actor.socket.send_multipart(wire.encode(statistics(1, 1)))
    learner.send(Credit(5, groups=1, segments=10))
    assert experience.poll(10_000)
    assert sampling.poll(10_000)
    serve()
    learner.receive(IndexBatches)
    assert served.server.experience.episodes.length.count < 20
