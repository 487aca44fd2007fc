"""Both ends of the weights link for its tests."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np
import zmq

from apex_jax.links.weights import Weights, WeightsPublisher, WeightsSubscriber
from apex_jax.run_identity import RunIdentity
from apex_jax.transport import sockets
from apex_jax.transport.messages import WeightsMessage
from apex_jax.transport.params_codec import encode_weights
from tests.links import CONFIG, free_address, wait_until

AGREEMENT = CONFIG.agreement
PARAMS = {
    "hidden": {"kernel": np.zeros((3, 4), np.float32), "bias": np.zeros(4, np.float32)},
    "q": np.zeros((4, 2), "f4"),
}


def params_of(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), PARAMS)


def assert_equal_leaves(leaf: Any, expected: np.ndarray) -> None:
    assert isinstance(leaf, jax.Array), "already on the device"
    assert leaf.dtype == np.float32
    assert np.asarray(leaf).tobytes() == expected.tobytes()


def assert_equal_bits(params: Any, expected: Any) -> None:
    jax.tree.map(assert_equal_leaves, params, expected)  # which raises where their structures differ


class FalsePublisher:
    """A socket of weights that drops nothing which its subscribers have room for, however soon it is sent."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket

    def send_multipart(self, *arguments: Any, **options: Any) -> None:
        self._socket.poll(0)  # ZMQ looks once a millisecond, at most, whether what it sent before was taken
        self._socket.send_multipart(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class Link:
    """Builds both ends, and takes them down after the test."""

    def __init__(self) -> None:
        self.address = free_address()
        self._context = zmq.Context()
        self._ends: list[Any] = []

    def publisher(self, first_version: int = 0, run: RunIdentity | None = None) -> WeightsPublisher:
        publisher = WeightsPublisher(self._context, self.address, 1, first_version, AGREEMENT, run)
        self._ends.append(publisher)
        return publisher

    def subscriber(self, like_params: Any = PARAMS, run: RunIdentity | None = None) -> WeightsSubscriber:
        subscriber = WeightsSubscriber(self._context, self.address, like_params, AGREEMENT, run=run)
        self._ends.append(subscriber)
        return subscriber

    def false_publisher(self) -> Any:
        """The learner's end, worked by hand."""
        publisher = FalsePublisher(sockets.serve_weights(self._context, self.address))
        self._ends.append(publisher)
        return publisher

    def slow_subscriber(self) -> zmq.Socket:
        """A subscriber that reads when the test does."""
        subscriber = sockets.connect_weights(self._context, self.address)
        self._ends.append(subscriber)
        return subscriber

    def restarted_publisher(self, publisher: WeightsPublisher, first_version: int = 0) -> WeightsPublisher:
        publisher.close()
        self._ends.remove(publisher)
        made: list[WeightsPublisher] = []

        def is_made() -> bool:  # ZMQ frees the address a moment after the close
            try:
                made.append(self.publisher(first_version))
            except sockets.BindError:
                return False
            return True

        wait_until(is_made)
        return made[0]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self._context.term()  # which waits for ever if an end is still open


def newest(subscriber: WeightsSubscriber, updates: int) -> Weights:
    """Waits for the weights of so many updates."""
    wait_until(lambda: subscriber.newest is not None and subscriber.newest.updates == updates)
    assert subscriber.newest is not None
    return subscriber.newest


def message_of(version: int, seed: int = 0, **changes: Any) -> WeightsMessage:
    architecture, body = encode_weights(params_of(seed))
    message = WeightsMessage(1, version, seed, 0, False, AGREEMENT, architecture, zlib.crc32(body), body)
    return message._replace(**changes)
