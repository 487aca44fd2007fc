"""The sockets of the system as the fuzzer meets them: real ones over tcp, the objects behind them in this process."""

from __future__ import annotations

import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import zmq

from apex_jax.config import AddressConfig, Config, ReplayConfig
from apex_jax.links.weights import UNUSABLE_IN_A_ROW, WeightsPublisher, WeightsSubscriber
from apex_jax.segment_codec import encode_segment
from apex_jax.transport import sockets, wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    Credit,
    EpisodeStatistics,
    Finish,
    Goodbye,
    LearnerAlive,
    LearnerHello,
    LearnerWelcome,
    PriorityUpdate,
    SegmentAck,
    SegmentMessage,
    WeightsMessage,
)
from apex_jax.workers.replay_server import ReplayServer
from tests.fuzz_clients import TOO_LARGE_SHARE, ActorTarget, LearnerTarget, StatusTarget
from tests.fuzz_messages import BELONG, Frames, Fuzzer, refusal_of
from tests.links import CONFIG, SPEC, TRANSITIONS, free_address, segment_of

GOOD_SECONDS = 30.0  # in which a good message must be served, whatever was sent before
HOUSEKEEPING_MESSAGES = 5_000  # between two checks of the dead and two lines of metrics
CUT_OFF = 8  # connections
# Of a frame for which nobody cuts a connection off; only a learner takes longer ones.
LONGEST_BYTES = sockets.SMALL_MESSAGE_BYTES + sockets.ENCRYPTION_BYTES
GOOD_RUN_ID = 12345


class Target(Protocol):
    """A socket to fuzz."""

    fuzzer: Any  # whose `next` returns the frames of a message
    crashes: Counter[str]  # what the object behind the socket raised, by the end of its traceback
    refusable: Counter[str]  # messages sent that are none, or do not belong on this socket, by reason

    def send(self, frames: Frames) -> None:
        """Sends a message as one of several peers."""

    def serve_good(self) -> None:
        """Lets a good peer be served; AssertionError if it is not."""

    def dropped(self) -> Counter[str]:
        """What the system says that it refused."""

    def close(self) -> None:
        """Ends everything."""


