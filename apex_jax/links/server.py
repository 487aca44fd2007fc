"""Parts common to the servers of the three links: the reading loop, the checks of a peer that joins, and eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import zmq

from apex_jax.run.identity import RunIdentity, describe_differences, is_identity
from apex_jax.transport import sockets
from apex_jax.transport.messages import Refusal, Rejoin
from apex_jax.types import PEER_TIMEOUT_SECONDS


class Peer(Protocol):
    """A server's record of a connected peer."""

    seen_seconds: float  # when its last message was read


PeerT = TypeVar("PeerT", bound=Peer)
Handler = Callable[[bytes, Any, float], None]  # of (identity of the connection, message, time)


class LinkServer(Generic[PeerT]):
    """Reads messages, passes each to its handler, and evicts silent peers.

    A peer joins with a hello, which is answered with a `Refusal`, or by its handler with a welcome; every other message
    of a peer without a record is answered with `Rejoin`.
    """

    def __init__(
        self,
        names: tuple[str, str],
        socket: zmq.Socket,
        compatibility_key: str,
        run: RunIdentity | None,
        peers: Mapping[bytes, PeerT],
        max_peers: int,
    ):
        """`names`: of this server and of a peer, for refusals; `run`: the only run whose peers may join, None = any.

        `peers`: the records by connection, which the subclass adds and removes; `max_peers`: their largest number.
        """
        self.dropped: Counter[str] = Counter()
        self._names = names
        self._socket = socket
        self._compatibility_key = compatibility_key
        self.run_identity = run or RunIdentity()
        self._peers = peers
        self._max_peers = max_peers
        self._unread_after = 0  # messages read since the socket was last empty
        self._handlers: dict[type, Handler] = {}  # by type of message, that of the hello first; set by the subclass

    def read(self, now_seconds: float) -> None:
        """Handles pending messages for at most one reading turn."""
        hello = next(iter(self._handlers))
        for _ in sockets.reading_turn():
            received = sockets.receive_from(self._socket, tuple(self._handlers), self.dropped)
            if received is None:
                self._unread_after = 0
                return
            self._unread_after += 1
            connection_id, message = received
            if (peer := self._peers.get(connection_id)) is not None:
                peer.seen_seconds = now_seconds
            elif not isinstance(message, hello):
                sockets.send(self._socket, Rejoin(), connection_id)
                continue
            if isinstance(message, hello) and (refusal := self._refusal(connection_id, message)) is not None:
                sockets.send(self._socket, refusal, connection_id)
                continue
            self._handlers[type(message)](connection_id, message, now_seconds)

    def evict_dead_peers(self, now_seconds: float) -> None:
        """Evicts peers that have been silent for PEER_TIMEOUT_SECONDS."""
        if 0 < self._unread_after <= 2 * self._max_peers:
            return  # a peer's heartbeat may be pending in the socket
        for connection_id, peer in list(self._peers.items()):
            if now_seconds - peer.seen_seconds > PEER_TIMEOUT_SECONDS + self._transfer_seconds(peer):
                self._evict(connection_id)

    def _transfer_seconds(self, peer: PeerT) -> float:
        """Returns how much longer a peer may be silent, since a large message to it is on its way."""
        return 0.0

    def _evict(self, connection_id: bytes) -> None:
        """Removes a silent peer."""
        raise NotImplementedError

    def _refusal(self, connection_id: bytes, hello: Any) -> Refusal | None:
        """Returns why the sender of a hello must not join, such as another configuration or run; None if it may."""
        (server, peer), run_identity = self._names, hello.run_identity
        if hello.compatibility_key != self._compatibility_key:
            self.dropped["another_config"] += 1
            what = describe_differences(self._compatibility_key, hello.compatibility_key, server, peer)
            return Refusal(reason=f"{what}; make them equal", final=True)
        if is_identity(run_identity) and self.run_identity.name not in ("", run_identity):  # if both are known
            self.dropped["another_run"] += 1
            return Refusal(reason=self.run_identity.refusal(run_identity, peer, server), final=True)
        return None
