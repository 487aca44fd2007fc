"""The learner: consumes the replay server's stream, updates the params, sends priorities back and publishes weights."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.algorithm import UpdateOutput, copy_params
from apex_jax.agent.devices import DeviceStores, replicated
from apex_jax.agent.registry import make_algorithm, resolved
from apex_jax.config import Config, server_name
from apex_jax.environments.environment import interface_of, segment_spec
from apex_jax.host.device import device_memory_bytes, learner_devices
from apex_jax.host.errors import DivergenceError, FatalError, RunError
from apex_jax.links.sampling_client import Segments
from apex_jax.links.shards import Batches, Merged, Shards
from apex_jax.links.weights_server import WeightsServer
from apex_jax.operations.stopping import STOPPING, acknowledge, lost_updates
from apex_jax.process import ROLE_NUMBERS, SUPERVISED, StopSignal, digest_of_run_id, new_run_id, process_rng
from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.run.identity import new_identity
from apex_jax.run.interface import record_interface
from apex_jax.run.provenance import check_resumable, record_acceptance, record_config
from apex_jax.transport.addresses import addresses_of_servers
from apex_jax.transport.messages import IndexBatches, LearnerHello
from apex_jax.transport.params_codec import architecture_of
from apex_jax.types import SegmentSpec
from apex_jax.workers.learner_metrics import LearnerMetrics
from apex_jax.workers.role import RoleContext, open_role
from apex_jax.workers.run_counters import RunCounters
from apex_jax.workers.saver import Saver

_log = logging.getLogger(__name__)

CALLS_IN_FLIGHT = 2  # update calls dispatched to the device whose priorities have not been fetched
MEMORY_SHARE = 0.9  # of the device's memory, for the frame store
SOON_SECONDS = 1.0  # in which a connected replay server acknowledges the end of the run
FINISH_SECONDS = 60.0  # timeout for delivering the end of the run to the others


class InFlight(NamedTuple):
    """An update call that the device may still be executing."""

    item: Merged
    output: UpdateOutput


class Learner:
    """Owns the params and the frame store; while calls are in flight, its loop blocks only on the oldest one."""

    def __init__(self, role: RoleContext, spec: SegmentSpec):
        """Restores the run's newest checkpoint, if any, binds the weights link and starts joining the replay server."""
        self._role = role
        self._run_id = new_run_id()
        config, now = role.config, time.monotonic()
        dtype = compute_dtype(config)
        self._devices = devices = learner_devices(config)
        learner = replace(config.learner, devices=devices)
        self._algorithm = make_algorithm(config.replace(learner=learner), spec, dtype)
        rng = process_rng(config.seed, ROLE_NUMBERS["learner"])
        self._state = replicated(self._algorithm.init(jax.random.key(int(rng.integers(2**31)))), devices)
        capacity_segments = spec.ring_segments(config.replay.capacity_of_server)
        try:
            memory_bytes = int(MEMORY_SHARE * device_memory_bytes(devices))
            self._stores = DeviceStores(spec, config.replay.servers * capacity_segments, devices, memory_bytes)
        except ValueError as error:
            raise FatalError(f"{jax.devices()[0]}: {error}") from None
        self._metrics = LearnerMetrics()
        self._in_flight: deque[InFlight] = deque()
        self.on_accepted: Callable[[], None] | None = None  # called once the replay server has welcomed this learner
        self.on_first_update: Callable[[], None] | None = None  # called once this start has made an update
        self._is_accepted = False
        self._next_publish = self._next_metrics = now
        with contextlib.ExitStack() as opened:  # on failure, ends all threads, which would keep the process alive
            checkpointer = Checkpointer(config.directory, config.learner.checkpoints_kept)
            opened.callback(checkpointer.close)
            self._saver = Saver(config.learner, checkpointer)
            architecture = architecture_of(self._algorithm.acting_params(self._state))
            restored = self._restore(architecture, resolved(config, spec).checkpoint_compatibility_key)
            role.run_identity.adopt(restored.run_identity, f"the checkpoint in {checkpointer.directory}")
            self.counters = RunCounters(config, restored, now)
            self._weights = WeightsServer(
                role.sockets,
                config.addresses.weights,
                self._run_id,
                restored.weights_version,
                config.weights_compatibility_key,
                architecture,
                role.run_identity,
                config.replay.servers,
            )
            opened.callback(self._weights.close)
            if role.run_identity.name:  # otherwise after the replay server has sent the run identity
                self._publish()  # before compilation, since actors wait for it
            names = ", ".join(map(str, jax.devices()[:devices]))
            _log.info("learning on %s in %s", names, dtype.name)
            self._stream = self._join_replay(spec, capacity_segments)
            opened.pop_all()

    def _restore(self, architecture: str, compatibility_key: str) -> Progress:
        restored = self._saver.checkpointer.restore_newest(self._state, compatibility_key, architecture)
        if restored is None:
            return Progress(0, 0, 0.0, 0, compatibility_key, architecture)
        state, progress = restored
        self._state = replicated(jax.device_put(type(self._state)(*state)), self._devices)
        _log.info("resuming from the checkpoint at %d updates", progress.updates)
        return progress._replace(compatibility_key=compatibility_key)  # earlier releases saved fewer keys

    def _join_replay(self, spec: SegmentSpec, capacity_segments: int) -> Shards:
        config, run = self._role.config, self._role.run_identity
        updates_per_call = config.learner.updates_of_a_call(jax.default_backend() == "cpu")
        hello = LearnerHello(
            run_id=self._run_id,
            compatibility_key=config.compatibility_key,
            environment_steps=self.counters.environment_steps,
            batches_at_once=updates_per_call,
            batch_size=config.learner.batch_size,
            run_identity=run.name or new_identity(),
            is_new_run=not run.name,
        )
        groups = CALLS_IN_FLIGHT + max(1, config.learner.prefetch_batches // updates_per_call)
        return Shards(
            self._role.sockets,
            addresses_of_servers(config, "sampling"),
            spec,
            hello,
            capacity_segments,
            groups,
            config.replay.importance_sampling_exponent,
            process_rng(config.seed, ROLE_NUMBERS["learner"], 1),
            config.replay.min_size_to_sample,
            config.away_limit_seconds,
            run,
            self._devices,
        )

    # The loop

    def run(self) -> None:
        """Learns until the process is stopped or a limit of the run is reached, then saves a checkpoint.

        Also saves one if the replay server refuses it in mid-run (RunError), but none on a DivergenceError.
        """
        stop = self._role.stop
        try:
            reason = self._learn()
            if stop.signal_number and not os.environ.get(SUPERVISED):  # otherwise the supervisor does so
                acknowledge(STOPPING)
            self._settle()
        except FatalError:
            raise
        except RunError:
            if self.counters.updates > self._saver.checkpointer.saved_updates:
                self._saver.save_last(self._save, stop)
            raise
        if reason is not None and not self._is_accepted:
            self._accept()
        self._write_metrics()
        # Saved before the peers end: if it fails, a restarted learner needs them to repeat its last updates.
        self._saver.save_last(self._save, stop)
        if reason is not None:
            _log.info("the run is over: %s", reason)
            self._publish(final=True)
            self._stream.finish(reason)
            self._wait_for_others()

    def _learn(self) -> str | None:
        """Learns; returns the limit that was reached, or None if the process was stopped first."""
        stop, reason = self._role.stop, None
        while not stop.is_set() and (reason := self.counters.limit_reached()) is None:
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

    def _consume(self, item: Merged) -> None:
        content = item.content
        if isinstance(content, Segments):
            self._stores.insert(content.slots, content.frames, content.columns)
            self._stream.consumed(item)
            return
        share = self.counters.learning_rate_share()
        store = self._stores.whole
        self._state, output = self._algorithm.update(self._state, store, content.indices, content.weights, share)
        for leaf in jax.tree.leaves(output):
            leaf.copy_to_host_async()
        self._in_flight.append(InFlight(item, output))
        self.counters.updates += len(content.indices)
        for part in item.parts:
            assert isinstance(part.item.content, IndexBatches)
            self.counters.count_steps(part.item.content.replay_id, part.item.content.environment_steps)
        self._stream.count_steps(self.counters.environment_steps)

    def _collect(self) -> None:
        """Waits for the oldest call in flight and sends its priorities."""
        item, output = self._in_flight.popleft()
        output = jax.tree.map(np.asarray, output)
        self._check_finite("loss", np.stack(list(output.metrics.values())))  # and the other metrics
        if self.on_first_update is not None:
            self.on_first_update()
            self.on_first_update = None
        self._stream.update_priorities(item, output.priorities)
        self._stream.consumed(item)  # here, so that both messages are sent, and wake the server, together
        assert isinstance(item.content, Batches)
        self._metrics.add(item.content, output)
        self._saver.on_update(time.monotonic())

    def _settle(self) -> None:
        """Waits for all calls in flight. Raises DivergenceError if the params are not finite."""
        while self._in_flight:
            self._collect()
        for leaf in jax.tree.leaves(self._algorithm.acting_params(self._state)):
            self._check_finite("network", np.asarray(leaf))

    def _check_finite(self, what: str, values: np.ndarray) -> None:
        config = self._role.config
        if not np.isfinite(values).all():
            raise DivergenceError(
                f"the {what} is not finite after about {self.counters.updates} updates: {config.fix_of_divergence};"
                f" the last checkpoint is sound; {config.fix_of_bad_replay}"
            )

    def _wait_for_others(self) -> None:
        """Waits until the replay server has the Finish and all clients have the final weights.

        Only the replay server, which may be restarting, can stop the actors; the evaluator needs the final weights.
        """
        stop, started, is_logged = self._role.stop, time.monotonic(), False
        while not stop.is_set() and not (self._stream.is_finish_received and self._weights.is_drained):
            stop.beat()
            stop.wait(0.02)
            waited_seconds = time.monotonic() - started
            missing = "clients of its weights"
            if not self._stream.is_finish_received:
                missing = "the replay server, which alone can end the actors"
            if waited_seconds > SOON_SECONDS and not is_logged:
                is_logged = True
                _log.info("waiting up to %.0f s for %s", FINISH_SECONDS, missing)
            if waited_seconds > FINISH_SECONDS:
                if not self._stream.is_finish_received:
                    what = "the replay server did not receive that the run is over"
                    _log.warning("%s: stop it and the actors by hand", what)
                return

    # Periodic work

    def _housekeeping(self) -> None:
        now, updates = time.monotonic(), self.counters.updates
        if not self._is_accepted and self._stream.peer_state == "joined":
            self._accept()
        if now >= self._next_publish and self._is_accepted and updates != self._weights.updates:
            self._publish()
            self._next_publish = now + self._role.config.learner.publish_interval_seconds
        if now >= self._next_metrics:
            self._weights.placement.closed = self._stream.gone(now)
            self._write_metrics()
            self.counters.read_evaluations()
            self._next_metrics = now + self._role.config.metrics_interval_seconds
        if self._saver.is_due(now):
            self._save()

    def _accept(self) -> None:
        self._is_accepted = True
        if self.on_accepted is not None:
            self.on_accepted()

    def _publish(self, final: bool = False) -> None:
        params = copy_params(self._algorithm.acting_params(self._state))
        self._weights.publish(params, self.counters.updates, self.counters.environment_steps, final)

    def _save(self) -> None:
        self._settle()  # never saves a state that has diverged
        self._saver.save(self._state, self.counters.progress(self._weights.version, self._role.run_identity.name))

    def _write_metrics(self) -> None:
        if not self._is_accepted:
            return  # writes nothing to a run that may refuse this learner
        checkpointer = self._saver.checkpointer
        values = {
            "charts/learning_rate": self._role.config.learner.learning_rate * self.counters.learning_rate_share(),
            "charts/elapsed_minutes": self.counters.elapsed_seconds() / 60,
            "learner/weights_version": self._weights.version,
            "learner/replay_disconnects": self._stream.disconnects,
            "learner/failed_checkpoints": checkpointer.failed_saves,
            "learner/checkpoint_age_seconds": self._saver.age_seconds(time.monotonic()),
            **self._metrics.take(self.counters.updates),
        }
        dropped = self._stream.dropped.copy() + self._weights.dropped.copy()
        self._role.write_metrics(self.counters.environment_steps, values, dropped)

    @property
    def is_saved(self) -> bool:
        """Returns whether a checkpoint holds all updates."""
        return self._saver.checkpointer.saved_updates == self.counters.updates

    def describe(self) -> dict[str, Any]:
        """Returns the learner's status without its metrics. Callable from any thread."""
        updates = self._saver.checkpointer.saved_updates
        return {
            "run_id": digest_of_run_id(self._run_id),
            "updates": self.counters.updates,
            "environment_frames": self.counters.environment_frames,
            "weights_version": self._weights.version,
            "checkpoint": {"updates": updates, "age_seconds": self._saver.age_seconds(time.monotonic())}
            if updates
            else None,
            "peers": {
                **{server_name(number): state for number, state in enumerate(self._stream.peer_states)},
                "weights_clients": len(self._weights.clients),
            },
        }

    def close(self) -> None:
        """Ends the threads, after the last checkpoint is saved or has been given up."""
        self._stream.close()
        self._weights.close()
        self._saver.close()


def compute_dtype(config: Config) -> np.dtype[Any]:
    """Returns the dtype of the network's activations.

    "auto" is float32 on every device: bfloat16 is slower on CPUs, and near convergence its rounding errors are as
    large as TD errors and thus priorities. On GPUs, neither its speed nor its scores have been measured.
    """
    name = config.learner.compute_dtype
    return jnp.dtype("float32" if name == "auto" else name)


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs the role and returns the process's exit code."""
    with open_role(config, "learner", name, stop) as role:
        if stop.is_set():
            return stop.exit_code  # stopped while the run was fetched; starting would replace its remote copy
        check_resumable(config)
        try:
            spec = segment_spec(config)
            learner = Learner(role, spec)
            role.describe = learner.describe
            stop.on_second_signal = lambda: lost_updates(config.directory, learner.counters.updates, learner.is_saved)
            try:
                is_start, is_new = SUPERVISED not in os.environ, not learner.counters.updates
                learner.on_accepted = partial(record_acceptance, config, is_start, is_new)
                learner.on_first_update = partial(_record, config, spec)
                learner.run()
            finally:
                learner.close()
        except jax.errors.JaxRuntimeError as error:
            # The state cannot be saved: the failed update has donated its buffers.
            fix = "where its memory is full, lower replay.capacity_transitions or learner.batch_size"
            raise RunError(f"{jax.devices()[0]} failed: {str(error).splitlines()[0]}; {fix}") from None
    return stop.exit_code


def _record(config: Config, spec: SegmentSpec) -> None:
    """Writes what a reader of the run needs, once the run has made an update."""
    record_config(config)
    record_interface(config.directory, interface_of(config, spec))
