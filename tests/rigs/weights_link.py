"""Both ends of the weights link for its tests, sound and false ones."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from apex_jax.links.connection import LinkEnd
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.links.weights_server import WeightsServer
from apex_jax.run.identity import RunIdentity
from apex_jax.transport import sockets
from apex_jax.transport.messages import WeightsBody, WeightsHello, WeightsOffer, WeightsRequest
from apex_jax.transport.params_codec import architecture_of, encode_weights
from tests.rigs.links import CONFIG, Ends, FalseServer, Peer, wait_until

COMPATIBILITY_KEY = CONFIG.compatibility_key
PARAMS = {
    "hidden": {"kernel": np.zeros((3, 4), np.float32), "bias": np.zeros(4, np.float32)},
    "q": np.zeros((4, 2), "f4"),
}
ARCHITECTURE = architecture_of(PARAMS)
PEER_ID = 1  # of the learner


def params_of(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), PARAMS)


def large_params(value: float, num_bytes: int = 600_000) -> Any:
    return {"kernel": np.full(num_bytes // 4, value, np.float32)}


class FalseLearner(FalseServer):
    """The learner's end of the link, controlled by the test: it offers and sends to its one client."""

    def gives(self, version: int, seed: int, **changes: Any) -> None:
        """Offers a version, waits for the request, and sends it."""
        self.send(WeightsOffer(PEER_ID, version, False))
        self.receive(WeightsRequest)
        self.send(body_of(version, seed, **changes))


class Link(Ends):
    """Both ends of a weights link."""

    def server(
        self,
        first_version: int = 0,
        run: RunIdentity | None = None,
        params: Any = PARAMS,
        peer_id: int = PEER_ID,
    ) -> WeightsServer:
        end = LinkEnd(self.context, self.address, run)
        server = WeightsServer(end, peer_id, first_version, COMPATIBILITY_KEY, architecture_of(params))
        self.clients.append(server)
        return server

    def client(
        self, like_params: Any = PARAMS, run: RunIdentity | None = None, compatibility_key: str = COMPATIBILITY_KEY
    ) -> WeightsClient:
        client = WeightsClient(LinkEnd(self.context, self.address, run), like_params, compatibility_key)
        self.clients.append(client)
        return client

    def false_learner(self) -> FalseLearner:
        learner = FalseLearner(sockets.serve("weights", self.context, self.address))
        self.clients.append(learner)
        return learner

    def peer(self) -> Peer:
        """A client that the test controls."""
        peer = Peer(sockets.connect("weights", self.context, self.address), lambda: None)
        self.clients.append(peer.socket)
        return peer

    def joined_peer(self, architecture: str = ARCHITECTURE) -> Peer:
        peer = self.peer()
        peer.send(WeightsHello(COMPATIBILITY_KEY, architecture))
        peer.receive(WeightsOffer)
        return peer

    def restarted_server(self, server: WeightsServer) -> WeightsServer:
        server.close()
        self.clients.remove(server)
        return self.when_free(lambda: self.server(peer_id=PEER_ID + 1))

    def when_free(self, make: Callable[[], WeightsServer]) -> WeightsServer:
        made: list[WeightsServer] = []

        def is_made() -> bool:  # ZMQ frees the address a moment after the close
            try:
                made.append(make())
            except sockets.BindError:
                return False
            return True

        wait_until(is_made)
        return made[0]


def newest(client: WeightsClient, updates: int) -> Weights:
    """Fetches weights until they are those of this many updates."""

    def arrived() -> bool:
        weights = client.newest
        if weights is not None and weights.updates == updates:
            return True
        client.fetch_after(weights)
        return False

    wait_until(arrived)
    assert client.newest is not None
    return client.newest


def body_of(version: int, seed: int = 0, body: bytes | None = None, **changes: Any) -> WeightsBody:
    body = encode_weights(params_of(seed)) if body is None else body
    return WeightsBody(PEER_ID, version, seed, 0, False, 0.0, zlib.crc32(body), body)._replace(**changes)


@pytest.fixture
def link() -> Iterator[Link]:
    """Both ends of a weights link."""
    link = Link()
    yield link
    link.close()
