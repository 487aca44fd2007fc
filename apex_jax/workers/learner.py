"""The learner: consumes the replay's stream, updates, and sends priorities to the replay and weights to the actors."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.algorithm import UpdateOutput, copy_params
from apex_jax.agent.frame_store import create_store, insert_segments
from apex_jax.agent.registry import make_algorithm
from apex_jax.checkpoint import Checkpointer, Progress
from apex_jax.config import Config
from apex_jax.device import device_memory_bytes
from apex_jax.environment import segment_spec
from apex_jax.errors import DivergenceError, FatalError, RunError
from apex_jax.links.sampling_client import Item, SamplingClient, Segments
from apex_jax.links.weights_server import WeightsServer
from apex_jax.operations.stopping import STOPPING, acknowledge, lost_updates
from apex_jax.plotting.provenance import check_resumable, record_config
from apex_jax.process import ROLE_NUMBERS, SUPERVISED, StopSignal, digest_of_run_id, new_run_id, process_rng
from apex_jax.run_identity import new_identity
from apex_jax.transport.messages import IndexBatches, LearnerHello
from apex_jax.transport.params_codec import architecture_of
from apex_jax.types import SegmentSpec
from apex_jax.workers.learner_metrics import LearnerMetrics
from apex_jax.workers.limits import Limit, learning_rate_share, limits_of
from apex_jax.workers.role import RoleContext, open_role
from apex_jax.workers.saver import Saver

_log = logging.getLogger(__name__)

CALLS_IN_FLIGHT = 2  # update calls handed to the device whose priorities have not been fetched
MEMORY_SHARE = 0.9  # of the device's memory, that the frame store may take
SOON_SECONDS = 1.0  # in which a replay server that is there answers that it knows that the run is over
FINISH_SECONDS = 60.0  # that a learner whose run is over waits for a replay server that is away, to tell it


class InFlight(NamedTuple):
    """An update call that the device may still be working on."""

    item: Item
    output: UpdateOutput


class Learner:
    """Owns the parameters and the frame store; its loop waits for nothing but the oldest update call in flight."""

    def __init__(self, role: RoleContext, spec: SegmentSpec):
        """Restores the newest checkpoint of the run, if any, binds the weights link and joins the replay server."""
        self._role = role
        self._config = config = role.config
        self._run_id = new_run_id()
        on_cpu = jax.default_backend() == "cpu"
        dtype = compute_dtype(config)
        self._updates_per_call = config.learner.updates_of_a_call(on_cpu)
        self._algorithm = make_algorithm(config, spec, dtype)
        rng = process_rng(config.seed, ROLE_NUMBERS["learner"])
        self._state = self._algorithm.init(jax.random.key(int(rng.integers(2**31))))
        capacity_segments = spec.ring_segments(config.replay.capacity_transitions)
        try:
            self._store = create_store(spec, capacity_segments, int(MEMORY_SHARE * device_memory_bytes()))
        except ValueError as error:
            raise FatalError(f"{jax.devices()[0]}: {error}") from None
        with contextlib.ExitStack() as opened:  # where this fails, nothing stays that would keep the process alive
            self._checkpointer = Checkpointer(config.directory, config.learner.checkpoints_kept)
            opened.callback(self._checkpointer.close)
            self._saver = Saver(config.learner, self._checkpointer, time.monotonic())
            self._architecture = architecture_of(self._algorithm.acting_params(self._state))
            self._progress = self._restore()
            role.run_identity.adopt(self._progress.run_identity, f"the checkpoint in {self._checkpointer.directory}")
            self._start_seconds = time.monotonic() - self._progress.elapsed_seconds
            self.updates = self._progress.updates
            self.environment_steps = self._progress.environment_steps
            self._replay_steps = dict(self._progress.replay_steps)  # environment steps by id of their replay
            self._published_updates = -1
            self._metrics = LearnerMetrics()
            self._weights = WeightsServer(
                role.sockets,
                config.addresses.weights,
                self._run_id,
                self._progress.weights_version,
                config.weights_agreement,
                self._architecture,
                role.run_identity,
            )
            opened.callback(self._weights.close)
            if role.run_identity.name:  # else as soon as the replay server has said which run this is
                self._publish()  # before anything is compiled: actors wait for it
            _log.info("learning on %s in %s", jax.devices()[0], dtype.name)
            self._stream = self._join_replay(spec, capacity_segments)
            opened.pop_all()
        self.on_accepted: Callable[[], None] = lambda: None  # called once the replay server has taken this learner
        self._is_accepted = False
        self._in_flight: deque[InFlight] = deque()
        self._next_publish = self._next_metrics = time.monotonic()

    def run(self) -> None:
        """Learns until the process is to stop or a limit of the run is reached, then saves a checkpoint.

        It also saves one when the replay server refuses it in mid-run (RunError), but none on a DivergenceError.
        """
        stop = self._role.stop
        try:
            reason = self._learn(stop)
            if stop.signal_number and not os.environ.get(SUPERVISED):  # else the supervisor has done so
                acknowledge(STOPPING)
            self._settle()
        except FatalError:
            raise
        except RunError:
            if self.updates > self._checkpointer.saved_updates:
                self._saver.save_last(self._save, stop)
            raise
        if reason is not None and not self._is_accepted:
            self._accept()
        self._write_metrics()
        self._saver.save_last(
            self._save, stop
        )  # before the others leave for good: a learner that cannot save will learn that part again
        if reason is not None:
            _log.info("the run is over: %s", reason)
            self._publish(final=True)
            self._stream.finish(reason)
            self._wait_for_others(stop)

    def _wait_for_others(self, stop: StopSignal) -> None:
        """Waits until the others have what ends the run: the replay server, which may be restarting, and all clients.

        The replay server alone can end the actors; the evaluator needs the final weights.
        """
        started, is_logged = time.monotonic(), False
        while not stop.is_set() and not (self._stream.is_finish_received.is_set() and self._weights.is_drained):
            stop.beat()
            stop.wait(0.02)
            waited_seconds = time.monotonic() - started
            missing = "clients of its weights"
            if not self._stream.is_finish_received.is_set():
                missing = "the replay server, which alone can end the actors"
            if waited_seconds > SOON_SECONDS and not is_logged:
                is_logged = True
                _log.info("waiting up to %.0f s for %s", FINISH_SECONDS, missing)
            if waited_seconds > FINISH_SECONDS:
                if not self._stream.is_finish_received.is_set():
                    what = "the replay server did not receive that the run is over"
                    _log.warning("%s: stop it and the actors by hand", what)
                return

    def _learn(self, stop: StopSignal) -> str | None:
        """Learns; returns the limit that was reached, None where `stop` was set before."""
        reason = None
        while not stop.is_set() and (reason := self._limit_reached()) is None:
            stop.beat()
            started, is_idle = time.monotonic(), not self._in_flight
            item = self._stream.next(timeout_seconds=0.1 if is_idle else 0.0)
            if is_idle:
                self._metrics.waited_seconds += time.monotonic() - started
            if item is not None:
                self._consume(item)
            if self._in_flight and (item is None or len(self._in_flight) >= CALLS_IN_FLIGHT):
                self._collect()
            self._housekeeping()
        return reason

    @property
    def is_saved(self) -> bool:
        """Tells whether a checkpoint holds all that has been learned."""
        return self._checkpointer.saved_updates == self.updates

    def describe(self) -> dict[str, Any]:
        """Returns what the status page shows beside the metrics, from any thread."""
        return {
            "run_id": digest_of_run_id(self._run_id),
            "updates": self.updates,
            "environment_frames": self.environment_steps * self._config.environment.frame_skip,
            "weights_version": self._weights.version,
            "checkpoint": {
                "updates": self._checkpointer.saved_updates,
                "age_seconds": time.monotonic() - self._checkpointer.saved_seconds,
            },
            "peers": {"replay": self._stream.peer_state, "weights_clients": len(self._weights.clients)},
        }

    def close(self) -> None:
        """Ends the threads; waits until the last checkpoint is saved, unless that was given up."""
        self._stream.close()
        self._weights.close()
        self._saver.close()

    def _join_replay(self, spec: SegmentSpec, capacity_segments: int) -> SamplingClient:
        run = self._role.run_identity
        hello = LearnerHello(
            run_id=self._run_id,
            agreement=self._config.agreement,
            environment_steps=self.environment_steps,
            batches_at_once=self._updates_per_call,
            batch_size=self._config.learner.batch_size,
            run_identity=run.name or new_identity(),
            is_new_run=not run.name,
        )
        groups = CALLS_IN_FLIGHT + max(1, self._config.learner.prefetch_batches // self._updates_per_call)
        address, limit = self._config.addresses.sampling, self._config.away_limit_seconds
        return SamplingClient(self._role.sockets, address, spec, hello, capacity_segments, groups, limit, run)

    def _consume(self, item: Item) -> None:
        content = item.content
        if isinstance(content, Segments):
            self._store = insert_segments(self._store, content.slots, content.frames, content.columns)
            self._stream.consumed(item)
            return
        share = self._learning_rate_share()
        self._state, output = self._algorithm.update(self._state, self._store, content.indices, content.weights, share)
        for leaf in jax.tree.leaves(output):
            leaf.copy_to_host_async()
        self._in_flight.append(InFlight(item, output))
        self.updates += self._updates_per_call
        self._count_steps(content.replay_id, content.environment_steps)

    def _count_steps(self, replay_id: str, steps: int) -> None:
        """Adds what came to a replay since its last batch. One that lost some of its journal counts on from less."""
        self.environment_steps += max(0, steps - self._replay_steps.get(replay_id, 0))
        self._replay_steps[replay_id] = steps
        self._stream.environment_steps = self.environment_steps

    def _collect(self) -> None:
        """Sends the priorities of the oldest call in flight; waits for it if need be."""
        item, output = self._in_flight.popleft()
        output = jax.tree.map(np.asarray, output)
        self._check_finite("loss", np.stack(list(output.metrics.values())))  # and what is computed beside it
        self._stream.update_priorities(item, output.priorities)
        self._stream.consumed(item)  # only now: both messages travel, and wake the server, together
        assert isinstance(item.content, IndexBatches)
        self._metrics.add(item.content, output)

    def _settle(self) -> None:
        """Waits for every update call, and makes sure that learning has not come to nothing."""
        while self._in_flight:
            self._collect()
        for leaf in jax.tree.leaves(self._algorithm.acting_params(self._state)):
            self._check_finite("network", np.asarray(leaf))

    def _check_finite(self, what: str, values: np.ndarray) -> None:
        if not np.isfinite(values).all():
            raise DivergenceError(
                f"the {what} is not finite after about {self.updates} updates: {self._config.fix_of_divergence};"
                f" the last checkpoint is sound; {self._config.fix_of_bad_replay}"
            )

    def _limits(self) -> list[Limit]:
        return limits_of(self._config, self.updates, self.environment_steps, self._elapsed_seconds)

    def _limit_reached(self) -> str | None:
        return next((limit.text for limit in self._limits() if limit.at >= limit.end), None)

    def _learning_rate_share(self) -> float:
        return learning_rate_share(self._config.learner, self._limits())

    def _housekeeping(self) -> None:
        now = time.monotonic()
        if not self._is_accepted and self._stream.peer_state == "joined":
            self._accept()
        if now >= self._next_publish and self._is_accepted and self.updates != self._published_updates:
            self._publish()
            self._next_publish = now + self._config.learner.publish_interval_seconds
        if now >= self._next_metrics:
            self._write_metrics()
            self._next_metrics = now + self._config.metrics_interval_seconds
        if self._saver.is_due(self.updates, now):
            self._save()

    def _accept(self) -> None:
        self._is_accepted = True
        self.on_accepted()

    def _publish(self, final: bool = False) -> None:
        self._published_updates = self.updates
        params = copy_params(self._algorithm.acting_params(self._state))
        self._weights.publish(params, self.updates, self.environment_steps, final)

    def _restore(self) -> Progress:
        agreement = self._config.checkpoint_agreement
        fresh = Progress(0, 0, 0.0, 0, agreement, self._architecture)
        restored = self._checkpointer.restore_newest(self._state, agreement, self._architecture)
        if restored is None:
            return fresh
        state, progress = restored
        self._state = jax.device_put(type(self._state)(*state))
        _log.info("resuming from the checkpoint at %d updates", progress.updates)
        return progress

    def _save(self) -> None:
        self._settle()  # nothing is saved that could not be learned from again
        self._progress = self._progress._replace(
            updates=self.updates,
            environment_steps=self.environment_steps,
            elapsed_seconds=self._elapsed_seconds,
            weights_version=self._weights.version,
            run_identity=self._role.run_identity.name,
            replay_steps=tuple(self._replay_steps.items()),
        )
        self._saver.save(self._state, self._progress)

    def _write_metrics(self) -> None:
        if not self._is_accepted:
            return  # its replay server may yet refuse it: nothing is written into a run that is not its own
        values = {
            "charts/learning_rate": self._config.learner.learning_rate * self._learning_rate_share(),
            "charts/elapsed_minutes": self._elapsed_seconds / 60,
            "learner/weights_version": self._weights.version,
            "learner/replay_disconnects": self._stream.disconnects,
            "learner/failed_checkpoints": self._checkpointer.failed_saves,
            "learner/checkpoint_age_seconds": time.monotonic() - self._checkpointer.saved_seconds,
            **self._metrics.take(self.updates),
        }
        dropped = self._stream.dropped.copy() + self._weights.dropped.copy()
        self._role.write_metrics(self.environment_steps, values, dropped)

    @property
    def _elapsed_seconds(self) -> float:
        """Time of learning, over all starts of the run."""
        return time.monotonic() - self._start_seconds


def compute_dtype(config: Config) -> np.dtype[Any]:
    """Returns the dtype of the network's activations.

    "auto" is float32 on every device: bfloat16 is slower on CPUs, and its rounding is of the size of TD errors near
    convergence, so also of priorities. On a GPU neither its speed nor its scores have been measured.
    """
    name = config.learner.compute_dtype
    return jnp.dtype("float32" if name == "auto" else name)


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs the role; returns the process's exit code."""
    with open_role(config, "learner", name, stop) as role:
        if stop.is_set():
            return stop.exit_code  # before the copy of the run had come, which is then not to be replaced
        check_resumable(config)
        try:
            learner = Learner(role, segment_spec(config))
            role.describe = learner.describe
            stop.on_second_signal = lambda: lost_updates(config.directory, learner.updates, learner.is_saved)
            try:
                learner.on_accepted = partial(record_config, config, is_start=SUPERVISED not in os.environ)
                learner.run()
            finally:
                learner.close()
        except jax.errors.JaxRuntimeError as error:
            # Nothing can be saved then: an update takes the memory of what it began with.
            fix = "where its memory is full, lower replay.capacity_transitions or learner.batch_size"
            raise RunError(f"{jax.devices()[0]} failed: {str(error).splitlines()[0]}; {fix}") from None
    return stop.exit_code
