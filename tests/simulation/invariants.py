"""What must hold. The oracle receives each event, keeps its own account of the fleet, and raises `Violation`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from apex_jax.links.connection import LinkClient
from apex_jax.links.sampling_client import SEGMENTS_WINDOW
from apex_jax.links.weights_client import Weights
from apex_jax.segment_codec import decode_frames
from apex_jax.transport.wire import WireError
from apex_jax.types import SegmentRecord
from tests.rigs.links import SPEC
from tests.rigs.validity import check_buffer
from tests.simulation.clock import Clock, Violation
from tests.simulation.segments import number_in, priority_of

QUIET_SECONDS = 3.0  # as in `apex_jax.links.experience_server`
DRAWS = 4  # that the learner asks for at once
NEVER = (  # reasons for which nothing may be dropped
    *("over_credit", "early_segment", "invalid_priority", "corrupt_segment"),
    *("another_config", "another_run", *WireError.REASONS),
)

CLIENTS_DROP = {"refused", "overflow"}  # reasons for which clients may count something as dropped


class Stored(NamedTuple):
    """A segment that a replay server has stored."""

    peer_id: int
    sequence: int
    number: int
    transitions: int


class ServerBooks:
    """What the replay server has stored, across its restarts."""

    def __init__(self) -> None:
        self.log: list[Stored] = []
        self.durable = 0  # segments of the log that also survive a loss of power
        self.newest: dict[int, int] = {}  # sequence number of the newest segment stored or refused, by peer id
        self.refused: dict[int, int] = {}  # the same of segments refused, which a killed server forgets
        self.inserted = self.sampled = 0
        self.drawn = 0  # transitions that were drawn and not sent yet
        self.numbers = np.zeros(0, np.int64)  # by slot of the ring
        self.needed = 0  # segments that must be there after the restart
        self.overwritten = 0  # the first ones, which may be gone even if the restart has a place for them in the ring
        self.had_errors = False  # a full disk has made room with files that are newer than the newest snapshot
        self.owners: dict[int, int] = {}  # peer id by actor number

    def cut(self, length: int) -> None:
        """Forgets the segments after the first `length`."""
        del self.log[length:]
        self.newest = {each.peer_id: each.sequence for each in self.log}
        self.inserted = sum(each.transitions for each in self.log)


class Oracle:
    """Compares what the fleet does with what it should do."""

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.clock: Clock = fleet.clock
        self.books = ServerBooks()
        self.updates = 0  # groups of batches that were learned from
        self._owners: list[int] = [0]  # peer id by number of the segment
        self._streams: dict[int, Any] = {}  # client of each actor there ever was, by peer id
        self._samples: dict[bytes, np.ndarray] = {}
        self._weights: dict[tuple[int, int], float] = {}  # value by learner and version
        self._learners: list[int] = []
        self._published = 0

    def check(self, holds: Any, what: str, *details: Any) -> None:
        if not holds:
            raise Violation(f"{what} {' '.join(map(str, details))}".strip())

    # Actors

    def new_segment(self, peer_id: int) -> int:
        self._owners.append(peer_id)
        return len(self._owners) - 1

    def on_actor(self, peer_id: int, stream: Any) -> None:
        self._streams[peer_id] = stream

    def acknowledged(self, peer_id: int) -> int:
        """Sequence number up to which an actor has deleted its segments."""
        return int(self._streams[peer_id]._outbox.acknowledged_sequence)

    # Replay servers

    def on_restored(self, process: Any) -> None:
        """Checks what a replay server has restored, and attaches the oracle to it."""
        server, books = process.server, self.books
        buffer, limiter = server.replay.buffer, server.replay.limiter
        run = buffer.segments_since(0, 10**9)
        numbers = [number_in(decode_frames(body, SPEC)) for body in run.bodies]
        length = buffer.inserted_segments
        self.check(books.needed <= length <= len(books.log), "segments are lost:", books.needed, length, len(books.log))
        live = books.log[max(0, length - buffer.capacity_segments) : length]
        gone = max(0, min(len(live) - len(numbers), books.overwritten - (length - len(live))))
        self.check(numbers == [each.number for each in live[gone:]], "other segments are restored", numbers, live)
        books.overwritten = length - len(numbers)
        books.cut(length)
        books.durable = min(books.durable, length)
        ledger = server.replay.ledger
        for peer_id, newest in books.newest.items():
            self.check(ledger.sequence(peer_id) >= newest, "the ledger has", ledger.sequence(peer_id), "not", newest)
            books.newest[peer_id] = ledger.sequence(peer_id)
        for what, count in (("ledger", ledger.stored), ("limiter", limiter.inserted)):
            is_right = count == books.inserted or (books.had_errors and count < books.inserted)
            self.check(is_right, "the", what, "has", count, "not", books.inserted)
        books.inserted = limiter.inserted
        books.sampled = limiter.sampled
        books.numbers = np.full(buffer.capacity_segments, -1, np.int64)
        books.numbers[run.ring_slots] = numbers
        self._attach(process)

    def _attach(self, process: Any) -> None:
        server = process.server
        replay, membership = server.replay, server.experience.membership
        replay.insert = partial(self._insert, process, replay.insert)
        replay.refuse = partial(self._refuse, process, replay.refuse)
        replay.sample = partial(self._sample, process, replay.sample)
        membership.choose = partial(self._choose, process, membership.choose)
        server.experience._join = partial(self._join, self.books, server.experience._join)
        socket = server.sampling_socket
        socket.send_multipart = partial(self._send, self.books, socket.send_multipart)

    def _limits(self, process: Any) -> tuple[float, int, float]:
        replay = process.config.replay
        least = replay.min_size_to_sample
        return replay.samples_per_insert, least, replay.error_buffer * least * replay.samples_per_insert

    def _insert(self, process: Any, insert: Any, segment: SegmentRecord, columns: Any, now: float) -> int:
        books, buffer = self.books, process.server.replay.buffer
        ratio, least, error = self._limits(process)
        is_filled = buffer.size_transitions >= least or buffer.is_full
        surplus = ratio * (books.inserted + segment.transitions - least) - books.sampled
        self.check(not ratio or not is_filled or surplus <= error, "the limiter lets in", surplus, error)
        number = number_in(decode_frames(segment.body, SPEC))
        peer_id, sequence, newest = segment.peer_id, segment.sequence, books.newest.get(segment.peer_id, 0)
        self.check(self._owners[number] == peer_id, "segment", number, "is not of actor", peer_id)
        self.check(sequence > newest, "segment", sequence, "of", peer_id, "is stored twice")
        is_next = sequence == newest + 1 or self.acknowledged(peer_id) >= sequence - 1
        self.check(is_next, "segment", sequence, "of", peer_id, "is stored after", newest)
        slot: int = insert(segment, columns, now)
        books.log.append(Stored(peer_id, sequence, number, segment.transitions))
        books.newest[peer_id] = sequence
        books.inserted += segment.transitions
        books.numbers[slot] = number
        self.clock.trace("store", process.name, number, slot)
        return slot

    def _refuse(self, process: Any, refuse: Any, segment: SegmentRecord, reason: str) -> None:
        books = self.books
        self.check(reason == "bad_checksum", "a sound segment is refused:", reason)
        books.newest[segment.peer_id] = books.refused[segment.peer_id] = segment.sequence
        refuse(segment, reason)

    def _sample(self, process: Any, sample: Any, number: int, batch_size: int, now: float) -> Any:
        books, buffer = self.books, process.server.replay.buffer
        size = number * batch_size
        ratio, least, error = self._limits(process)
        is_filled = buffer.size_transitions >= least or buffer.is_full
        surplus = ratio * (books.inserted - least) - books.sampled
        self.check(is_filled, "a draw from a replay that is not filled")
        self.check(not ratio or surplus - size >= -error, "the limiter lets out", surplus, size, error)
        books.drawn = size
        batches = sample(number, batch_size, now)
        slots = batches.indices // SPEC.slots
        leaves = buffer.tree.leaves[batches.indices]
        shares = leaves / buffer.tree.leaves.sum()
        self.check((abs(batches.probabilities - shares) <= 1e-6 * shares).all(), "stale probabilities")
        self.check((buffer.generations[slots] == batches.generations).all(), "stale generations")
        self._samples[_key(batches)] = books.numbers[slots]
        while len(self._samples) > 1_000:
            del self._samples[next(iter(self._samples))]
        return batches

    def _send(self, books: ServerBooks, send: Any, *message: Any, **options: Any) -> None:
        drawn, books.drawn = books.drawn, 0
        send(*message, **options)
        books.sampled += drawn  # only if it was sent

    def _choose(self, process: Any, choose: Any, hello: Any, highest_actor_number: int, now: float) -> Any:
        server = process.server
        membership = server.experience.membership
        is_known = membership.connection_of(hello.peer_id) is not None
        chosen: tuple[int, np.ndarray] = choose(hello, highest_actor_number, now)
        _, indices = chosen
        if not is_known and not hello.ladder_indices.size:
            seen = [actor for actor in server.experience.actors.values() if actor.seen_seconds >= now - QUIET_SECONDS]
            taken = {index for actor in seen for index in actor.ladder_indices.tolist()}
            free = set(range(process.config.ladder_size)) - taken
            is_shared = len(free) >= hello.num_environments and not set(indices.tolist()) <= free
            self.check(not is_shared, "ladder indices", indices, "are shared without need; free:", free)
        return chosen

    def _join(self, books: ServerBooks, join: Any, identity: bytes, hello: Any, welcome: Any, now: float) -> None:
        owner = books.owners.setdefault(welcome.actor_number, hello.peer_id)
        is_unique = owner == hello.peer_id or self.fleet.faults.is_lossy  # the record of the welcome may be lost
        self.check(is_unique, "actor_number", welcome.actor_number, "is that of", owner, "and", hello.peer_id)
        join(identity, hello, welcome, now)

    def after_turn(self, process: Any) -> None:
        """The cheap checks of a replay server."""
        server, books = process.server, self.books
        limiter, most = server.replay.limiter, process.config.actor.max_outstanding_segments
        self.check(limiter.sampled == books.sampled, "draws are not counted:", limiter.sampled, books.sampled)
        self.check(limiter.inserted == books.inserted, "insertions are not counted:", limiter.inserted, books.inserted)
        for actor in server.experience.actors.values():
            self.check(len(actor.waiting) <= most, "an actor has", len(actor.waiting), "pending segments")
        dropped = server.experience.dropped + server.sampling.dropped
        self.check(not any(dropped[reason] for reason in NEVER), "dropped", dict(dropped))
        if (learner := server.sampling.learner) is not None:
            self.check(learner.segments_credit <= SEGMENTS_WINDOW, "credit for", learner.segments_credit, "segments")
            self.check(learner.draws_credit <= DRAWS, "credit for", learner.draws_credit, "groups of batches")

    def written(self, process: Any) -> int:
        """How many segments of the log are in a file."""
        return len(self.books.log) - self._pending(process)

    def has_unwritten(self, process: Any) -> bool:
        """Whether the disk has refused records."""
        return len(process.server.replay.journal.log.pending) > 0

    def on_synced(self, process: Any, written: int) -> None:
        """The first so many segments survive a loss of power."""
        self.books.durable = written

    def _pending(self, process: Any) -> int:
        """Segments that are stored but not written."""
        return sum(pending.insertion_id > 0 for pending in process.server.replay.journal.log.pending)

    def on_death(self, process: Any) -> None:
        """Decides which segments must be there after the restart."""
        books = self.books
        acknowledged = [i for i, each in enumerate(books.log) if self.acknowledged(each.peer_id) >= each.sequence]
        books.needed = acknowledged[-1] + 1 if acknowledged else 0
        had_errors = process.server.replay.journal.log.errors > 0
        books.had_errors |= had_errors
        if not process.has_power:
            books.needed = min(books.needed, books.durable)
            if had_errors:  # a full disk makes room at once, before those are safe that took the places in the ring
                capacity = process.server.replay.buffer.capacity_segments
                books.overwritten = max(books.overwritten, len(books.log) - capacity)
        elif had_errors and self.fleet.faults.is_lossy:
            books.needed = min(books.needed, self.written(process))

    # The learner

    def on_batches(self, process: Any, drawn: Any, numbers: np.ndarray) -> None:
        """Checks that the learner's frame store was what the server was when it drew."""
        expected = self._samples.pop(_key(drawn), None)
        if expected is None:
            raise Violation("batches arrive that were not drawn, or twice")
        self.check(np.array_equal(numbers, expected), "batch of other segments:", numbers, "drawn:", expected)
        self.clock.trace("learn", process.updates, int(numbers.sum()))

    # Weights

    def new_weights(self) -> int:
        self._published += 1
        return self._published

    def on_published(self, process: Any, value: float) -> None:
        if process.peer_id not in self._learners:
            self._learners.append(process.peer_id)
        self._weights[process.peer_id, process.weights.version] = value

    def on_weights(self, process: Any, newer: Weights, last: Weights | None) -> None:
        value = self._weights.get((newer.learner_peer_id, newer.version))
        found = np.unique(np.asarray(newer.params["kernel"]))
        self.check(value is not None and found.tolist() == [value], process.name, "has weights", found, "not", value)
        if last is not None:
            before, after = self._learners.index(last.learner_peer_id), self._learners.index(newer.learner_peer_id)
            is_newer = after > before or (after == before and newer.version > last.version)
            self.check(is_newer, process.name, "goes back to weights", newer.version, "from", last.version)

    # From time to time

    def check_all(self) -> None:
        """The expensive checks of the whole fleet."""
        for process in self.fleet.replays():
            server, books = process.server, self.books
            check_buffer(server.replay.buffer)
            self._check_priorities(server.replay.buffer, books)
            stored = server.replay.ledger.stored
            self.check(stored == books.inserted, "the ledger has", stored, "of", books.inserted)
            self._check_acknowledged(books)
        for process in self.fleet.processes.values():
            for link in (getattr(process, name, None) for name in ("weights", "stream", "replay")):
                dropped = set(link.dropped) - CLIENTS_DROP if isinstance(link, LinkClient) else set()
                self.check(not dropped, process.name, "drops", dropped)

    def check_drained(self) -> None:
        """All actors have left: each transition is counted once."""
        for process in self.fleet.replays():
            produced = {peer_id: number for peer_id, _, number in process.server.replay.ledger.actors().tolist()}
            for peer_id, stream in self._newest_streams():
                counted = produced.get(peer_id, 0)
                self.check(counted == stream.produced, "the ledger has", counted, "of", stream.produced, "produced")

    def _newest_streams(self) -> list[tuple[int, Any]]:
        """The actors that left at the end of the run."""
        last = {id(getattr(process, "stream", None)) for process in self.fleet.processes.values()}
        return [(peer_id, stream) for peer_id, stream in self._streams.items() if id(stream) in last]

    def _check_acknowledged(self, books: ServerBooks) -> None:
        for peer_id in self._streams:
            newest = max(books.newest.get(peer_id, 0), books.refused.get(peer_id, 0))
            if (acknowledged := self.acknowledged(peer_id)) > newest:
                what = "segments up to", acknowledged, "are acknowledged, stored are", newest
                self.check(self.fleet.faults.is_lossy, *map(str, what))

    def _check_priorities(self, buffer: Any, books: ServerBooks) -> None:
        leaves = buffer.tree.leaves[: buffer.capacity_segments * SPEC.slots].reshape(-1, SPEC.slots)
        slots, frames = np.nonzero(leaves)
        found = leaves[slots, frames] ** (1 / self.fleet.config.replay.priority_exponent)
        wanted = priority_of(books.numbers[slots])
        wrong = (found < wanted - 1e-3) | (found > wanted + 0.8)
        self.check(not wrong.any(), "priorities of other segments:", found[wrong], wanted[wrong])


def _key(batches: Any) -> bytes:
    return b"".join(array.tobytes() for array in (batches.indices, batches.generations, batches.probabilities))
