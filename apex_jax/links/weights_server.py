"""The learner's side of the weights link: a thread that answers requests for the newest params."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import jax
import zmq

from apex_jax.agent.algorithm import Params
from apex_jax.links.placement import NOWHERE, Placement
from apex_jax.links.server import LinkServer
from apex_jax.links.weights_client import Weights
from apex_jax.run.identity import RunIdentity
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    NO_RETURN,
    WEIGHTS_PIECE_BYTES,
    Goodbye,
    Refusal,
    WeightsHeartbeat,
    WeightsHello,
    WeightsOffer,
    WeightsPiece,
    WeightsRequest,
)
from apex_jax.transport.monitor import ServerMonitor
from apex_jax.transport.params_codec import encode_weights

_log = logging.getLogger(__name__)

MAX_CLIENTS = 4_096
SETTLED_SECONDS = 30.0  # from the start, in which no actor is moved, since those of an earlier learner join again


class Encoded(NamedTuple):
    """A version as bytes."""

    weights: Weights  # without its params: they would take memory on the device
    crc: int
    body: bytes


@dataclass
class Client:
    """The server's record of a client."""

    seen_seconds: float
    environments: int = 0  # of an actor
    replay_index: int = NOWHERE  # replay server of an actor
    has_newest: bool = False
    encoded: Encoded | None = None  # the version that the client is fetching, until the client reports that it has it