class ReplayTarget:
    """A replay server and, on one of its links, peers that are known to it and read, known and do not, and unknown."""

    def __init__(self, link: str, directory: Path, seed: int, marker: str) -> None:
        self.crashes: Counter[str] = Counter()
        self.refusable: Counter[str] = Counter()
        self._link = link
        self._context = zmq.Context()
        config = fuzz_config(directory, samples_per_insert={"experience": 0.0, "sampling": 16.0}[link])
        self._address = getattr(config.addresses, link)
        kinds = {
            "experience": (ActorHello, SegmentMessage, SegmentMessage, EpisodeStatistics, ActorStatus, Goodbye),
            "sampling": (LearnerHello, Credit, PriorityUpdate, PriorityUpdate, Goodbye),
        }[link]
        self.fuzzer = Fuzzer([*kinds * 6, *wire.MESSAGES], seed, config.agreement, marker)
        self.server = ReplayServer(config, SPEC, self._context)
        self._now_seconds = 0.0
        self._sent = 0
        self._sequence = 0
        self._strangers = [self._stranger() for _ in range(3)]
        self._cut_off: list[zmq.Socket] = []  # strangers of before
        self._good = self._connect()
        for number in range(1, 9):
            self._insert(number)

    def send(self, frames: Frames) -> None:
        stranger = self._strangers[self._sent % 3]
        if self._sent % 200 < 2:  # the first two are peers that are known, again and again
            frames = [bytes(frame) for frame in wire.encode(self._hello(self.fuzzer.run_ids[self._sent % 200]))]
        if is_end_of_the_run(frames):
            return
        while not stranger.poll(0, zmq.POLLOUT):
            self.serve()
            while stranger.poll(0):  # behind a full queue libzmq does not notice that the server has cut it off
                stranger.recv_multipart()
        stranger.send_multipart(frames, copy=True)
        if max(map(len, frames)) > LONGEST_BYTES:  # it is cut off for that, unread, and would lose what follows
            self._replace(self._sent % 3)
        elif reason := refusal_of(frames, BELONG[self._link]):
            self.refusable[reason] += 1
        self._sent += 1
        if self._sent % 64 == 0:
            self.serve()
        if self._sent % 1_024 == 0:
            self._insert(self._sent)  # lets some batches be drawn
        if self._sent % HOUSEKEEPING_MESSAGES == 0:
            self._keep_house()

    def serve(self) -> None:
        """Does one turn of the server; what it raises would end a real one."""
        self._now_seconds += 1e-3
        self._guarded(lambda: self.server.serve(self._now_seconds))
        while self._strangers[0].poll(0):
            self._strangers[0].recv_multipart()

    def serve_good(self) -> None:
        self._sequence += 1
        if self._link == "experience":
            body = encode_segment(segment_of(1), SPEC)
            segment = SegmentMessage(
                run_id=GOOD_RUN_ID, sequence=self._sequence, environment_steps=1, crc=zlib.crc32(body), body=body
            )
            self._ask(self._hello(GOOD_RUN_ID), segment, answer=SegmentAck)
        else:
            while self.server._sampling_socket.poll(5):
                self.serve()
            self._good.close()
            self._good = self._connect()
            self._ask(self._hello(GOOD_RUN_ID + self._sequence), answer=LearnerWelcome)
            self._ask(Goodbye(GOOD_RUN_ID + self._sequence))

    def dropped(self) -> Counter[str]:
        return self.server.experience.dropped + self.server.sampling.dropped

    def close(self) -> None:
        for peer in (*self._strangers, *self._cut_off, self._good):
            peer.close(linger=0)
        self.server.close()
        self._context.term()

    def _insert(self, number: int) -> None:
        segment = segment_of(number)
        self.server.replay.buffer.insert(encode_segment(segment, SPEC), segment.columns, self._now_seconds)
        self.server.replay.limiter.insert(TRANSITIONS)

    def _ask(self, *messages: Any, answer: type | None = None) -> None:
        """Sends messages until one of them is answered."""
        deadline, next_try = time.monotonic() + GOOD_SECONDS, 0.0
        while True:
            if time.monotonic() >= next_try:
                if self._link == "sampling":  # a false learner has the place until it is silent for long
                    self._now_seconds += 60.0
                    self._keep_house()
                for message in messages:
                    sockets.send(self._good, message)
                next_try = time.monotonic() + 1.0
            self.serve()
            received = sockets.receive(self._good, wire.MESSAGES, Counter())
            if answer is None or isinstance(received, answer):
                return
            assert time.monotonic() < deadline, f"no {answer.__name__} for a good peer; crashes: {self.crashes}"

    def _keep_house(self) -> None:
        self._now_seconds += 1.0
        self._guarded(lambda: self.server.experience.forget_the_dead(self._now_seconds))
        self._guarded(lambda: self.server.sampling.forget_the_dead(self._now_seconds))
        self._guarded(self.server._write_metrics)
        self._guarded(self.server.replay.buffer.check_valid)
        self.server.sampling.finished = None

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            self.crashes[_end_of(error)] += 1

    def _hello(self, run_id: int) -> Any:
        if self._link == "experience":
            return ActorHello(run_id, CONFIG.agreement, num_environments=4)
        return LearnerHello(run_id, CONFIG.agreement, 0, batches_at_once=1, batch_size=4)

    def _stranger(self) -> zmq.Socket:
        """A peer that need not read."""
        stranger = self._context.socket(zmq.DEALER)
        stranger.connect(self._address)
        return stranger

    def _replace(self, number: int) -> None:
        """Has a stranger give way to another; closed much later, when all that it sent has long arrived."""
        self._cut_off.append(self._strangers[number])
        self._strangers[number] = self._stranger()
        if len(self._cut_off) > CUT_OFF:
            self._cut_off.pop(0).close(linger=0)

    def _connect(self) -> zmq.Socket:
        connect = sockets.connect_experience if self._link == "experience" else sockets.connect_sampling
        return connect(self._context, self._address)


