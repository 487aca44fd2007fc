"""The sockets of the system as targets of the fuzzer: real ones over tcp, with their objects in this process."""

from __future__ import annotations

import time
import traceback
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import zmq

from apex_jax.config import AddressConfig, Config, ReplayConfig
from apex_jax.links.connection import LinkEnd
from apex_jax.links.weights_client import WeightsClient
from apex_jax.links.weights_server import WeightsServer
from apex_jax.segment_codec import encode_segment
from apex_jax.transport import sockets, wire
from apex_jax.transport.messages import (
    ActorHello,
    ActorStatus,
    Credit,
    EpisodeStatistics,
    Finish,
    Goodbye,
    LearnerHello,
    LearnerWelcome,
    PriorityUpdate,
    SegmentAck,
    WeightsHeartbeat,
    WeightsHello,
    WeightsRequest,
)
from apex_jax.transport.params_codec import architecture_of
from apex_jax.types import SegmentRecord
from apex_jax.workers.replay_server import ReplayServer
from apex_jax.workers.role import RoleContext
from tests.fuzz.messages import Frames, Fuzzer
from tests.rigs.links import CONFIG, SPEC, TRANSITIONS, free_address, segment_of
from tests.rigs.validity import check_buffer

GOOD_SECONDS = 30.0  # in which a good message must be served, whatever was sent before
HOUSEKEEPING_MESSAGES = 5_000  # between two checks of the dead and two lines of metrics
CUT_OFF = 8  # connections
LINGER_MS = 1000  # libzmq can abort when a socket without is closed in the middle of a message (libzmq#3442)
# Of a frame for which nobody cuts a connection off; only a learner takes longer ones.
LONGEST_BYTES = sockets.SMALL_MESSAGE_BYTES + sockets.ENCRYPTION_BYTES
GOOD_PEER_ID = 12345


