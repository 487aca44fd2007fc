"""A network in memory with the interface of ZMQ that `apex_jax.transport` uses.

Messages on one connection arrive in order, each after a random latency. A connection that breaks loses what is on its
way; a new one has another identity at the server. A partition stalls what is on its way until it heals, or until both
ends give the connection up, each at its own time.
"""

from __future__ import annotations

import errno
import struct
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import zmq

from tests.simulation.clock import Clock

GIVE_UP_SECONDS = (10.0, 12.0)  # until an end closes a connection whose packets nobody acknowledges
RETRY_SECONDS = (0.1, 1.0)  # between two attempts to connect: first, last
DEFAULT_QUEUE = 1_000  # ZMQ's


class Full(zmq.Again):
    """Nothing to read, or no room; without the texts of ZMQ, whose making takes longer than a turn."""

    def __init__(self) -> None:
        self.errno = errno.EAGAIN


class Network:
    """The hosts' connections."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.listeners: dict[str, Router] = {}  # by address
        self.wires: dict[int, Wire] = {}
        self.blocked: dict[tuple[str, str], int] = {}  # (from host, to host), with the number of the partition
        self.slowness: dict[str, float] = {}  # factor of the latency, by host
        self.damaged_segments = 0  # how many of the next segments arrive with a wrong byte
        self.numbers = 0

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def latency(self, source: str, target: str) -> float:
        factor = max(self.slowness.get(source, 1.0), self.slowness.get(target, 1.0))
        return (0.0002 + self.clock.rng.expovariate(1_000)) * factor

    def block(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Stalls everything from the first to the second host of each pair."""
        number = self.number()
        self.blocked |= dict.fromkeys(pairs, number)
        for wire in list(self.wires.values()):
            for end in (0, 1):
                if wire.path(end) in pairs or wire.path(1 - end) in pairs:
                    act = partial(self._give_up, wire, end, number)
                    self.clock.after(self.clock.between(*GIVE_UP_SECONDS), act)

    def _give_up(self, wire: Wire, end: int, number: int) -> None:
        if number in (self.blocked.get(wire.path(0)), self.blocked.get(wire.path(1))):
            wire.lose(end)

    def heal(self, pairs: Sequence[tuple[str, str]] | None = None) -> None:
        """Ends partitions; None = all."""
        for pair in list(self.blocked) if pairs is None else pairs:
            self.blocked.pop(pair, None)
        for wire in list(self.wires.values()):
            for end in (0, 1):
                self.clock.after(self.clock.between(0.0, 1.0), partial(wire.pump, end))
            if wire.is_open != [True, True]:
                for end in (0, 1):
                    self.clock.after(self.clock.between(0.01, 1.0), partial(wire.lose, end))


