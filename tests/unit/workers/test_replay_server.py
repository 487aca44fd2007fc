"""Specification of the replay server as a whole: both links, the run's end, its metrics and its errors."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from apex_jax.config import AddressConfig, Config, ReplayConfig
from apex_jax.host.errors import RunError, UsageError
from apex_jax.replay.rate_limiter import make_limiter
from apex_jax.run.metrics import read_metrics
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    ActorWelcome,
    Credit,
    EpisodeStatistics,
    Finish,
    Goodbye,
    IndexBatches,
    SegmentAck,
    StreamedSegments,
)
from apex_jax.types import SegmentSpec
from apex_jax.workers import replay_server
from apex_jax.workers.replay_server import ReplayServer
from apex_jax.workers.role import RoleContext
from tests.rigs import journals
from tests.rigs.agents import CONTINUOUS
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, Peer, free_address, wait_until
from tests.rigs.served import Served, segment


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return CONFIG.replace(
        run_directory=str(tmp_path),
        metrics_interval_seconds=0.1,
        replay=replace(ReplayConfig(), capacity_transitions=8 * TRANSITIONS, min_size_to_sample=2 * TRANSITIONS),
        addresses=AddressConfig(free_address(), free_address(), free_address()),
    )


class Running(Served):
    """A replay server on its thread, and peers by hand."""

    def __init__(self, config: Config, spec: SegmentSpec = SPEC) -> None:
        super().__init__(config, spec)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    def serve(self) -> None:
        """The thread does."""

    def close(self) -> None:
        self.role.stop.set()
        self.thread.join()
        super().close()


@pytest.fixture
def running(config: Config) -> Iterator[Running]:
    running = Running(config)
    yield running
    running.close()


def send_segments(actor: Peer, *numbers: int) -> None:
    for number in numbers:
        actor.send(segment(1, number, 100 * number))
    while actor.receive(SegmentAck).sequence < numbers[-1]:
        pass


def test_segments_wait_while_the_learner_waits_for_batches(running: Running) -> None:
    learner, actor = running.learner(environment_steps=1_000), running.actor(1)
    learner.send(Credit(2, 0))
    send_segments(actor, 1, 2, 3)  # a learner that wants no batches now holds nothing back
    learner.send(Credit(0, 1))
    wait_until(lambda: running.server.sampling.is_in_arrears)
    actor.send(segment(1, 4, 400))
    assert actor.receives_nothing()
    assert running.server.replay.buffer.inserted_segments == 3
    learner.send(Credit(9, 0))
    received: list[int] = []
    while 2 not in received:
        received += learner.receive(StreamedSegments).ring_slots.tolist()
    assert received == [0, 1, 2]
    batches = learner.receive(IndexBatches)
    assert batches.replay_id == running.server.replay.journal.header.replay_id
    assert batches.environment_steps == 300, "of this replay alone"
    assert learner.receive(StreamedSegments).ring_slots.tolist() == [3]
    assert actor.receive(SegmentAck).sequence == 4


def test_metrics_of_the_replay_are_at_the_steps_of_the_run_that_its_learner_has_counted(running: Running) -> None:
    learner, actor, skip = running.learner(), running.actor(1), running.config.environment.frame_skip
    send_segments(actor, 1, 2)
    wait_until(lambda: running.server.describe()["environment_frames"] == 200 * skip)
    learner.send(Credit(environment_steps=1_200))
    wait_until(lambda: running.server.describe()["environment_frames"] == 1_200 * skip)
    wait_until(lambda: steps_written(running.config)[-1] == 1_200 * skip)


def test_the_end_of_the_run_ends_the_server_once_all_have_left(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_server, "LEAVING_SECONDS", 60.0)
    learner, actor = running.learner(), running.actor(1)
    for _ in range(2):  # the answer to the first may have been lost
        learner.send(Finish("enough"))
        assert learner.receive(Finish).reason == "enough"
    assert actor.receive(Finish).reason == "enough"
    actor.send(Goodbye())
    wait_until(lambda: not running.server.experience.actors)
    assert running.thread.is_alive()
    learner.send(Goodbye())
    running.thread.join(20)
    assert not running.thread.is_alive()


def test_metrics_count_stored_drawn_dropped_and_played(running: Running) -> None:
    actor, learner = running.actor(1), running.learner()
    learner.send(Credit(10, 1))
    send_segments(actor, 1, 2)
    learner.receive(StreamedSegments)
    actor.send_frames(b"\xc1")
    games = np.array([0.0, 1.0], np.float32), np.array([20, 10], np.float32), np.array([7, 9], np.int32)
    actor.send(EpisodeStatistics(*games, "", np.zeros((2, 0), np.float32)))
    wait_until(lambda: running.server.experience.dropped and running.server.replay.limiter.sampled)
    wait_until(
        lambda: values_written(running.config).keys() >= {"replay/dropped_not_msgpack", "charts/episodic_return"}
    )
    running.close()
    values = values_written(running.config)
    assert values["replay/size_transitions"] == 2 * TRANSITIONS
    assert values["replay/samples_per_insert"] == 4, "none was stored since there were enough to draw from"
    assert values["replay/actors"] == 1
    assert values["replay/bytes"] > 0
    assert values["replay/dropped_not_msgpack"] == 1
    assert values["charts/episodic_return"] == 15
    assert values["charts/episodic_length"] == 8
    assert values["charts/episodic_return_epsilon_below_0.01"] == 20
    assert values["charts/episodic_return_epsilon_above_0.2"] == 10
    assert values["step"] == 200 * running.config.environment.frame_skip


def test_returns_of_games_with_continuous_actions_are_reported_by_band_of_noise(config: Config) -> None:
    running = Running(config, SPEC._replace(action=CONTINUOUS))
    noise = np.array([0.05, 0.1, 0.3, 0.8, 1.5], np.float32)
    returns, steps = np.array([900, 700, 500, 30, 10], np.float32), np.full(5, 1_000, np.int32)
    running.actor(1).send(EpisodeStatistics(noise, returns, steps, "", np.zeros((5, 0), np.float32)))
    wait_until(lambda: "charts/episodic_return" in values_written(config))
    running.close()
    values = values_written(config)
    assert {tag: values[tag] for tag in values if tag.startswith("charts/episodic_return")} == {
        "charts/episodic_return": 428,
        "charts/episodic_return_noise_below_0.1": 900,
        "charts/episodic_return_noise_0.1_to_0.2": 700,
        "charts/episodic_return_noise_0.2_to_0.4": 500,
        "charts/episodic_return_noise_above_0.4": 20,
    }


def values_written(config: Config) -> dict[str, Any]:
    """Every tag with its newest value that is one."""
    values: dict[str, Any] = {}
    path = Path(config.directory, "metrics", "replay.jsonl")
    for line in read_metrics(path) if path.exists() else []:
        values |= {tag: value for tag, value in line.items() if value is not None}
    return values


def steps_written(config: Config) -> list[float]:
    path = Path(config.directory, "metrics", "replay.jsonl")
    return [line["step"] for line in read_metrics(path)] if path.exists() else [0.0]


def as_killed_now(config: Config) -> Config:
    """Returns the configuration of a server that finds what another one would leave if it were killed now."""
    copy = config.replace(run_directory=str(Path(config.directory, "copy")))
    shutil.copytree(Path(config.directory, "replay"), Path(copy.directory, "replay"))
    return copy.replace(addresses=AddressConfig(free_address(), free_address(), free_address()))


def test_server_killed_before_a_welcome_does_not_reuse_the_actor_number(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, send = [], sockets.send

    def killed_before(socket: zmq.Socket, message: Any, *identity: bytes) -> bool:
        if isinstance(message, ActorWelcome):
            copies.append(as_killed_now(config))
        return send(socket, message, *identity)

    first = Running(config)
    monkeypatch.setattr(sockets, "send", killed_before)
    first.actor(1)
    second = ReplayServer(RoleContext(copies[0], first.context, "replay"), SPEC)
    assert second.replay.ledger.highest_actor_number == 1, "or it would give this actor number to another actor, too"
    second.close()
    first.close()


def test_a_learner_that_leaves_has_a_snapshot_written(config: Config) -> None:
    first = Running(config)
    learner, actor = first.learner(), first.actor(1)
    send_segments(actor, 1, 2)
    learner.send(Credit(10, 1))
    wait_until(lambda: first.server.replay.limiter.sampled == 4)
    learner.send(Goodbye())
    wait_until(lambda: journals.files(Path(config.directory), "snapshot") != [])  # else due in a minute
    second = Running(as_killed_now(config))
    assert second.server.replay.limiter.sampled == 4
    second.close()
    first.close()


def test_a_directory_in_use_is_one_line_and_leaves_nothing_open(running: Running) -> None:
    context = zmq.Context()
    other = running.config.replace(addresses=AddressConfig(free_address(), free_address(), free_address()))
    with pytest.raises(RunError, match="another replay server is using"):
        ReplayServer(RoleContext(other, context, "replay"), SPEC)
    context.term()
    assert context.closed


@pytest.mark.parametrize("link", ["experience", "sampling"])
def test_an_address_in_use_is_one_line_and_leaves_nothing_open(config: Config, link: str) -> None:
    context, other = zmq.Context(), zmq.Context()
    address = getattr(config.addresses, link)
    with sockets.serve("weights", other, address):
        with pytest.raises(sockets.BindError, match=rf"addresses\.{link}={address} cannot be served") as caught:
            ReplayServer(RoleContext(config, context, "replay"), SPEC)
        assert str(caught.value).isprintable()
        context.term()  # waits for ever for a socket that was left open
    other.term()
    assert context.closed


def test_rate_limiter_that_would_deadlock_is_a_usage_error(config: Config) -> None:
    tight = config.replace(replay=replace(config.replay, samples_per_insert=8.0, error_buffer=0.001))
    with pytest.raises(
        UsageError, match=r"^replay\.error_buffer=0\.001: must be at least [\d.]+, .* raise it"
    ) as caught:
        make_limiter(tight, SPEC)
    assert str(caught.value).isprintable()
    least = float(str(caught.value).partition("at least ")[2].partition(",")[0])
    make_limiter(config.replace(replay=replace(tight.replay, error_buffer=least)), SPEC)
