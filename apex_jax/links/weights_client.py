"""The actors' and the evaluator's side of the weights link: a thread that requests newer params from the learner."""

from __future__ import annotations

import threading
import zlib
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import zmq

from apex_jax.agent.algorithm import Params
from apex_jax.host.errors import RunError
from apex_jax.links.connection import Connection, LinkClient, LinkEnd, Patience
from apex_jax.segment_codec import FLOAT32
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    NO_RETURN,
    Goodbye,
    WeightsBody,
    WeightsHeartbeat,
    WeightsHello,
    WeightsOffer,
    WeightsRequest,
)
from apex_jax.transport.params_codec import architecture_of, decode_weights
from apex_jax.types import PEER_TIMEOUT_SECONDS

HEARTBEAT_SECONDS = 2.0  # twice the default: a learner has several hundred clients
SLOWEST_BYTES_PER_SECOND = 0.25e6  # of a line on which neither side takes the other for dead during a transfer
TRANSFER_SECONDS = 60.0  # beside that


def longest_transfer_seconds(body_bytes: int) -> float:
    """Returns how long the params may be on their way, in which no heartbeat arrives."""
    return TRANSFER_SECONDS + body_bytes / SLOWEST_BYTES_PER_SECOND


class Weights(NamedTuple):
    """Params and their metadata."""

    params: Params  # float32 leaves, on this process's device
    version: int
    learner_peer_id: int
    updates: int  # of the learner, when the params were published
    environment_steps: int  # of the whole run, when the params were published
    final: bool
    published_seconds: float  # on this process's time.monotonic()


class WeightsClient(LinkClient):
    """Provides the newest params on demand, already on the device; acting never blocks on a transfer.

    Requests a version only when the previous one has arrived, and then the newest, so that on a slow line the params
    are as old as one transfer. Accepts all versions of a restarted learner.
    """

    def __init__(self, end: LinkEnd, like_params: Params, compatibility_key: str):
        """Connects and starts the thread. `like_params`: a tree of the network's leaves.

        `compatibility_key`: see `Config.weights_compatibility_key`.
        """
        super().__init__(Connection("learner", end, Patience(PEER_TIMEOUT_SECONDS, heartbeat=HEARTBEAT_SECONDS)))
        self._like_params = like_params
        self._hello = WeightsHello(compatibility_key, architecture_of(like_params))
        self.best_return = NO_RETURN  # of an evaluator's evaluations; the learner receives it with each heartbeat
        self._body_bytes = sum(FLOAT32.itemsize * leaf.size for leaf in jax.tree.leaves(like_params))
        self._newest: Weights | None = None
        self._last: Weights | None = None  # others than these are requested
        self._error: RunError | None = None
        self._offer = WeightsOffer(0, 0, False)
        self._held = (0, 0)  # learner_peer_id and version received last, usable or not
        self._is_requested = False  # a version, which has not arrived
        self._changed = threading.Condition()  # of `_newest` and `_error`
        connect = partial(sockets.connect, "weights", end.context, end.address, max_message_bytes=self._body_bytes)
        self._start(connect, "weights client")

    @property
    def newest(self) -> Weights | None:
        """The newest params, None before the first. Raises RunError if the link has failed."""
        if self._error is not None:
            raise self._error
        return self._newest

    def fetch_after(self, last: Weights | None, timeout_seconds: float = 0.0) -> Weights | None:
        """Returns the newest params if they are not `last`, else requests newer ones.

        Waits for these at most `timeout_seconds`, and returns None if they have not arrived. The request remains until
        usable params arrive. The first params and the final ones are fetched in any case.
        """
        self._last = last
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._newest is not last, timeout_seconds)
        newest = self.newest
        return None if newest is last else newest

    def turn(self, now_seconds: float) -> None:
        """Handles the messages received, and requests the newest version if one is due."""
        self._connection.server_may_end = self._offer.final and self._holds_offered
        self._connection.turn(now_seconds, self._newest_hello, self._heartbeat)
        for message in self._connection.receive(now_seconds, (WeightsOffer, WeightsBody)):
            if isinstance(message, WeightsOffer):
                self._on_offer(message, now_seconds)
            else:
                self._on_body(message, now_seconds)
        if not self._is_requested and self._is_due() and self._connection.send(WeightsRequest()):
            self._expect(True)

    def _leave(self, socket: zmq.Socket) -> None:
        self._connection.send(Goodbye())

    def _fail(self, error: RunError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _newest_hello(self) -> WeightsHello:
        return self._hello._replace(run_identity=self._connection.run.name)

    def _heartbeat(self) -> WeightsHeartbeat:
        return WeightsHeartbeat(*self._held, best_return=self.best_return)

    def _on_offer(self, offer: WeightsOffer, now_seconds: float) -> None:
        if self._connection.state != "joined":  # a request on the previous connection will not be answered
            self._expect(False)
        self._connection.join(now_seconds, offer.run_identity)
        self._offer = offer

    def _expect(self, is_requested: bool) -> None:
        self._is_requested = is_requested
        self._connection.transfer_seconds = longest_transfer_seconds(self._body_bytes) if is_requested else 0.0

    def _is_due(self) -> bool:
        is_newer = self._offer.version > 0 and not self._holds_offered
        return is_newer and (self._offer.final or self._newest is None or self._newest is self._last)

    @property
    def _holds_offered(self) -> bool:
        return (self._offer.learner_peer_id, self._offer.version) == self._held

    def _on_body(self, message: WeightsBody, now_seconds: float) -> None:
        if len(message.body) != self._body_bytes:
            raise self._connection.broken(f"sent weights of {len(message.body)} bytes, not {self._body_bytes}")
        if not self._is_requested:
            return  # requested before the learner had forgotten this process
        self._expect(False)
        # The newest version, which may be newer than the one offered.
        self._offer = WeightsOffer(message.learner_peer_id, message.version, message.final)
        if self._holds_offered:
            return
        if zlib.crc32(message.body) != message.crc:
            self._refuse("bad_checksum")
            return  # the version is requested again
        self._held = (message.learner_peer_id, message.version)
        self._connection.send(self._heartbeat())  # the answer offers a newer version, if there is one
        # 2 ms for 3.3 million parameters, on this thread and without the GIL, so acting continues meanwhile.
        if not np.isfinite(np.frombuffer(message.body, FLOAT32)).all():
            self._refuse("not_finite")
            return
        params: Any = jax.device_put(decode_weights(message.body, self._like_params))
        newest = Weights(
            params,
            message.version,
            message.learner_peer_id,
            message.updates,
            message.environment_steps,
            message.final,
            now_seconds - message.age_seconds,
        )
        with self._changed:
            self._newest = newest
            self._changed.notify_all()

    def _refuse(self, reason: str) -> None:
        self._drop(reason, f"weights of {self.name} are refused: {reason}")
