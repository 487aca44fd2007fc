"""A learner's weights link to 360 clients on loopback tcp, relative to its limit: the same bytes over bare ZMQ sockets.

Every client fetches the paper's parameters, 13.2 MB, as an actor does: by one request and one message. The limit is a
ROUTER that sends the same bytes to as many DEALERs, without requests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any

import jax
import zmq

from apex_jax.agent.registry import make_algorithm
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.links.connection import LinkEnd
from apex_jax.links.weights_server import WeightsServer
from apex_jax.transport import sockets
from apex_jax.transport.messages import (
    WeightsBody,
    WeightsHeartbeat,
    WeightsHello,
    WeightsOffer,
    WeightsRequest,
)
from apex_jax.transport.params_codec import architecture_of, encode_weights
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT, free_tcp_addresses, split_cores

CLIENTS = 360
HEARTBEAT_SECONDS = 2.0
IDLE_SECONDS = 5.0
PATIENCE_SECONDS = 120.0


def main() -> None:
    """Measures the time until all clients have a version, and the costs of publishing and of an idle link."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    arguments = parser.parse_args()
    server_core, other_cores = split_cores()
    config = load(ROOT / "configs" / "paper.yaml")
    algorithm = make_algorithm(config, describe(config).spec)
    params = jax.device_get(algorithm.acting_params(algorithm.init(jax.random.key(0))))
    body = encode_weights(params)
    context = multiprocessing.get_context("spawn")
    received = context.Array("q", 3)  # complete versions of all clients, bytes of bare ZMQ, bytes of weights
    pair = free_tcp_addresses(2)
    hello = WeightsHello(config.weights_compatibility_key, architecture_of(params))
    clients = context.Process(target=_clients, args=(pair[0], hello, arguments.clients, other_cores, received))
    sinks = context.Process(target=_sinks, args=(pair[1], arguments.clients, other_cores, received))
    os.sched_setaffinity(0, server_core)
    zmq_context = zmq.Context()
    server = WeightsServer(LinkEnd(zmq_context, pair[0]), 1, 0, hello.compatibility_key, hello.architecture)
    bare = BareServer(zmq_context, pair[1], body)
    clients.start()
    sinks.start()
    _wait(lambda: len(server.clients) == arguments.clients)
    bare.wait_for(arguments.clients)
    seconds: dict[str, list[float]] = {"weights link": [], "bare ZMQ": []}
    publish_seconds = []
    for number in range(arguments.rounds):
        started, before = time.monotonic(), received[0]
        server.publish(params, number, number)
        publish_seconds.append(time.monotonic() - started)
        _wait(lambda before=before: received[0] == before + arguments.clients)  # type: ignore[misc]
        seconds["weights link"].append(time.monotonic() - started)
        before = received[1]
        started = time.monotonic()
        bare.send_all()
        _wait(lambda before=before: received[1] >= before + arguments.clients * len(body))  # type: ignore[misc]
        seconds["bare ZMQ"].append(time.monotonic() - started)
        say(f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items()))
    cpu, bytes_before = time.process_time(), received[2]
    time.sleep(IDLE_SECONDS)
    idle_share, idle_bytes = (time.process_time() - cpu) / IDLE_SECONDS, received[2] - bytes_before
    for process in (clients, sinks):
        process.terminate()
        process.join()
    server.close()
    bare.socket.close(linger=0)
    zmq_context.term()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    gigabytes = arguments.clients * len(body) / 1e9
    figures = {
        "clients": arguments.clients,
        "megabytes": len(body) / 1e6,
        "seconds until all have a version": seconds,
        "gigabytes a second": {name: gigabytes / value for name, value in medians.items()},
        "publishing, us": 1e6 * statistics.median(publish_seconds),
        "quiet link, share of a core": idle_share,
    }
    targets = {
        "share of bare ZMQ": target(medians["bare ZMQ"] / medians["weights link"], at_least=0.7),
        "publishing, us": target(figures["publishing, us"], at_most=10_000.0),
        "quiet link, share of a core": target(idle_share, at_most=0.05),
        "quiet link, bytes of weights": target(idle_bytes, at_most=0.0),
    }
    finish("weights", figures, targets)


class BareServer:
    """A ROUTER that sends a body to every peer from which it has received a message."""

    def __init__(self, context: zmq.Context, address: str, body: bytes):
        """Binds the socket."""
        self.socket = sockets.serve("weights", context, address)
        self._peers: list[bytes] = []
        self._body = body

    def wait_for(self, number: int) -> None:
        """Waits until it has received a message from `number` peers."""
        while len(self._peers) < number:
            self._peers.append(self.socket.recv_multipart()[0])

    def send_all(self) -> None:
        """Sends the body to every peer."""
        for peer in self._peers:
            self.socket.send_multipart([peer, self._body], copy=False)


class SimulatedClient:
    """One connection that fetches every version, and discards it."""

    def __init__(self, context: zmq.Context, address: str, hello: WeightsHello):
        """Connects; `beat` sends the hello."""
        self.socket = sockets.connect("weights", context, address)
        self._hello = hello
        self._held = self._offered = (0, 0)
        self._is_requested = False
        self._is_joined = False
        self._next_sign = 0.0

    def beat(self, now_seconds: float) -> None:
        """Sends a hello or, once joined, a heartbeat, if one is due."""
        if now_seconds >= self._next_sign:
            message = WeightsHeartbeat(*self._held) if self._is_joined else self._hello
            if sockets.send(self.socket, message):
                self._next_sign = now_seconds + HEARTBEAT_SECONDS

    def read(self, received: Any) -> None:
        """Handles pending messages, and requests an offered version that it does not have."""
        while (message := sockets.receive(self.socket, (WeightsOffer, WeightsBody))) is not None:
            if isinstance(message, WeightsOffer):
                self._is_joined, self._offered = True, (message.learner_peer_id, message.version)
            else:
                self._held, self._is_requested = (message.learner_peer_id, message.version), False
                self._next_sign = 0.0  # the server offers no newer version until it receives a heartbeat with this one
                received[0] += 1
                received[2] += len(message.body)
        if self._offered[1] and self._offered != self._held and not self._is_requested:
            self._is_requested = sockets.send(self.socket, WeightsRequest())


def _clients(address: str, hello: WeightsHello, number: int, cores: set[int], received: Any) -> None:
    os.sched_setaffinity(0, cores)
    context, poller = zmq.Context(), zmq.Poller()
    context.set(zmq.MAX_SOCKETS, 2 * number + 64)
    clients = {}
    for _ in range(number):
        client = SimulatedClient(context, address, hello)
        clients[client.socket] = client
        poller.register(client.socket, zmq.POLLIN)
    while True:
        now = time.monotonic()
        for client in clients.values():
            client.beat(now)
        for socket, _ in poller.poll(100):
            clients[socket].read(received)


def _sinks(address: str, number: int, cores: set[int], received: Any) -> None:
    os.sched_setaffinity(0, cores)
    context, poller = zmq.Context(), zmq.Poller()
    context.set(zmq.MAX_SOCKETS, 2 * number + 64)
    for _ in range(number):
        socket = sockets.connect("weights", context, address)
        poller.register(socket, zmq.POLLIN)
        socket.poll(1_000, zmq.POLLOUT)
        socket.send(b"here")
    while True:
        for socket, _ in poller.poll(100):
            while socket.poll(0):
                received[1] += len(socket.recv(copy=False))


def _wait(condition: Any) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the clients do not have the weights")
        time.sleep(5e-3)


if __name__ == "__main__":
    main()