class WeightsServer(LinkServer[Client]):
    """Answers requests for params, which are encoded at the first request and shared by all clients.

    Clients receive no unrequested messages except offers of new versions. Each client requests pieces at its own pace,
    so a slow client does not slow others, and its params are as old as its own transfer.
    """

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        peer_id: int,
        first_version: int,
        compatibility_key: str,
        architecture: str,
        run: RunIdentity | None = None,
        servers: int = 1,
    ):
        """Binds the address (BindError if that fails) and starts the thread.

        `compatibility_key`: see `Config.weights_compatibility_key`; `architecture`: of the network, see `params_codec`;
        `run`: None = no specific run, as in a benchmark; `servers`: replay servers, of which each actor is given one.
        """
        self.clients: dict[bytes, Client] = {}
        self.placement = Placement(servers)
        self._monitor = ServerMonitor()
        socket = sockets.serve_weights(context, address, self._monitor)
        super().__init__(("the learner", "this process"), socket, compatibility_key, run, self.clients, MAX_CLIENTS)
        self._wake = sockets.WakeUp(context)
        self._peer_id = peer_id
        self._architecture = architecture
        self.version = first_version
        self.best_return = NO_RETURN  # highest mean return of an evaluation that an evaluator has sent
        self._newest: Weights | None = None
        self._offered: Weights | None = None  # version last offered to the clients
        self._encoded: Encoded | None = None  # the newest version that was requested
        self._handlers = {
            WeightsHello: self._on_hello,
            WeightsHeartbeat: self._on_heartbeat,
            WeightsRequest: self._on_request,
            Goodbye: self._on_goodbye,
        }
        self._start_seconds = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights server")
        self._thread.start()

    def publish(self, params: Params, updates: int, environment_steps: int, final: bool = False) -> None:
        """Makes params available to the clients; returns at once.

        The server takes ownership of `params`: pass a copy that the learner's next update does not donate.
        """
        # Based on the time in ms, so that versions also increase after a restart from an older checkpoint.
        self.version = max(self.version + 1, int(time.time() * 1000))
        metadata = self.version, self._peer_id, updates, environment_steps, final, time.monotonic()
        self._newest = Weights(params, *metadata)
        self._wake.wake_up()

    @property
    def updates(self) -> int:
        """Number of updates of the newest params; -1 before the first are published."""
        return -1 if self._newest is None else self._newest.updates

    @property
    def is_drained(self) -> bool:
        """Returns whether every connected client, and each one about to reconnect, has received the newest params."""
        if time.monotonic() < self._start_seconds + 2e-3 * sockets.LONGEST_RECONNECT_MILLISECONDS:
            return False  # waiting clients may reconnect only this often
        return self._offered is self._newest and all(client.has_newest for client in list(self.clients.values()))

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._wake.wake_up()
        self._thread.join()
        self._wake.close()

    def turn(self, now_seconds: float) -> None:
        """Answers pending messages, and offers a newly published version."""
        self._monitor.count(self.dropped)
        self.read(now_seconds)
        self.evict_dead_peers(now_seconds)
        if self._offered is not self._newest:
            for client in self.clients.values():  # first, as `is_drained` is read meanwhile
                client.has_newest = False
            self._offered = self._newest
            for connection_id, client in self.clients.items():
                if client.encoded is None:  # otherwise its queue is needed for requested pieces
                    self._offer(connection_id)

    def _run(self) -> None:
        with self._socket, contextlib.closing(self._monitor):
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wake.socket, zmq.POLLIN)
            while not self._closing.is_set():
                poller.poll(1_000)
                self._wake.clear()
                self.turn(time.monotonic())

    def _on_hello(self, connection_id: bytes, message: WeightsHello, now_seconds: float) -> None:
        if connection_id not in self.clients:
            replay_index = self.placement.add(message.environments, message.replay_index)
            self.clients[connection_id] = Client(now_seconds, message.environments, replay_index)
        self._offer(connection_id)

    def _refusal(self, connection_id: bytes, hello: WeightsHello) -> Refusal | None:
        if (refusal := super()._refusal(connection_id, hello)) is not None:
            return refusal
        if hello.architecture != self._architecture:
            self.dropped["another_architecture"] += 1
            reason = "the network here is another one than the learner's: run the same release everywhere"
            return Refusal(reason=reason, final=True)
        if connection_id not in self.clients and len(self.clients) >= MAX_CLIENTS:
            self.dropped["too_many_clients"] += 1
            return Refusal(reason=f"the learner has the {MAX_CLIENTS} clients of weights it can have", final=False)
        return None

    def _on_heartbeat(self, connection_id: bytes, message: WeightsHeartbeat, now_seconds: float) -> None:
        held = (message.learner_peer_id, message.version)
        self.best_return = max(self.best_return, message.best_return)
        newest, client = self._offered, self.clients[connection_id]
        client.has_newest = newest is not None and held == (self._peer_id, newest.version)
        if client.encoded is not None and held == (self._peer_id, client.encoded.weights.version):
            client.encoded = None
        self._offer(connection_id)

    def _on_request(self, connection_id: bytes, message: WeightsRequest, now_seconds: float) -> None:
        client = self.clients[connection_id]
        encoded = client.encoded if message.version else self._newest_encoded()
        is_known = encoded is not None and message.version in (0, encoded.weights.version)
        start = message.offset
        if encoded is None or not is_known or start % WEIGHTS_PIECE_BYTES or start >= len(encoded.body):
            self._offer(connection_id)
            return
        client.encoded, weights = encoded, encoded.weights
        piece = WeightsPiece(
            learner_peer_id=self._peer_id,
            version=weights.version,
            updates=weights.updates,
            environment_steps=weights.environment_steps,
            final=weights.final,
            age_seconds=max(0.0, now_seconds - weights.published_seconds),  # negative if published during this turn
            crc=encoded.crc,
            body_bytes=len(encoded.body),
            offset=start,
            piece=encoded.body[start : start + WEIGHTS_PIECE_BYTES],
        )
        sockets.send(self._socket, piece, connection_id)  # dropped if the queue is full; the client requests it again

    def _on_goodbye(self, connection_id: bytes, message: Goodbye, now_seconds: float) -> None:
        self._evict(connection_id)

    def _evict(self, connection_id: bytes) -> None:
        client = self.clients.pop(connection_id)
        self.placement.remove(client.environments, client.replay_index)

    def _offer(self, connection_id: bytes) -> None:
        newest, run, client = self._offered, self.run_identity.name, self.clients[connection_id]
        version, final = (newest.version, newest.final) if newest is not None else (0, False)
        if client.environments:
            may_balance = time.monotonic() > self._start_seconds + SETTLED_SECONDS
            client.replay_index = self.placement.place(client.environments, client.replay_index, may_balance)
        index = 0 if client.replay_index == NOWHERE else client.replay_index
        offer = WeightsOffer(self._peer_id, version, final, run, index)
        sockets.send(self._socket, offer, connection_id)

    def _newest_encoded(self) -> Encoded | None:
        """Returns the newest version as bytes. An older one exists as long as a client fetches it."""
        newest, latest = self._newest, self._encoded
        if newest is None or (latest is not None and latest.weights.version == newest.version):
            return latest
        body = encode_weights(jax.device_get(newest.params))
        self._encoded = Encoded(newest._replace(params=None), zlib.crc32(body), body)
        return self._encoded