class PublisherTarget:
    """The learner's end of the weights link, which false subscribers send what they like."""

    def __init__(self, directory: Path, seed: int, marker: str) -> None:
        self.crashes: Counter[str] = Counter()
        self.refusable: Counter[str] = Counter()  # see `dropped`
        self.fuzzer = Fuzzer(wire.MESSAGES, seed, CONFIG.agreement, marker)
        self._context = zmq.Context()
        self._address = free_address()
        self._publisher = WeightsPublisher(self._context, self._address, 1, 0, CONFIG.agreement)
        self._params = {"kernel": jax.numpy.zeros((4, 2))}
        self._publisher.publish(self._params, updates=1, environment_steps=1)
        self._falses = [self._context.socket(zmq.XSUB) for _ in range(3)]
        for false in self._falses:
            false.connect(self._address)
        self._sent = 0

    def send(self, frames: Frames) -> None:
        false = self._falses[self._sent % 3]
        if self.fuzzer.random.random() < 0.3:  # a subscription, or its end, or something alike
            frames = [bytes([self.fuzzer.random.randrange(3)]) + frames[0][: self.fuzzer.random.randrange(3)]]
        # ZMQ takes every frame that begins so for a subscription, and keeps it: see docs/faults.md.
        frames = [frame[:4] if frame[:1] == b"\1" else frame for frame in frames]
        while not false.poll(10, zmq.POLLOUT):
            pass
        false.send_multipart(frames)
        self._sent += 1
        if self._sent % 1_000 == 0:
            while self._falses[0].poll(0):
                self._falses[0].recv_multipart()

    def serve_good(self) -> None:
        subscriber = WeightsSubscriber(self._context, self._address, self._params, CONFIG.agreement)
        self._publisher.publish(self._params, updates=1, environment_steps=1)
        weights = subscriber.wait(GOOD_SECONDS)
        subscriber.close()
        assert weights is not None, "no weights for a good subscriber"

    def dropped(self) -> Counter[str]:
        return Counter()  # what comes up is no message: there is nothing to refuse

    def close(self) -> None:
        for false in self._falses:
            false.close(linger=0)
        self._publisher.close()
        self._context.term()


