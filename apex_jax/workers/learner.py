"""The learner: consumes the replay's stream, updates, and sends priorities to the replay and weights to the actors."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import zmq

from apex_jax.agent.dqn import LearnerState, UpdateOutput, make_dqn
from apex_jax.agent.frame_store import create_store, insert_segments, store_bytes
from apex_jax.checkpoint import Checkpointer, CheckpointError, Progress
from apex_jax.config import GPU_UPDATES_PER_CALL, Config
from apex_jax.environment import segment_spec
from apex_jax.errors import RunError
from apex_jax.metrics import Mean, MetricsWriter, RateMeter, resident_memory_bytes
from apex_jax.transport.codec import architecture_of
from apex_jax.types import IndexBatches, LearnerHello, SegmentSpec
from apex_jax.workers.process import ROLE_NUMBERS, StopSignal, new_run_id, process_rng
from apex_jax.workers.replay_stream import Item, ReplayStream, Segments
from apex_jax.workers.weights import WeightsPublisher

_log = logging.getLogger(__name__)

CALLS_IN_FLIGHT = 2  # update calls handed to the device whose priorities have not been fetched


class InFlight(NamedTuple):
    """An update call that the device may still be working on."""

    item: Item
    output: UpdateOutput


class Learner:
    """Owns the parameters and the frame store. Nothing in its loop waits for the device but the oldest call in flight."""

    def __init__(self, config: Config, spec: SegmentSpec, context: zmq.Context, name: str = "learner"):
        """Restores the newest checkpoint of the run, if any, binds the weights link and joins the replay server."""
        self._config = config
        self._run_id = new_run_id()
        on_cpu = jax.default_backend() == "cpu"
        self._updates_per_call = config.learner.updates_per_call or (1 if on_cpu else GPU_UPDATES_PER_CALL)
        self._compute_dtype = compute_dtype(config, on_cpu)
        self._dqn = make_dqn(config, spec, self._compute_dtype)
        self._state = self._dqn.init(jax.random.key(int(process_rng(config.seed, ROLE_NUMBERS["learner"]).integers(2**31))))
        self._checkpointer = Checkpointer(config.directory, config.learner.checkpoints_kept)
        self._architecture = architecture_of(self._state.online_params)
        self._progress = self._restore()
        self._start_seconds = time.monotonic() - self._progress.elapsed_seconds
        self.updates = self._progress.updates
        self.environment_steps = self._progress.environment_steps
        self._publisher = WeightsPublisher(context, config.addresses.weights, self._run_id, self._progress.weights_version)
        self._publish()  # before anything is compiled: actors wait for it
        capacity_segments = max(2, config.replay.capacity_transitions // spec.max_transitions)
        _log.info(
            "learning on %s in %s; the frame store takes %.2f GB there",
            jax.devices()[0],
            self._compute_dtype.name,
            store_bytes(spec, capacity_segments) / 1e9,
        )
        self._store = create_store(spec, capacity_segments)
        hello = LearnerHello(
            run_id=self._run_id,
            agreement=config.agreement,
            environment_steps=self.environment_steps,
            batches_at_once=self._updates_per_call,
            batch_size=config.learner.batch_size,
        )
        groups = max(1, config.learner.prefetch_batches // self._updates_per_call)
        self._stream = ReplayStream(context, config.addresses.sampling, spec, hello, capacity_segments, groups)
        self._in_flight: deque[InFlight] = deque()
        self._newest_batches: IndexBatches | None = None
        self._metrics = MetricsWriter(config.directory, name)
        self._means = {tag: Mean() for tag in ("losses/td_loss", "losses/q_values", "losses/gradient_norm", "losses/priority_mean")}
        self._priority_max = 0.0
        self._waited_seconds = 0.0
        self._update_rate, self._wait_rate = RateMeter(), RateMeter()
        now = time.monotonic()
        self._next_publish = now
        self._next_checkpoint = now + config.learner.checkpoint_interval_seconds
        self._next_metrics = now + config.metrics_interval_seconds

    def run(self, stop: StopSignal) -> None:
        """Learns until `stop` is set or a limit of the run is reached, then saves a checkpoint."""
        reason = None
        while not stop.is_set() and (reason := self._limit_reached()) is None:
            started = time.monotonic()
            item = self._stream.next(timeout_seconds=0.1 if not self._in_flight else 0.0)
            if item is not None:
                self._consume(item)
            if self._in_flight and (item is None or len(self._in_flight) >= CALLS_IN_FLIGHT):
                self._collect()
            elif item is None:
                self._waited_seconds += time.monotonic() - started
            self._housekeeping()
        while self._in_flight:
            self._collect()
        self._write_metrics()
        if reason is not None:
            _log.info("the run is over: %s", reason)
            self._publish(final=True)
            self._stream.finish(reason)
        self._save()

    def close(self) -> None:
        """Ends the threads; waits until the last checkpoint is saved."""
        self._stream.close()
        self._publisher.close()
        self._checkpointer.close()

    def _consume(self, item: Item) -> None:
        content = item.content
        if isinstance(content, Segments):
            self._store = insert_segments(self._store, content.slots, content.frames, content.columns)
            self._stream.consumed(item)
            return
        self._state, output = self._dqn.update(self._state, self._store, content.indices, content.weights)
        for leaf in output:
            leaf.copy_to_host_async()
        self._in_flight.append(InFlight(item, output))
        self._newest_batches = content
        self.updates += self._updates_per_call
        self.environment_steps = max(self.environment_steps, content.environment_steps)
        self._stream.consumed(item)

    def _collect(self) -> None:
        """Sends the priorities of the oldest call in flight; waits for it if need be."""
        item, output = self._in_flight.popleft()
        output = jax.tree.map(np.asarray, output)
        if not np.isfinite(output.loss).all():
            raise RunError(
                f"the loss is not finite after about {self.updates} updates: lower learner.learning_rate (now"
                f" {self._config.learner.learning_rate}) or set algorithm.loss=huber; the last checkpoint is sound"
            )
        self._stream.update_priorities(item, output.priorities)
        arrays = (output.loss, output.q_value, output.gradient_norm, output.priorities)
        for mean, values in zip(self._means.values(), arrays, strict=True):
            mean.add(values)
        self._priority_max = max(self._priority_max, float(output.priorities.max()))

    def _limit_reached(self) -> str | None:
        config = self._config
        frames = self.environment_steps * config.environment.frame_skip
        minutes = (time.monotonic() - self._start_seconds) / 60
        if config.total_updates and self.updates >= config.total_updates:
            return f"{self.updates} updates"
        if config.total_environment_frames and frames >= config.total_environment_frames:
            return f"{frames} environment frames"
        if config.total_minutes and minutes >= config.total_minutes:
            return f"{minutes:.1f} minutes"
        return None

    def _housekeeping(self) -> None:
        now = time.monotonic()
        learner = self._config.learner
        if now >= self._next_publish:
            self._publish()
            self._next_publish = now + learner.publish_interval_seconds
        if now >= self._next_metrics:
            self._write_metrics()
            self._next_metrics = now + self._config.metrics_interval_seconds
        if now >= self._next_checkpoint:
            self._save()
            self._next_checkpoint = now + learner.checkpoint_interval_seconds

    def _publish(self, final: bool = False) -> None:
        self._publisher.publish(_copy(self._state.online_params), self.updates, self.environment_steps, final)

    def _restore(self) -> Progress:
        fresh = Progress(0, 0, 0.0, 0, self._config.agreement, self._architecture)
        restored = self._checkpointer.restore_newest(self._state, self._config.agreement, self._architecture)
        if restored is None:
            return fresh
        state, progress = restored
        self._state = jax.device_put(LearnerState(*state))
        _log.info("resuming from the checkpoint at %d updates", progress.updates)
        return progress

    def _save(self) -> None:
        self._progress = self._progress._replace(
            updates=self.updates,
            environment_steps=self.environment_steps,
            elapsed_seconds=time.monotonic() - self._start_seconds,
            weights_version=self._publisher.version,
        )
        try:
            self._checkpointer.save(self._state, self._progress)
        except CheckpointError as error:
            _log.error("%s; training goes on, and saving is tried again at the next interval", error)

    def _write_metrics(self) -> None:
        values = {
            "charts/updates_per_second": self._update_rate.update(self.updates),
            "charts/elapsed_minutes": (time.monotonic() - self._start_seconds) / 60,
            "learner/updates": self.updates,
            "learner/weights_version": self._publisher.version,
            "learner/wait_seconds_share": min(1.0, self._wait_rate.update(self._waited_seconds)),
            "system/resident_memory_bytes": resident_memory_bytes(),
        }
        for tag, mean in self._means.items():
            if mean.count:
                values[tag] = mean.result()
                mean.reset()
        if (batches := self._newest_batches) is not None:
            values["losses/priority_max"] = self._priority_max
            values["replay/sample_age_seconds"] = batches.age_seconds
            values["replay/samples_per_insert"] = batches.samples_per_insert
            self._priority_max, self._newest_batches = 0.0, None
        self._metrics.write(self.environment_steps * self._config.environment.frame_skip, values)


@jax.jit
def _copy(params: Any) -> Any:
    """Returns parameters of their own buffers, which the next update does not donate away."""
    return jax.tree.map(jnp.copy, params)


def compute_dtype(config: Config, on_cpu: bool) -> np.dtype[Any]:
    """Returns the dtype of the network's activations: bfloat16 is twice as fast on GPUs and half as fast on CPUs."""
    name = config.learner.compute_dtype
    return jnp.dtype({"auto": "float32" if on_cpu else "bfloat16"}.get(name, name))


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs the role; returns the process's exit code."""
    context = zmq.Context()
    learner = Learner(config, segment_spec(config), context, name)
    try:
        learner.run(stop)
    finally:
        learner.close()
        context.term()
    return stop.exit_code
