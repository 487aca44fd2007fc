"""Joined peers that send well-formed messages with false content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from apex_jax.links.sampling_client import SEGMENTS_WINDOW
from apex_jax.run.metric_files import read_metrics
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    ActorHello,
    ActorWelcome,
    EpisodeStatistics,
    LearnerHello,
    PriorityUpdate,
    Refusal,
    Rejoin,
)
from apex_jax.types import MAX_COUNT, MAX_ENVIRONMENT_STEPS, SegmentRecord
from tests.fuzz.targets import fuzz_config
from tests.rigs.links import TRANSITIONS, credit, highest, waiting_in
from tests.rigs.served import Served, segment, stores_for


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(fuzz_config(tmp_path))
    yield served
    served.close()


@pytest.fixture
def full(served: Served) -> Served:
    """One whose rate limiter allows no insert."""
    served.server.replay.limiter.can_insert = lambda *_: False  # type: ignore[method-assign]
    return served


# Counters that grow beyond what they can hold ---------------------------------------------------------------------


def test_fault_26_largest_step_counts_of_a_learner_and_an_actor_overflow_no_counter(
    served: Served, tmp_path: Path
) -> None:
    served.learner(environment_steps=MAX_ENVIRONMENT_STEPS).send(credit(5, groups=2, segments=10))
    actor = served.actor(1)
    actor.send(segment(1, 1, produced=MAX_COUNT))
    stores_for(served, actor, 1, 2)
    served.server.write_metrics()
    assert read_metrics(tmp_path / "metrics" / "replay.jsonl")[-1]["replay/actors"] == 1


@pytest.mark.parametrize("compatibility_key", ["\x01" * 1024, "task=" + "\x01" * 1019, "\u200b" * 341])
@pytest.mark.parametrize("link", ["experience", "sampling"])
def test_fault_26_compatibility_key_with_unprintable_characters_does_not_end_the_server(
    served: Served, link: str, compatibility_key: str
) -> None:
    peer = served.peer(link)
    hello = (
        ActorHello(1, compatibility_key, 4)
        if link == "experience"
        else LearnerHello(1, compatibility_key, 0, 1, batch_size=4)
    )
    peer.send(hello)
    reason = peer.receive(Refusal).reason
    assert reason.isprintable()
    assert reason.endswith("; make them equal")


def test_fault_26_a_sequence_at_its_end_ends_only_that_run(served: Served) -> None:
    liar, good = served.actor(1, acknowledged=MAX_COUNT - 1), served.actor(2)
    liar.send(segment(1, MAX_COUNT), segment(1, MAX_COUNT), segment(1, 1))
    stores_for(served, good, 2, 1)
    served.until(lambda: served.server.experience.dropped["duplicate_segment"] >= 1)
    assert served.server.replay.buffer.inserted_segments == 2, "each of them once"


def test_fault_26_largest_sequence_numbers_do_not_damage_the_journal(served: Served) -> None:
    last = highest(SegmentRecord, "sequence")
    stores_for(served, served.actor(1, acknowledged=last - 1), 1, last)
    stores_for(served, served.actor(2), 2, 1)
    served.restart()
    assert served.server.replay.buffer.inserted_segments == served.server.replay.buffer.size_segments == 2
    assert served.server.ledger()["stored"] == 2 * TRANSITIONS


# Memory that somebody else fills ----------------------------------------------------------------------------------


def test_fault_26_new_peer_ids_on_one_connection_do_not_grow_the_queues(full: Served) -> None:
    peer, credit = full.peer("experience"), full.config.actor.max_outstanding_segments
    for peer_id in range(1, 101):
        peer.send(ActorHello(peer_id, full.config.compatibility_key, 4))
        peer.receive(ActorWelcome)
        peer.send(*(segment(peer_id, sequence) for sequence in range(1, credit + 1)))
    full.until(lambda: waiting_in(full.server.experience) == credit)
    assert len(full.server.experience.actors) == 1
    peer.send(ActorHello(1, full.config.compatibility_key, 4))  # which still has the segments that were discarded
    peer.receive(ActorWelcome)
    del full.server.replay.limiter.can_insert  # type: ignore[method-assign]
    stores_for(full, peer, 1, 1)


def test_fault_26_endless_credit_does_not_cause_endless_work(served: Served) -> None:
    learner = served.learner()
    for _ in range(100):
        learner.send(credit(5, groups=2**13, segments=2**20))
    served.until(lambda: not served.server.sampling_socket.poll(10))
    peer = served.server.sampling.learner
    assert peer is not None
    assert SEGMENTS_WINDOW <= peer.segments_credit <= 2**13
    assert len(peer.asked) <= 2**13


# Turns that never end ---------------------------------------------------------------------------------------------


class Flood:
    """A socket with this many invalid messages in its queue."""

    def __init__(self, number: int) -> None:
        self.left = number

    def recv_multipart(self, *_: Any, **__: Any) -> list[zmq.Frame]:
        if not self.left:
            raise zmq.Again
        self.left -= 1
        return [zmq.Frame(b"peer"), zmq.Frame(b"garbage")]


@pytest.mark.parametrize("link", ["experience", "sampling"])
def test_fault_26_flood_of_garbage_does_not_starve_others(
    served: Served, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = served.server.experience if link == "experience" else served.server.sampling
    flood = Flood(50 * sockets.MESSAGES_AT_ONCE)
    monkeypatch.setattr(service, "_socket", flood)
    service.read(0.0)
    assert flood.left > 0, "the garbage of one peer was read for as long as it came"


# Values that are well formed and wrong ----------------------------------------------------------------------------


def test_fault_21_signalling_nan_is_refused_without_a_warning(served: Served) -> None:
    learner, signalling = served.learner(), np.array([0x7F800001], np.uint32).view(np.float32)
    learner.send(PriorityUpdate(5, np.array([1], np.int32), np.array([1], np.uint32), signalling))
    served.until(lambda: served.server.sampling.dropped["invalid_priority"] == 1)
    assert served.server.replay.buffer.max_priority == 0


def test_fault_26_extreme_statistics_do_not_break_a_line_of_metrics(served: Served, tmp_path: Path) -> None:
    actor = served.actor(1)
    arrays = np.ones(1, np.float32), np.ones(1, np.float32), np.array([2**31 - 1], np.int32)
    sound = EpisodeStatistics(1, *arrays, "level", np.ones((1, 1), np.float32))
    for value in (np.inf, np.nan, 3.4e38, -3.4e38):
        one = np.array([value], np.float32)
        actor.send(sound._replace(exploration=one, episode_return=one), sound._replace(exploration=one))
        actor.send(sound._replace(episode_return=one))
    actor.send(
        sound._replace(exploration=np.array([-0.001], np.float32)),
        sound._replace(exploration=np.array([1.001], np.float32)),
    )
    actor.send(*(sound._replace(episode_steps=np.array([steps], np.int32)) for steps in (-1, -(2**31))))
    stores_for(served, actor, 1, 1)
    served.server.write_metrics()
    [line] = read_metrics(tmp_path / "metrics" / "replay.jsonl")
    assert line["replay/dropped_bad_statistics"] == 4 + 4 + 2 + 2 + 2
    assert np.isfinite(line["charts/episodic_return"])
    assert line["charts/episodic_length"] == 2**31 - 1


def test_fault_26_actor_with_the_largest_number_of_environments_frees_its_ladder_indices(served: Served) -> None:
    for peer_id in range(1, 20):
        actor = served.actor(peer_id, num_environments=4096)
        actor.socket.close(linger=0)
        served.peers.remove(actor)
    served.now_seconds += 60.0
    good = served.actor(100)
    served.server.experience.evict_dead_peers(served.now_seconds)
    assert [len(actor.ladder_indices) for actor in served.server.experience.actors.values()] == [4]
    stores_for(served, good, 100, 1)


def test_fault_26_batches_are_drawn_only_for_the_learner_that_is_known(served: Served) -> None:
    stores_for(served, served.actor(1), 1, 1)
    stranger, learner = served.peer("sampling"), served.learner()
    stranger.send(credit(5, groups=1, segments=10), PriorityUpdate(5, *_nothing()))
    learner.send(credit(5, groups=0, segments=10))
    for _ in range(20):
        served.serve()
    assert served.server.sampling.learner is not None
    assert not served.server.sampling.learner.asked
    stranger.receive(Rejoin)
    stranger.receive(Rejoin)
    assert stranger.receives_nothing()


def _nothing() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(0, np.int32), np.zeros(0, np.uint32), np.zeros(0, np.float32)
