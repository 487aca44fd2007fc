"""The actors' and the evaluator's side of the weights link: a thread that requests newer params from the learner."""

from __future__ import annotations

import logging
import threading
import zlib
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import zmq

from apex_jax.agent.algorithm import Params
from apex_jax.host.errors import RunError
from apex_jax.links.client import LinkClient
from apex_jax.links.connection import Connection, Patience
from apex_jax.links.placement import NOWHERE
from apex_jax.run.identity import RunIdentity
from apex_jax.segment_codec import FLOAT32
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    NO_RETURN,
    WEIGHTS_PIECE_BYTES,
    Goodbye,
    WeightsHeartbeat,
    WeightsHello,
    WeightsOffer,
    WeightsPiece,
    WeightsRequest,
)
from apex_jax.transport.params_codec import architecture_of, decode_weights
from apex_jax.types import PEER_TIMEOUT_SECONDS

_log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0  # twice the default: a learner has several hundred clients
STALLED_SECONDS = 10.0  # without a requested piece, after which the transfer restarts


class Weights(NamedTuple):
    """Params and their metadata."""

    params: Params  # float32 leaves, on this process's device
    version: int
    learner_peer_id: int
    updates: int  # of the learner, when the params were published
    environment_steps: int  # of the whole run, when the params were published
    final: bool
    published_seconds: float  # on this process's time.monotonic()


class _Transfer:
    """The pieces of one version, received in order."""

    def __init__(self, first: WeightsPiece) -> None:
        self.first = first
        self.body = bytearray(first.body_bytes)
        self.received = 0  # bytes
        self.requested = WEIGHTS_PIECE_BYTES  # bytes

    def is_of(self, piece: WeightsPiece) -> bool:
        first = self.first
        return (piece.learner_peer_id, piece.version) == (first.learner_peer_id, first.version)


