"""Network parameters from the learner to whoever acts, each end on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import Counter, deque
from typing import Any, NamedTuple

import jax
import numpy as np
import zmq

from apex_jax.agent.dqn import Params
from apex_jax.agreement import told
from apex_jax.errors import RunError
from apex_jax.run_identity import RunIdentity
from apex_jax.segment_codec import FLOAT32
from apex_jax.transport import sockets
from apex_jax.transport.messages import LearnerAlive, WeightsMessage
from apex_jax.transport.monitor import ClientMonitor, ServerMonitor
from apex_jax.transport.params_codec import architecture_of, decode_weights, encode_weights
from apex_jax.transport.wire import WireError
from apex_jax.types import PEER_TIMEOUT_SECONDS

_log = logging.getLogger(__name__)

REPUBLISH_SECONDS = 0.2  # subscribers that join within this time share one transmission of the newest weights
RESEND_SECONDS = 1.0  # at least, between two such transmissions: each goes to everybody, however many come and go
UNUSABLE_IN_A_ROW = 5  # messages that end a subscriber: its learner's settings or release differ
SUBSCRIPTIONS_AT_ONCE = 1_024  # read before it is the weights' turn again
ALIVE_SECONDS = 2.0  # between two signs of life of a learner that has no weights to send
LAST_WEIGHTS_REPEATS = 5  # of the weights that end the run: without them an evaluator would wait for ever


class Weights(NamedTuple):
    """Parameters and what the learner said of them."""

    params: Params  # leaves float32, on the subscriber's device
    version: int
    learner_run_id: int
    updates: int  # that the learner had made
    environment_steps: int  # of the whole run, at that moment
    final: bool
    received_seconds: float  # time.monotonic() here


class Handover(NamedTuple):
    """Parameters to be sent, and what is to be said of them."""

    params: Params
    updates: int
    environment_steps: int
    final: bool


class WeightsPublisher:
    """Sends the newest parameters, and again to whoever joins late."""

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        run_id: int,
        first_version: int,
        agreement: str,
        run: RunIdentity | None = None,
    ):
        """Binds the address (BindError where that fails) and starts the thread.

        `agreement`: see `Config.weights_agreement`; `run`: None = of no run in particular, as in a benchmark.
        """
        self.dropped: Counter[str] = Counter()
        self._monitor = ServerMonitor()
        self._socket = sockets.serve_weights(context, address, self._monitor)
        self._run_id = run_id
        self._agreement = agreement
        self._run_identity = run or RunIdentity()
        self.version = first_version
        self.subscribers = 0
        self._newest: deque[Handover] = deque(maxlen=1)  # a learner faster than the sending leaves nothing behind
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights publisher")
        self._thread.start()

    def publish(self, params: Params, updates: int, environment_steps: int, final: bool = False) -> None:
        """Hands over parameters to be sent; returns at once.

        `params` are the caller's no more: a copy the learner's next update does not donate away.
        """
        self._newest.append(Handover(params, updates, environment_steps, final))
        self._wake.set()

    def close(self) -> None:
        """Sends what was handed over and ends the thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        with self._socket, self._monitor:
            self._serve()

    def _serve(self) -> None:
        message: WeightsMessage | None = None
        due_seconds = float("inf")  # when a newcomer's copy is to be sent
        next_resend_seconds = 0.0  # not before
        alive_seconds = 0.0  # when a sign of life is
        while self._newest or not self._closing.is_set():
            self._wake.wait(REPUBLISH_SECONDS / 2)
            self._wake.clear()
            self._monitor.count(self.dropped)
            if self._newest:
                message = self._encode(*self._newest.popleft())
                sockets.send(self._socket, message)
                alive_seconds = time.monotonic() + ALIVE_SECONDS
            if self._has_newcomer():
                due_seconds = min(due_seconds, max(next_resend_seconds, time.monotonic() + REPUBLISH_SECONDS))
            if message is not None and time.monotonic() >= due_seconds:
                sockets.send(self._socket, message)
                due_seconds, next_resend_seconds = float("inf"), time.monotonic() + RESEND_SECONDS
            if time.monotonic() >= alive_seconds:
                sockets.send(self._socket, LearnerAlive(self._run_id))
                alive_seconds = time.monotonic() + ALIVE_SECONDS
        if message is not None and message.final:
            self._send_again(message)

    def _send_again(self, message: WeightsMessage) -> None:
        """Sends the last weights again: ZMQ drops what comes to a subscriber that is behind; others ignore it."""
        for _ in range(LAST_WEIGHTS_REPEATS):
            time.sleep(REPUBLISH_SECONDS)
            sockets.send(self._socket, message)

    def _encode(self, params: Params, updates: int, environment_steps: int, final: bool) -> WeightsMessage:
        # Milliseconds since 1970 or one more: versions grow also over a restart from an older checkpoint.
        self.version = max(self.version + 1, int(time.time() * 1000))
        architecture, body = encode_weights(jax.device_get(params))
        run_identity = self._run_identity.name
        return WeightsMessage(
            learner_run_id=self._run_id,
            version=self.version,
            updates=updates,
            environment_steps=environment_steps,
            final=final,
            agreement=self._agreement,
            architecture=architecture,
            crc=_crc(run_identity, body),
            body=body,
            run_identity=run_identity,
        )

    def _has_newcomer(self) -> bool:
        found = False
        for _ in range(SUBSCRIPTIONS_AT_ONCE):
            if not self._socket.poll(0):
                break
            frames = self._socket.recv_multipart()
            if sockets.is_subscription(frames):
                found = True
                self.subscribers += 1
            elif sockets.is_end_of_subscription(frames):
                self.subscribers = max(0, self.subscribers - 1)
        return found