class Lane:
    """One direction of a connection."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: deque[list[bytes]] = deque()  # on their way
        self.due = 0  # of these, how many have been on their way for long enough
        self.last_arrival = 0.0
        self.unread: deque[list[bytes]] = deque()


class Wire:
    """A connection; end 0 is the client's, end 1 the server's. `lanes[end]` leads to that end."""

    def __init__(self, network: Network, dealer: Dealer, router: Router) -> None:
        self.number = network.number()
        self.identity = struct.pack(">BI", 0, self.number)
        self.ends: tuple[Dealer, Router] = (dealer, router)
        self.is_open = [True, True]
        self.lanes = (Lane(router.queue(zmq.SNDHWM) + DEFAULT_QUEUE), Lane(DEFAULT_QUEUE + router.queue(zmq.RCVHWM)))
        self.network = network
        network.wires[self.number] = self

    def path(self, end: int) -> tuple[str, str]:
        """Hosts from and to which the messages to this end travel."""
        return self.ends[1 - end].host, self.ends[end].host

    def send(self, end: int, frames: Sequence[Any]) -> None:
        """Sends a message to this end. Raises `Full` if there is no room."""
        lane, clock = self.lanes[end], self.network.clock
        if not self.is_open[1 - end] or len(lane.queue) + len(lane.unread) >= lane.capacity:
            raise Full
        message = [bytes(frame) for frame in frames]
        if self.network.damaged_segments and end == 1 and len(message) == 2 and len(message[1]) > 100:
            self.network.damaged_segments -= 1
            message[1] = message[1][:-1] + bytes([message[1][-1] ^ 1])
        lane.queue.append(message)
        lane.last_arrival = max(lane.last_arrival, clock.now + self.network.latency(*self.path(end)))
        clock.trace("send", self.number, end, message[0].hex())
        clock.after(lane.last_arrival - clock.now, partial(self._arrive, end))

    def _arrive(self, end: int) -> None:
        self.lanes[end].due += 1
        self.pump(end)

    def pump(self, end: int) -> None:
        """Delivers the messages that have been on their way for long enough, unless they are stalled."""
        lane = self.lanes[end]
        while lane.due and lane.queue and self.path(end) not in self.network.blocked:
            lane.due -= 1
            message = lane.queue.popleft()
            if self.is_open[end]:
                lane.unread.append(message)
                self.ends[end].arrived(self)

    def lose(self, end: int) -> None:
        """Breaks the connection as this end sees it."""
        if self.is_open[end]:
            self._close(end)
            self.ends[end].lost(self)
            self._tell(1 - end)

    def close(self, end: int) -> None:
        """Closes the connection from this end; the other one notices it unless the host has lost its power."""
        process = self.ends[end].context.process
        if self.is_open[end]:
            self._close(end)
            if process.has_power:
                self._tell(1 - end, is_orderly=process.is_alive)
            else:
                self.lanes[1 - end].queue.clear()
                self.network.clock.after(self.network.clock.between(0.1, 11.0), partial(self.lose, 1 - end))

    def _close(self, end: int) -> None:
        self.is_open[end] = False
        self.lanes[end].queue.clear()
        self.network.clock.trace("close", self.number, end)
        if not any(self.is_open):
            self.network.wires.pop(self.number, None)

    def _tell(self, end: int, is_orderly: bool = False) -> None:
        """Closes this end, too: behind the messages on their way, or in place of them (a reset)."""
        clock = self.network.clock
        arrival = clock.now + self.network.latency(*self.path(end))
        if is_orderly or clock.rng.random() < 0.7:
            arrival = max(arrival, self.lanes[end].last_arrival)
        clock.after(arrival - clock.now, partial(self._lose_unless_blocked, end))
        clock.after(clock.between(*GIVE_UP_SECONDS), partial(self.lose, end))

    def _lose_unless_blocked(self, end: int) -> None:
        if self.path(end) not in self.network.blocked:
            self.lose(end)


class SimContext:
    """In place of a ZMQ context: makes the sockets of one process."""

    def __init__(self, network: Network, process: Any) -> None:
        self.network, self.process = network, process
        self.pairs: dict[str, Pair] = {}

    def socket(self, kind: int) -> Any:
        return {zmq.ROUTER: Router, zmq.DEALER: Dealer, zmq.PAIR: Pair}[zmq.SocketType(kind)](self)


class SimSocket:
    """What the three kinds of sockets share."""

    def __init__(self, context: SimContext) -> None:
        self.context = context
        self.network, self.clock = context.network, context.network.clock
        self.host: str = context.process.host
        self.closed = False
        self.task = self.clock.task  # woken by messages
        self._options: dict[int, int] = {}
        self._monitor = ""
        context.process.sockets.append(self)

    def set(self, option: int, value: int) -> None:
        self._options[option] = value

    def queue(self, option: int) -> int:
        return self._options.get(option, DEFAULT_QUEUE)

    def monitor(self, name: str, events: int) -> None:
        self._monitor = name

    def disable_monitor(self) -> None:
        self._monitor = ""

    def event(self, *events: int) -> None:
        if (pair := self.context.pairs.get(self._monitor)) is not None:
            pair.messages += [[struct.pack("=Hi", event, 0)] for event in events]
        self.wake()

    def wake(self) -> None:
        if self.task is not None:
            self.task.wake()

    def effect(self) -> None:
        self.context.process.effect()

    def close(self, linger: int | None = None) -> None:
        self.closed = True

    def __enter__(self) -> SimSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pair(SimSocket):
    """Receives the events of a monitored socket, or wakes the task of the bound end."""

    def __init__(self, context: SimContext) -> None:
        super().__init__(context)
        self.messages: list[list[bytes]] = []
        self._peer: Pair | None = None

    def bind(self, name: str) -> None:
        self.context.pairs[name] = self

    def connect(self, name: str) -> None:
        self._peer = self.context.pairs.get(name)
        self.context.pairs.setdefault(name, self)

    def send(self, data: bytes, flags: int) -> None:
        if self._peer is not None:
            self._peer.wake()

    def recv(self, flags: int) -> bytes:
        raise Full

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.messages:
            raise Full
        return self.messages.pop(0)


class Dealer(SimSocket):
    """A client's end, which connects again until it is closed."""

    def __init__(self, context: SimContext) -> None:
        super().__init__(context)
        self.wire: Wire | None = None
        self._address = ""
        self._attempt = 0  # a change makes pending attempts void
        self._inbox: deque[Wire] = deque()

    def connect(self, address: str) -> None:
        self._address = address
        self._attempt += 1
        self._try_after(0.0, RETRY_SECONDS[0])

    def disconnect(self, address: str) -> None:
        self._attempt += 1
        self._inbox.clear()
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close(0)

    def _try_after(self, seconds: float, pause: float) -> None:
        self.clock.after(seconds, partial(self._try, self._attempt, pause))

    def _try(self, attempt: int, pause: float) -> None:
        if attempt != self._attempt or self.closed or self.wire is not None:
            return
        router = self.network.listeners.get(self._address)
        reaches = router is not None and not (router.context.process.is_frozen or self.context.process.is_frozen)
        if router is None or not reaches or self.is_blocked(router.host):
            self.event(zmq.EVENT_CONNECT_RETRIED)
            self._try_after(pause, min(2 * pause, RETRY_SECONDS[1]))
            return
        self.wire = Wire(self.network, self, router)
        router.peers[self.wire.identity] = self.wire
        self.event(zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def is_blocked(self, host: str) -> bool:
        return not {(self.host, host), (host, self.host)}.isdisjoint(self.network.blocked)

    def send_multipart(self, frames: Sequence[Any], flags: int, copy: bool = True) -> None:
        self.effect()
        if self.wire is None:
            raise Full
        self.wire.send(1, frames)

    def recv_multipart(self, flags: int, copy: bool = True) -> list[bytes]:
        if not self._inbox:
            raise Full
        return self._inbox.popleft().lanes[0].unread.popleft()

    def arrived(self, wire: Wire) -> None:
        self._inbox.append(wire)
        self.wake()

    def lost(self, wire: Wire) -> None:
        if self.clock.rng.random() < 0.7:  # else ZMQ has already passed them on
            self._inbox.clear()
        self.wire = None
        self.event(zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED)
        self._try_after(RETRY_SECONDS[0], 2 * RETRY_SECONDS[0])

    def close(self, linger: int | None = None) -> None:
        super().close()
        if self.wire is not None:
            self.wire.close(0)


class Identity:
    """The first frame of a message at a router."""

    def __init__(self, identity: bytes) -> None:
        self.bytes = identity


class Router(SimSocket):
    """A server's end. Connections with messages take turns, those that broke included."""

    def __init__(self, context: SimContext) -> None:
        super().__init__(context)
        self.peers: dict[bytes, Wire] = {}
        self.turns: deque[Wire] = deque()
        self._address = ""

    def bind(self, address: str) -> None:
        if address in self.network.listeners:
            raise zmq.ZMQError(errno.EADDRINUSE)
        self._address = address
        self.network.listeners[address] = self

    def send_multipart(self, frames: Sequence[Any], flags: int, copy: bool = True) -> None:
        self.effect()
        identity, *message = frames
        if (wire := self.peers.get(identity)) is None:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        wire.send(0, message)

    def recv_multipart(self, flags: int, copy: bool = True) -> list[Any]:
        if not self.turns:
            raise Full
        wire = self.turns.popleft()
        unread = wire.lanes[1].unread
        message = unread.popleft()
        if unread:
            self.turns.append(wire)
        return [Identity(wire.identity), *message]

    def arrived(self, wire: Wire) -> None:
        if len(wire.lanes[1].unread) == 1:
            self.turns.append(wire)
        self.wake()

    def lost(self, wire: Wire) -> None:
        del self.peers[wire.identity]

    def close(self, linger: int | None = None) -> None:
        super().close()
        if self.network.listeners.get(self._address) is self:
            del self.network.listeners[self._address]
        for wire in list(self.peers.values()):
            wire.close(1)