class WeightsClient(LinkClient):
    """Provides the newest params on demand, already on the device; acting never blocks on a transfer.

    Requests at most WEIGHTS_PIECES_AT_ONCE pieces ahead, and a new version only when the previous one is complete, so
    that on a slow line the params are as old as one transfer. Accepts all versions of a restarted learner.
    """

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        like_params: Params,
        compatibility_key: str,
        away_limit_seconds: float = 0.0,
        run: RunIdentity | None = None,
        environments: int = 0,
    ):
        """Connects and starts the thread. `like_params`: a tree of the network's leaves.

        `compatibility_key`: see `Config.weights_compatibility_key`.
        `away_limit_seconds`: how long the learner may be unreachable before a RunError is raised; 0 = forever.
        `run`: the run of this process, which adopts that of the first offer if it has none yet; None = any.
        `environments`: number of an actor's environments, 0 = this is no actor.
        """
        patience = Patience(PEER_TIMEOUT_SECONDS, away_limit_seconds, heartbeat=HEARTBEAT_SECONDS)
        super().__init__(Connection("learner", address, run, patience))
        self._like_params = like_params
        self._hello = WeightsHello(compatibility_key, architecture_of(like_params), environments=environments)
        self.best_return = NO_RETURN  # of an evaluator's evaluations; the learner receives it with each heartbeat
        self.replay_index: int | None = None  # of the server to which this actor should belong; None = no offer yet
        self._body_bytes = sum(FLOAT32.itemsize * leaf.size for leaf in jax.tree.leaves(like_params))
        self._newest: Weights | None = None
        self._last: Weights | None = None  # others than these are requested
        self._error: RunError | None = None
        self._offer = WeightsOffer(0, 0, False)
        self._held = (0, 0)  # learner_peer_id and version received last, usable or not
        self._transfer: _Transfer | None = None
        self._asked_seconds: float | None = None  # when a piece was last requested or received; None = no request
        self._changed = threading.Condition()  # of `_newest` and `_error`
        self._start(partial(sockets.connect_weights, context, address), "weights client")

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
        """Handles the messages received, and requests missing pieces."""
        self._connection.server_may_end = self._offer.final and self._holds_offered
        self._connection.turn(now_seconds, self._newest_hello, self._heartbeat)
        for message in self._connection.receive(now_seconds, (WeightsOffer, WeightsPiece)):
            if isinstance(message, WeightsOffer):
                self._on_offer(message, now_seconds)
            else:
                self._on_piece(message, now_seconds)
        self._ask(now_seconds)

    def _leave(self, socket: zmq.Socket) -> None:
        self._connection.send(Goodbye())

    def _fail(self, error: RunError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _newest_hello(self) -> WeightsHello:
        replay_index = NOWHERE if self.replay_index is None else self.replay_index
        return self._hello._replace(run_identity=self._connection.run.name, replay_index=replay_index)

    def _heartbeat(self) -> WeightsHeartbeat:
        return WeightsHeartbeat(*self._held, best_return=self.best_return)

    def _on_offer(self, offer: WeightsOffer, now_seconds: float) -> None:
        if self._connection.state != "joined":  # requests on the previous connection will not be answered
            self._transfer = self._asked_seconds = None
        self._connection.join(now_seconds, offer.run_identity)
        self._offer = offer
        self.replay_index = offer.replay_index

    def _ask(self, now_seconds: float) -> None:
        """Requests the newest version if due, or the missing pieces of a version; restarts a stalled transfer."""
        if self._asked_seconds is not None and now_seconds - self._asked_seconds > STALLED_SECONDS:
            self._transfer = self._asked_seconds = None  # the learner may no longer have that version
        transfer = self._transfer
        if transfer is None:
            if self._asked_seconds is None and self._is_due() and self._connection.send(WeightsRequest(0, 0)):
                self._asked_seconds = now_seconds
            return
        ahead = transfer.received + sockets.WEIGHTS_PIECES_AT_ONCE * WEIGHTS_PIECE_BYTES
        while transfer.requested < min(ahead, len(transfer.body)):
            if not self._connection.send(WeightsRequest(transfer.first.version, transfer.requested)):
                return
            transfer.requested += WEIGHTS_PIECE_BYTES
            self._asked_seconds = now_seconds

    def _is_due(self) -> bool:
        is_newer = self._offer.version > 0 and not self._holds_offered
        return is_newer and (self._offer.final or self._newest is None or self._newest is self._last)

    @property
    def _holds_offered(self) -> bool:
        return (self._offer.learner_peer_id, self._offer.version) == self._held

    def _on_piece(self, piece: WeightsPiece, now_seconds: float) -> None:
        if piece.body_bytes != self._body_bytes:
            raise self._connection.broken(f"sent weights of {piece.body_bytes} bytes, not {self._body_bytes}")
        if self._transfer is None and piece.offset == 0:
            # The newest version, which may be newer than the one offered.
            self._offer = WeightsOffer(piece.learner_peer_id, piece.version, piece.final)
            if (piece.learner_peer_id, piece.version) == self._held:
                self._asked_seconds = None
                return
            self._transfer = _Transfer(piece)
        transfer = self._transfer
        if transfer is None or not transfer.is_of(piece) or piece.offset != transfer.received:
            return  # requested on an earlier connection, or follows a lost piece; it is requested again
        end = piece.offset + len(piece.piece)
        if end > len(transfer.body) or (end < len(transfer.body) and len(piece.piece) != WEIGHTS_PIECE_BYTES):
            raise self._connection.broken(f"sent a piece of weights from {piece.offset} to {end}")
        transfer.body[piece.offset : end] = piece.piece
        transfer.received = end
        self._asked_seconds = now_seconds
        if end == len(transfer.body):
            self._transfer = self._asked_seconds = None
            self._take(piece, transfer.body, now_seconds)

    def _take(self, last: WeightsPiece, body: bytearray, now_seconds: float) -> None:
        if zlib.crc32(body) != last.crc:
            self._drop("bad_checksum")
            return  # the version is requested again
        self._held = (last.learner_peer_id, last.version)
        self._connection.send(self._heartbeat())  # the answer offers a newer version, if there is one
        # 2 ms for 3.3 million parameters, on this thread and without the GIL, so acting continues meanwhile.
        if not np.isfinite(np.frombuffer(body, FLOAT32)).all():
            self._drop("not_finite")
            return
        params: Any = jax.device_put(decode_weights(body, self._like_params))
        newest = Weights(
            params,
            last.version,
            last.learner_peer_id,
            last.updates,
            last.environment_steps,
            last.final,
            now_seconds - last.age_seconds,
        )
        with self._changed:
            self._newest = newest
            self._changed.notify_all()

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            _log.warning("weights of %s are refused: %s", self._connection.name, reason)