class SubscriberTarget:
    """A subscriber of weights, and in place of the learner somebody who sends what they like."""

    def __init__(self, directory: Path, seed: int, marker: str) -> None:
        self.crashes: Counter[str] = Counter()
        self.refusable: Counter[str] = Counter()
        self.fuzzer = Fuzzer([WeightsMessage] * 8 + list(wire.MESSAGES), seed, CONFIG.agreement, marker)
        self._context = zmq.Context()
        self._params = {"kernel": np.zeros((4, 2), np.float32)}
        self._false = self._context.socket(zmq.XPUB)
        self._false.set(zmq.XPUB_NODROP, 1)
        self._false.set(zmq.SNDHWM, 64)
        port = self._false.bind_to_random_port("tcp://127.0.0.1")
        self._subscriber = WeightsSubscriber(self._context, f"tcp://127.0.0.1:{port}", self._params, CONFIG.agreement)
        assert self._false.poll(10_000), "nobody subscribes"
        self._version = 2**62
        self._foreign = 0  # messages of another release in a row
        self._is_heard = False

    def send(self, frames: Frames) -> None:
        if max(map(len, frames)) > sockets.SMALL_MESSAGE_BYTES and self.fuzzer.random.random() > TOO_LARGE_SHARE:
            return
        if _version_of(frames) >= 2**62:  # the newest wins: what is newer than all good ones is believed
            return
        if self._ends_by_right(frames):
            return
        self._wait_until_heard()
        while not self._has_sent(frames):
            threading.Event().wait(0.0002)
        self._is_heard = max(map(len, frames)) <= LONGEST_BYTES  # else it cuts itself off, and comes back
        if reason := refusal_of(frames, (WeightsMessage, LearnerAlive)):
            self.refusable[reason] += 1

    def serve_good(self) -> None:
        from apex_jax.transport.params_codec import encode_weights

        self._version += 1
        architecture, body = encode_weights(self._params)
        good = WeightsMessage(1, self._version, 1, 1, False, CONFIG.agreement, architecture, zlib.crc32(body), body)
        deadline = time.monotonic() + GOOD_SECONDS
        while (newest := self._subscriber.newest) is None or newest.version != self._version:
            self._has_sent(wire.encode(good))
            threading.Event().wait(0.01)
            assert self._subscriber._thread.is_alive(), "the subscriber's thread died"
            assert time.monotonic() < deadline, "good weights do not arrive"

    def _ends_by_right(self, frames: Frames) -> bool:
        """Tells whether so many messages of another release in a row would end the subscriber."""
        is_foreign = refusal_of(frames, wire.MESSAGES) == "wrong_version"
        if is_foreign and self._foreign == UNUSABLE_IN_A_ROW - 1:
            return True
        if is_foreign:
            self._foreign += 1
        elif max(map(len, frames)) <= LONGEST_BYTES:  # else it does not hear that
            self._foreign = 0
        return False

    def _has_sent(self, frames: Any) -> bool:
        try:
            self._false.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _wait_until_heard(self) -> None:
        """Waits while the subscriber, who was cut off, comes back: ZMQ drops what is sent to nobody."""
        deadline = time.monotonic() + GOOD_SECONDS
        while self._false.poll(0) or not self._is_heard:
            if self._false.poll(10):
                self._is_heard = self._false.recv() == b"\1"
            assert time.monotonic() < deadline, "the subscriber does not come back"

    def dropped(self) -> Counter[str]:
        return self._subscriber.dropped

    def close(self) -> None:
        self._subscriber.close()
        self._false.close(linger=0)
        self._context.term()


def fuzz_config(directory: Path, samples_per_insert: float = 0.0) -> Config:
    """A small replay, on free ports; 0 samples per insert: anybody may fill it and draw from it at any speed."""
    return CONFIG.replace(
        run_directory=str(directory),
        replay=replace(
            ReplayConfig(),
            capacity_transitions=64 * TRANSITIONS,
            min_size_to_sample=1,
            samples_per_insert=samples_per_insert,
            error_buffer=1000.0,
        ),
        addresses=AddressConfig(free_address(), free_address(), free_address()),
    )


def make_targets(link: str, directory: Path, seed: int, marker: str) -> Iterator[Target]:
    """Makes the ends of a link that an adversary can send to, each only when it is asked for."""
    if link == "weights":
        yield PublisherTarget(directory, seed, marker)
        yield SubscriberTarget(directory, seed + 1, marker)
    elif link == "status":
        yield StatusTarget(directory, seed)
    else:
        yield ReplayTarget(link, directory, seed, marker)
        yield (LearnerTarget if link == "sampling" else ActorTarget)(seed + 1, marker)


def is_end_of_the_run(frames: Frames) -> bool:
    """Tells whether a false learner would end the run, as a true one may."""
    try:
        return isinstance(wire.decode(frames), Finish)
    except wire.WireError:
        return False


def _version_of(frames: Frames) -> int:
    try:
        message = wire.decode(frames, (WeightsMessage,))
    except wire.WireError:
        return 0
    assert isinstance(message, WeightsMessage)
    return message.version


def _end_of(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno} {frame.name}: {error}"[:200]