class WeightsSubscriber:
    """Keeps the newest parameters at hand, already on the device; acting never waits for them.

    Whoever asks for them gets a RunError where the learner can never be joined.
    """

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        like_params: Params,
        agreement: str,
        away_limit_seconds: float = 0.0,
        run: RunIdentity | None = None,
    ):
        """Connects and starts the thread. `like_params`: a tree of the network's leaves; `agreement`: see `Config`.

        `run`: that this process is part of, or becomes part of with the first weights; None = of any.

        `away_limit_seconds`: after which a learner that is away is a RunError, 0 = never.
        """
        self.dropped: Counter[str] = Counter()
        self._newest: Weights | None = None
        self._error: RunError | None = None
        self._address = address
        self._heard_seconds: float | None = None  # None before the first message
        self._looks_seconds = float("inf")  # when another connection is to be tried
        self._is_silent = False
        self._sender_seconds = 0.0  # when the learner of the newest weights was heard
        self._cut_offs = 0  # before the last weights that could be read
        self._foreign = 0  # messages of another release in a row
        self._of_another_run = 0  # weights of another run or configuration in a row
        self._run_identity = run or RunIdentity()
        self._agreement = agreement
        self._monitor = ClientMonitor(away_limit_seconds)
        self._like_params = like_params
        self._architecture = architecture_of(like_params)
        self._body_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(like_params))  # float32
        self._socket = sockets.connect_weights(context, address, self._monitor, self._body_bytes)
        self._stopping = threading.Event()
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights subscriber")
        self._thread.start()

    @property
    def newest(self) -> Weights | None:
        """The newest parameters, None before the first. RunError, see above."""
        if self._error is not None:
            raise self._error
        return self._newest

    @property
    def peer_state(self) -> str:
        """What has become of the learner, as far as this end knows: joined, connecting, lost or refused."""
        if self._error is not None:
            return "refused"
        if self._is_silent:
            return "lost"
        return "joined" if self._heard_seconds is not None else "connecting"

    def wait(self, seconds: float) -> Weights | None:
        """Waits at most `seconds` for the first parameters; returns the newest."""
        self._arrived.wait(seconds)
        return self.newest

    def close(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._socket, self._monitor:
                self._serve()
        except RunError as error:
            self._error = error
            self._arrived.set()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._monitor.check()
            self._monitor.count(self.dropped)
            self._check_network()
            self._look_for_learner()
            self._monitor.look_for_server(self.peer_state in ("connecting", "lost"))
            if not self._socket.poll(100):
                continue
            message = None
            expected = (WeightsMessage, LearnerAlive)
            for later in sockets.receive_some(self._socket, expected, self.dropped, self._check_release):
                self._heard(later.learner_run_id)
                message = later if isinstance(later, WeightsMessage) else message
            if message is not None:
                self._cut_offs = self._monitor.cut_offs
                self._take(message)

    def _check_network(self) -> None:
        """Gives up where the learner sends nothing but what no weights of this network can be."""
        if self._monitor.cut_offs - self._cut_offs >= UNUSABLE_IN_A_ROW:
            what = f"the weights of the learner at {self._address} are longer than those of the network here"
            raise RunError(f"{what}: set environment.* and network.* as the learner has them, or start that with these")

    def _check_release(self, error: WireError) -> None:
        """Gives up where the learner speaks another protocol version: this link has nobody who could refuse."""
        self._foreign = 0 if error.version is None else self._foreign + 1
        if self._foreign >= UNUSABLE_IN_A_ROW:
            raise RunError(f"the learner at {self._address} cannot be understood: {error.detail}")

    def _check_run(self, message: WeightsMessage, reason: str) -> None:
        """Gives up where the learner's run is another one: its weights may fit, and would play the wrong game."""
        is_other = reason in ("another_config", "another_run")
        self._of_another_run = self._of_another_run + 1 if is_other else 0
        if self._of_another_run < UNUSABLE_IN_A_ROW:
            return
        learner = f"the learner at {self._address}"
        if reason == "another_run":
            raise RunError(self._run_identity.refusal(message.run_identity, learner))
        what = told(message.agreement, self._agreement, "there", "here")
        raise RunError(f"{learner} has other settings: {what}; make them equal")

    def _look_for_learner(self) -> None:
        """Connects anew where nothing has come for long: a connection may be dead at the other end only."""
        now = time.monotonic()
        if (
            self._heard_seconds is None
            or now < self._looks_seconds
            or (self._newest is not None and self._newest.final)
        ):
            return
        self._looks_seconds = now + PEER_TIMEOUT_SECONDS
        if not self._is_silent:
            self._is_silent = True
            silent_seconds = now - self._heard_seconds
            _log.warning("the learner at %s has been silent for %.0f s: looking for it", self._address, silent_seconds)
        self._monitor.reconnect()

    def _heard(self, learner_run_id: int) -> None:
        now = time.monotonic()
        self._foreign = 0
        if self._newest is not None and learner_run_id == self._newest.learner_run_id:
            self._sender_seconds = now
        if self._is_silent and self._heard_seconds is not None:
            _log.info("the learner is back after %.0f s", now - self._heard_seconds)
            self._is_silent = False
        self._heard_seconds, self._looks_seconds = now, now + PEER_TIMEOUT_SECONDS

    def _take(self, message: WeightsMessage) -> None:
        newest = self._newest
        if newest is not None and message.version <= newest.version and not self._has_new_sender(message):
            return  # sent again for a newcomer
        if reason := self._defect(message):
            self._check_run(message, reason)
            self.dropped[reason] += 1
            if self.dropped[reason] == 1:
                fixes = {
                    "another_architecture": "; set network.* as the learner has it",
                    "another_config": "; use the same config for all roles",
                }
                _log.warning("weights from %s are refused: %s%s", self._address, reason, fixes.get(reason, ""))
            return
        self._of_another_run = 0
        self._run_identity.adopt(message.run_identity, f"the learner at {self._address}")
        params: Any = jax.device_put(decode_weights(message.body, self._like_params))
        self._newest = Weights(
            params,
            message.version,
            message.learner_run_id,
            message.updates,
            message.environment_steps,
            message.final,
            time.monotonic(),
        )
        self._sender_seconds = time.monotonic()
        self._arrived.set()

    def _has_new_sender(self, message: WeightsMessage) -> bool:
        """Tells whether this is the learner now: its clock may be behind that of the one before, which has gone."""
        is_gone = time.monotonic() - self._sender_seconds > PEER_TIMEOUT_SECONDS
        return is_gone and self._newest is not None and message.learner_run_id != self._newest.learner_run_id

    def _defect(self, message: WeightsMessage) -> str:
        if message.agreement != self._agreement:
            return "another_config"
        if message.architecture != self._architecture:
            return "another_architecture"
        if _crc(message.run_identity, message.body) != message.crc:
            return "bad_checksum"
        if self._run_identity.differs(message.run_identity):
            return "another_run"
        if len(message.body) != self._body_bytes:
            return "bad_length"
        # 2 ms for 3.3 million parameters, on this thread and without Python's lock: acting goes on meanwhile.
        return "" if np.isfinite(np.frombuffer(message.body, FLOAT32)).all() else "not_finite"


def _crc(run_identity: str, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(run_identity.encode(errors="replace")))