class Strangers:
    """Three peers of a server, of which the first reads what the server sends and the others do not."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._context, self._address = context, address
        self._peers = [self._connect() for _ in range(3)]
        self._cut_off: list[zmq.Socket] = []  # peers of before

    def send(self, number: int, frames: Frames, serve: Any) -> None:
        """Sends a message as one peer. `serve`: runs the server."""
        peer = self._peers[number]
        while not peer.poll(0, zmq.POLLOUT):
            serve()
            while peer.poll(0):  # behind a full queue libzmq does not notice that the server has cut it off
                peer.recv_multipart()
        peer.send_multipart(frames, copy=True)
        if max(map(len, frames)) > LONGEST_BYTES:  # it is cut off for that, unread, and would lose what follows
            self._replace(number)

    def read_first(self) -> None:
        """Reads the messages to the first peer."""
        while self._peers[0].poll(0):
            self._peers[0].recv_multipart()

    def close(self) -> None:
        for peer in (*self._peers, *self._cut_off):
            peer.close(linger=LINGER_MS)

    def _replace(self, number: int) -> None:
        """Replaces a peer; it is closed much later, when all its messages have arrived."""
        self._cut_off.append(self._peers[number])
        self._peers[number] = self._connect()
        if len(self._cut_off) > CUT_OFF:
            self._cut_off.pop(0).close(linger=LINGER_MS)

    def _connect(self) -> zmq.Socket:
        peer = self._context.socket(zmq.DEALER)
        peer.connect(self._address)
        return peer


class ReplayTarget:
    """A replay server and peers on one link: a joined one that reads, a joined one that does not, and an unknown
    one."""

    def __init__(self, link: str, directory: Path, seed: int, marker: str) -> None:
        self.crashes: Counter[str] = Counter()
        self._link = link
        self._context = zmq.Context()
        config = fuzz_config(directory, samples_per_insert={"experience": 0.0, "sampling": 16.0}[link])
        self._address = getattr(config.addresses, link)
        kinds = {
            "experience": (ActorHello, SegmentRecord, SegmentRecord, EpisodeStatistics, ActorStatus, Goodbye),
            "sampling": (LearnerHello, Credit, PriorityUpdate, PriorityUpdate, Goodbye),
        }[link]
        self.fuzzer = Fuzzer([*kinds * 6, *wire.MESSAGES], seed, config.compatibility_key, marker)
        self.server = ReplayServer(RoleContext(config, self._context, "replay"), SPEC)
        self._now_seconds = 0.0
        self._sent = 0
        self._sequence = 0
        self._strangers = Strangers(self._context, self._address)
        self._good = self._connect()
        for number in range(1, 9):
            self._insert(number)

    def send(self, frames: Frames) -> None:
        if self._sent % 200 < 2:  # the first two are peers that are known, again and again
            frames = [bytes(frame) for frame in wire.encode(self._hello(self.fuzzer.peer_ids[self._sent % 200]))]
        if is_end_of_the_run(frames):
            return
        self._strangers.send(self._sent % 3, frames, self.serve)
        self._sent += 1
        if self._sent % 64 == 0:
            self.serve()
        if self._sent % 1_024 == 0:
            self._insert(self._sent)  # lets some batches be drawn
        if self._sent % HOUSEKEEPING_MESSAGES == 0:
            self._keep_house()

    def serve(self) -> None:
        """Runs one iteration of the server; an exception would end a real one."""
        self._now_seconds += 1e-3
        self._guarded(lambda: self.server.serve(self._now_seconds))
        self._strangers.read_first()

    def serve_good(self) -> None:
        self._sequence += 1
        if self._link == "experience":
            body = encode_segment(segment_of(1), SPEC)
            segment = SegmentRecord(GOOD_PEER_ID, self._sequence, self._sequence, 0, body, zlib.crc32(body))
            self._ask(self._hello(GOOD_PEER_ID), segment, answer=SegmentAck)
        else:
            self._serve_all()
            self._good.close()
            self._good = self._connect()
            self._ask(self._hello(GOOD_PEER_ID + self._sequence), answer=LearnerWelcome)
            self._ask(Goodbye())

    def _serve_all(self) -> None:
        """Serves until nothing has been refused for several turns."""
        turns, refused = 0, self.dropped().total()
        while turns < 20:
            time.sleep(1e-3)
            self.serve()
            turns, refused = turns + 1 if self.dropped().total() == refused else 0, self.dropped().total()

    def dropped(self) -> Counter[str]:
        return self.server.experience.dropped + self.server.sampling.dropped

    def close(self) -> None:
        self._strangers.close()
        self._good.close(linger=0)
        self.server.close()
        self._context.term()

    def _insert(self, number: int) -> None:
        segment = segment_of(number)
        self.server.replay.buffer.insert(encode_segment(segment, SPEC), segment.columns, self._now_seconds)
        self.server.replay.limiter.inserted += TRANSITIONS

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
            received = sockets.receive(self._good, wire.MESSAGES)
            if answer is None or isinstance(received, answer):
                return
            assert time.monotonic() < deadline, f"no {answer.__name__} for a good peer; crashes: {self.crashes}"

    def _keep_house(self) -> None:
        self._now_seconds += 1.0
        self._guarded(lambda: self.server.experience.evict_dead_peers(self._now_seconds))
        self._guarded(lambda: self.server.sampling.evict_dead_peers(self._now_seconds))
        self._guarded(self.server.describe)
        self._guarded(self.server.replay.ledger.totals)
        self._guarded(self.server.replay.metrics)
        self._guarded(self.server.experience.episodes.means.take)
        self._guarded(lambda: check_buffer(self.server.replay.buffer))
        self.server.sampling.finished = None

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            self.crashes[_end_of(error)] += 1

    def _hello(self, peer_id: int) -> Any:
        if self._link == "experience":
            return ActorHello(peer_id, CONFIG.compatibility_key, num_environments=4)
        return LearnerHello(peer_id, CONFIG.compatibility_key, 0, batches_at_once=1, batch_size=4)

    def _connect(self) -> zmq.Socket:
        return sockets.connect(self._link, self._context, self._address)


class WeightsTarget:
    """The learner's end of the weights link."""

    def __init__(self, seed: int, marker: str) -> None:
        self.crashes: Counter[str] = Counter()
        kinds = (WeightsHello, WeightsHeartbeat, WeightsRequest, WeightsRequest, Goodbye)
        self.fuzzer = Fuzzer([*kinds * 6, *wire.MESSAGES], seed, CONFIG.compatibility_key, marker)
        self._context = zmq.Context()
        self._address = free_address()
        self._params = {"kernel": jax.numpy.zeros((4, 2))}
        self._hello = WeightsHello(CONFIG.compatibility_key, architecture_of(self._params))
        architecture = self._hello.architecture
        self._server = WeightsServer(
            LinkEnd(self._context, self._address), 1, 0, CONFIG.compatibility_key, architecture
        )
        self._strangers = Strangers(self._context, self._address)
        self._sent = 0

    def send(self, frames: Frames) -> None:
        if self._sent % 200 < 2:
            frames = [bytes(frame) for frame in wire.encode(self._hello)]
        self._strangers.send(self._sent % 3, frames, lambda: time.sleep(1e-3))
        self._sent += 1
        if self._sent % 64 == 0:
            self._strangers.read_first()
        if self._sent % 500 == 0:
            self._server.publish(self._params, updates=1, environment_steps=1)

    def serve_good(self) -> None:
        client = WeightsClient(LinkEnd(self._context, self._address), self._params, CONFIG.compatibility_key)
        self._server.publish(self._params, updates=1, environment_steps=1)
        weights = client.fetch_after(None, GOOD_SECONDS)
        client.close()
        assert weights is not None, "no weights for a good client"

    def dropped(self) -> Counter[str]:
        return self._server.dropped

    def close(self) -> None:
        self._strangers.close()
        self._server.close()
        self._context.term()


def fuzz_config(directory: Path, samples_per_insert: float = 0.0) -> Config:
    """A small replay on free ports; with 0 samples per insert anybody may fill it and draw from it at any speed."""
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


Target: TypeAlias = ReplayTarget | WeightsTarget


def make_target(link: str, directory: Path, seed: int, marker: str) -> Target:
    """Makes the server of a link."""
    return WeightsTarget(seed, marker) if link == "weights" else ReplayTarget(link, directory, seed, marker)


def is_end_of_the_run(frames: Frames) -> bool:
    """Returns whether a message of a false learner would end the run."""
    try:
        return isinstance(wire.decode(frames), Finish)
    except wire.WireError:
        return False


def _end_of(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno} {frame.name}: {error}"[:200]
