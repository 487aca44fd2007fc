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
from apex_jax.links.connection import LinkEnd
from apex_jax.links.server import LinkServer
from apex_jax.links.weights_client import Weights, longest_transfer_seconds
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    NO_RETURN,
    Goodbye,
    Refusal,
    WeightsBody,
    WeightsHeartbeat,
    WeightsHello,
    WeightsOffer,
    WeightsRequest,
)
from apex_jax.transport.params_codec import encode_weights
from apex_jax.transport.sockets import ServerMonitor

_log = logging.getLogger(__name__)

MAX_CLIENTS = 4_096


class Encoded(NamedTuple):
    """A version as bytes."""

    weights: Weights  # without its params: they would take memory on the device
    crc: int
    body: bytes


@dataclass
class Client:
    """The server's record of a client."""

    seen_seconds: float
    has_newest: bool = False
    is_waiting: bool = False  # for the version that it has requested
    sent: Encoded | None = None  # the version that is on its way, until the client reports that it has it


class WeightsServer(LinkServer[Client]):
    """Answers requests for params, which are encoded at the first request and shared by all clients.

    Clients receive no unrequested messages except offers of new versions. Each client requests a version at its own
    pace, so a slow client does not slow others, and its params are as old as its own transfer.
    """

    def __init__(self, end: LinkEnd, peer_id: int, first_version: int, compatibility_key: str, architecture: str):
        """Binds the address (BindError if that fails) and starts the thread.

        `compatibility_key`: see `Config.weights_compatibility_key`; `architecture`: of the network, see `params_codec`.
        """
        self.clients: dict[bytes, Client] = {}
        self._monitor = ServerMonitor()
        socket = sockets.serve("weights", end.context, end.address, self._monitor)
        names = "the learner", "this process"
        super().__init__(names, socket, compatibility_key, end.run, self.clients, MAX_CLIENTS)
        self._wake = sockets.WakeUp(end.context)
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
                if client.sent is None:  # otherwise it asks for a newer one afterwards
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
            self.clients[connection_id] = Client(now_seconds)
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
        if client.sent is not None and held == (self._peer_id, client.sent.weights.version):
            client.sent = None
        self._offer(connection_id)
        self._send_if_requested(connection_id, now_seconds)

    def _on_request(self, connection_id: bytes, message: WeightsRequest, now_seconds: float) -> None:
        self.clients[connection_id].is_waiting = True
        self._send_if_requested(connection_id, now_seconds)

    def _send_if_requested(self, connection_id: bytes, now_seconds: float) -> None:
        """Sends the newest version to a client that waits for one; its next heartbeat tries again if that fails."""
        client = self.clients[connection_id]
        if not client.is_waiting or (encoded := self._newest_encoded()) is None:
            return
        weights = encoded.weights
        message = WeightsBody(
            learner_peer_id=self._peer_id,
            version=weights.version,
            updates=weights.updates,
            environment_steps=weights.environment_steps,
            final=weights.final,
            age_seconds=max(0.0, now_seconds - weights.published_seconds),  # negative if published during this turn
            crc=encoded.crc,
            body=encoded.body,
        )
        if sockets.send(self._socket, message, connection_id):
            client.is_waiting, client.sent = False, encoded

    def _on_goodbye(self, connection_id: bytes, message: Goodbye, now_seconds: float) -> None:
        self._evict(connection_id)

    def _evict(self, connection_id: bytes) -> None:
        del self.clients[connection_id]

    def _transfer_seconds(self, peer: Client) -> float:
        return longest_transfer_seconds(len(peer.sent.body)) if peer.sent is not None else 0.0

    def _offer(self, connection_id: bytes) -> None:
        newest, run = self._offered, self.run_identity.name
        version, final = (newest.version, newest.final) if newest is not None else (0, False)
        sockets.send(self._socket, WeightsOffer(self._peer_id, version, final, run), connection_id)

    def _newest_encoded(self) -> Encoded | None:
        """Returns the newest version as bytes."""
        newest, latest = self._newest, self._encoded
        if newest is None or (latest is not None and latest.weights.version == newest.version):
            return latest
        body = encode_weights(jax.device_get(newest.params))
        self._encoded = Encoded(newest._replace(params=None), zlib.crc32(body), body)
        return self._encoded
