"""The learner: consumes the replay server's stream, updates the params, sends priorities back and publishes weights."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.algorithm import Algorithm, State, UpdateOutput, copy_params
from apex_jax.agent.frame_store import FrameStore, create_store, insert_segments
from apex_jax.agent.registry import make_algorithm, resolved
from apex_jax.agent.space_to_depth import frame_block_size
from apex_jax.config import Config
from apex_jax.device import accelerator_name, device_memory_bytes
from apex_jax.host.errors import DivergenceError, FatalError, RunError
from apex_jax.links.sampling_client import Batches, Received, SamplingClient, Segments
from apex_jax.links.weights_server import WeightsServer
from apex_jax.process import (
    ROLE_NUMBERS,
    STOPPING,
    SUPERVISED,
    StopSignal,
    acknowledge,
    digest_of_peer_id,
    new_peer_id,
    process_rng,
)
from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.run.environment_spec import record_environment_spec
from apex_jax.run.identity import new_identity
from apex_jax.run.metrics import Means, RateMeter
from apex_jax.run.provenance import check_resumable, record_accelerator, record_start, write_config
from apex_jax.segment_codec import value_limits
from apex_jax.transport.messages import LearnerHello
from apex_jax.transport.params_codec import architecture_of
from apex_jax.types import EnvironmentSpec, SegmentSpec
from apex_jax.workers.role import RoleContext, checked_description, open_role
from apex_jax.workers.run_counters import RunCounters, Saver

_log = logging.getLogger(__name__)

CALLS_IN_FLIGHT = 2  # update calls dispatched to the device whose priorities have not been fetched
MEMORY_SHARE = 0.9  # of the device's memory, for the frame store
SOON_SECONDS = 1.0  # in which a connected replay server acknowledges the end of the run
FINISH_SECONDS = 60.0  # timeout for delivering the end of the run to the others


class LearnerMetrics:
    """Accumulates update calls and waiting time, for the tags of `apex_jax.run.metrics.TAGS`."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0  # total time spent waiting for batches
        self._update_rate, self._wait_rate = RateMeter(), RateMeter()
        self._means = Means()
        self._others: dict[str, float] = {}  # that are no means

    def add(self, batches: Batches, output: UpdateOutput) -> None:
        """Adds a finished update call, with its output as NumPy arrays."""
        drawn, largest = batches.drawn, float(np.max(output.priorities))
        for tag, numbers in output.metrics.items():
            self._means.add(tag, numbers)
        self._means.add("losses/priority_mean", output.priorities)
        self._means.add("replay/sample_age_seconds", drawn.age_seconds)
        self._others["losses/priority_max"] = max(self._others.get("losses/priority_max", 0.0), largest)
        self._others["replay/samples_per_insert"] = drawn.samples_per_insert

    def take(self, updates: int) -> dict[str, float]:
        """Returns the metrics since the previous call. `updates`: of the run so far."""
        values = {
            "charts/updates_per_second": self._update_rate.update(updates),
            "learner/updates": updates,
            "learner/wait_seconds_share": min(1.0, self._wait_rate.update(self.waited_seconds)),
            **self._means.take(),
            **self._others,
        }
        self._others.clear()
        return values


@dataclass(eq=False)
class Learner:
    """The loop that learns, and its state: `open_learner` makes it, `learn_and_end` runs it and ends the run.

    While update calls are in flight, the loop blocks only on the oldest one.
    """

    role: RoleContext
    environment_spec: EnvironmentSpec
    peer_id: int  # of this process
    algorithm: Algorithm
    state: State
    store: FrameStore
    replay: SamplingClient
    weights: WeightsServer
    saver: Saver
    counters: RunCounters
    is_accepted: bool = False  # a replay server has welcomed this learner
    segments: int = 0  # received by this process
    metrics: LearnerMetrics = field(default_factory=LearnerMetrics)
    in_flight: deque[tuple[Received, UpdateOutput]] = field(default_factory=deque)  # the device may run these calls
    is_finished: bool = False  # the run is over, and its last checkpoint is saved
    is_start_due: bool = False  # this start is not yet in starts.jsonl
    are_settings_due: bool = False  # its settings are not yet in config.yaml
    record_failure: str = ""  # why these could not be written
    next_publish: float = 0.0
    next_metrics: float = 0.0

    def learn(self) -> str | None:
        """Learns; returns the limit that was reached, or None if the process was stopped first."""
        stop, reason = self.role.stop, None
        while not stop.is_set() and (reason := self.limit_reached()) is None:
            stop.beat()
            self.step()
        return reason

    def step(self) -> None:
        """Consumes the next item of the replay server, if any; publishes, writes metrics and saves when due."""
        item = self._draw()
        if item is not None:
            if isinstance(item.content, Segments):
                self._insert(item, item.content)
            else:
                self._update(item, item.content)
        if self.in_flight and (item is None or len(self.in_flight) >= CALLS_IN_FLIGHT):
            self.send_priorities()
        self._publish_and_save_when_due()

    def limit_reached(self) -> str | None:
        """Returns the text of a limit that the run has reached, or None."""
        return self.counters.limit_reached(self.weights.best_return)

    def _draw(self) -> Received | None:
        """Returns the next segments or batches of the replay server. Waits for them only if no call is in flight."""
        started, is_idle = time.monotonic(), not self.in_flight
        item = self.replay.next(timeout_seconds=0.1 if is_idle else 0.0)
        if is_idle:
            self.metrics.waited_seconds += time.monotonic() - started
        return item

    def _insert(self, item: Received, segments: Segments) -> None:
        self.segments += len(segments.ring_slots)
        self.store = insert_segments(self.store, segments.ring_slots, segments.frames, segments.columns)
        self.replay.consumed(item)

    def _update(self, item: Received, batches: Batches) -> None:
        """Dispatches an update call to the device."""
        share = self.counters.learning_rate_share()
        self.state, output = self.algorithm.update(self.state, self.store, batches.indices, batches.weights, share)
        for leaf in jax.tree.leaves(output):
            leaf.copy_to_host_async()
        self.in_flight.append((item, output))
        self.counters.updates += len(batches.indices)
        self.counters.count_steps(batches.drawn.replay_id, batches.drawn.environment_steps)
        self.replay.environment_steps = self.counters.environment_steps

    def send_priorities(self) -> None:
        """Waits for the oldest call in flight and sends its priorities."""
        item, output = self.in_flight.popleft()
        output = jax.tree.map(np.asarray, output)
        self._check_finite("loss", np.stack(list(output.metrics.values())))  # all metrics, not only the loss
        if math.isinf(self.saver.first_update_seconds):
            self.saver.first_update_seconds = self.counters.first_update_seconds = time.monotonic()
            self.are_settings_due = True  # not earlier: the settings of a run are those of its updates
            self._record()
        self.replay.update_priorities(item, output.priorities)
        self.replay.consumed(item)  # right after the priorities, so that both messages wake the server once
        assert isinstance(item.content, Batches)
        self.metrics.add(item.content, output)

    def _publish_and_save_when_due(self) -> None:
        now, config = time.monotonic(), self.role.config
        if not self.is_accepted and self.replay.peer_state == "joined":
            self.accept()
        if now >= self.next_publish and self.is_accepted and self.counters.updates != self.weights.updates:
            self.publish()
            self.next_publish = now + config.learner.publish_interval_seconds
        if now >= self.next_metrics:
            self.write_metrics()
            self._record()
            self.next_metrics = now + config.metrics_interval_seconds
        if self.saver.is_due(now):
            self.save()

    # Also called at the end of the run

    def settle(self) -> None:
        """Waits for all calls in flight. Raises DivergenceError if the params are not finite."""
        self.finish_calls()
        for leaf in jax.tree.leaves(self.algorithm.acting_params(self.state)):
            self._check_finite("network", np.asarray(leaf))

    def finish_calls(self) -> None:
        """Waits for all calls in flight, and sends their priorities."""
        while self.in_flight:
            self.send_priorities()

    def _check_finite(self, what: str, values: np.ndarray) -> None:
        config = self.role.config
        if not np.isfinite(values).all():
            raise DivergenceError(
                f"the {what} is not finite after about {self.counters.updates} updates: {config.fix_of_divergence};"
                f" the last checkpoint is sound; if this happens at each start, stop the replay server and delete its"
                f" {config.directory}/replay"
            )

    def accept(self) -> None:
        """Records the start: from now on, this learner may write to the run."""
        self.is_accepted = self.is_start_due = True
        self.are_settings_due |= not self.saver.checkpointer.saved_updates
        self._record()

    def _record(self) -> None:
        """Records the start and the settings of the run. If the disk takes none, the next metrics try again."""
        config = self.role.config
        try:
            if self.is_start_due:
                record = record_accelerator if SUPERVISED in os.environ else record_start
                record(config, accelerator=accelerator_name())
                self.is_start_due = False
            if self.are_settings_due:
                write_config(config, config.directory)
                record_environment_spec(config.directory, self.environment_spec)
                self.are_settings_due = False
        except OSError as error:
            if not self.record_failure:
                _log.error("cannot record the run (logged once, retried): %s; training goes on, make room", error)
            self.record_failure = f"cannot record the run: {error}"
        else:
            self.record_failure = ""

    def publish(self, final: bool = False) -> None:
        """Makes the current params available to actors and evaluator. `final`: the run has ended with them."""
        params = copy_params(self.algorithm.acting_params(self.state))
        self.weights.publish(params, self.counters.updates, self.counters.environment_steps, final)

    def save(self) -> None:
        """Starts saving a checkpoint, never of a state that has diverged."""
        self.settle()
        self.saver.save(self.state, self.counters.progress(self.weights.version, self.role.run_identity.name))

    def write_metrics(self) -> None:
        """Writes the metrics, but none before a replay server accepts this learner, which it may refuse."""
        if not self.is_accepted:
            return
        values = {
            "charts/learning_rate": self.role.config.learner.learning_rate * self.counters.learning_rate_share(),
            "charts/elapsed_minutes": self.counters.elapsed_seconds() / 60,
            "learner/weights_version": self.weights.version,
            "learner/replay_disconnects": self.replay.disconnects,
            "learner/failed_checkpoints": self.saver.checkpointer.failed_saves,
            "learner/checkpoint_age_seconds": self.saver.age_seconds(time.monotonic()),
            **self.metrics.take(self.counters.updates),
        }
        dropped = self.replay.dropped.copy() + self.weights.dropped.copy()
        self.role.write_metrics(self.counters.environment_steps, values, dropped)

    def describe(self) -> dict[str, Any]:
        """Returns the learner's part of its report. Callable from any thread."""
        errors = self.record_failure, str(self.saver.checkpointer.error or "")
        updates, age = self.saver.checkpointer.saved_updates, self.saver.age_seconds(time.monotonic())
        return {
            "peer_id": digest_of_peer_id(self.peer_id),
            "counts": {"updates": self.counters.updates, "segments": self.segments},
            "environment_frames": self.counters.environment_frames,
            "weights_version": self.weights.version,
            "checkpoint": {"updates": updates, "age_seconds": age} if updates else None,
            "errors": [error for error in errors if error],
            "finished": self.is_finished,
            "peers": {"replay": self.replay.peer_state, "weights_clients": len(self.weights.clients)},
        }


# The opening


def serve_weights(role: RoleContext, peer_id: int, first_version: int, architecture: str) -> WeightsServer:
    """Binds the weights link."""
    key = role.config.weights_compatibility_key
    return WeightsServer(role.link_end("weights"), peer_id, first_version, key, architecture)


def join_replay(role: RoleContext, spec: SegmentSpec, peer_id: int, environment_steps: int) -> SamplingClient:
    """Starts joining the replay server."""
    config, run = role.config, role.run_identity
    updates_per_call = config.learner.updates_of_a_call(jax.default_backend() == "cpu")
    hello = LearnerHello(
        peer_id=peer_id,
        compatibility_key=config.compatibility_key,
        environment_steps=environment_steps,
        batches_at_once=updates_per_call,
        batch_size=config.learner.batch_size,
        run_identity=run.name or new_identity(),
        is_new_run=not run.name,
    )
    return SamplingClient(
        role.link_end("sampling"),
        spec,
        hello,
        spec.ring_segments(config.replay.capacity_transitions),
        CALLS_IN_FLIGHT + max(1, config.learner.prefetch_batches // updates_per_call),
        config.replay.importance_sampling_exponent,
        value_limits(config),
    )


@contextlib.contextmanager
def open_learner(
    role: RoleContext,
    environment_spec: EnvironmentSpec,
    serve_weights: Callable[[RoleContext, int, int, str], WeightsServer] = serve_weights,
    join_replay: Callable[[RoleContext, SegmentSpec, int, int], SamplingClient] = join_replay,
) -> Iterator[Learner]:
    """Restores the run's newest checkpoint, if any, and opens the links, by default those to a fleet.

    Closes checkpointer and links on leaving, since their threads would keep the process alive.
    """
    config, spec, run = role.config, environment_spec.spec, role.run_identity
    dtype, peer_id = compute_dtype(config), new_peer_id()
    algorithm = make_algorithm(config, spec, dtype)
    shapes = jax.eval_shape(algorithm.init, jax.random.key(0))
    architecture = architecture_of(algorithm.acting_params(shapes))  # before the arrays take memory
    rng = process_rng(config.seed, ROLE_NUMBERS["learner"])
    state = algorithm.init(jax.random.key(int(rng.integers(2**31))))
    capacity_segments = spec.ring_segments(config.replay.capacity_transitions)
    try:
        memory_bytes = int(MEMORY_SHARE * device_memory_bytes())
        block_size = frame_block_size(config.network, spec.frame_shape)
        store = create_store(spec, capacity_segments, memory_bytes, block_size=block_size)
    except ValueError as error:
        raise FatalError(f"{jax.devices()[0]}: {error}") from None
    with contextlib.ExitStack() as opened:
        checkpointer = Checkpointer(config.directory, config.learner.checkpoints_kept)
        saver = Saver(config.learner, checkpointer)
        opened.callback(saver.close)  # once the last checkpoint is saved or has been given up
        key = resolved(config, spec).checkpoint_compatibility_key
        state, restored = _restore(checkpointer, state, key, architecture)
        run.adopt(restored.run_identity, f"the checkpoint in {checkpointer.directory}")
        counters = RunCounters(config, restored)
        weights = serve_weights(role, peer_id, restored.weights_version, architecture)
        opened.callback(weights.close)
        if run.name:  # otherwise published after the replay server has sent the run identity
            params = copy_params(algorithm.acting_params(state))  # before compilation, since actors wait for it
            weights.publish(params, counters.updates, counters.environment_steps)
        _log.info("learning on %s in %s", jax.devices()[0], dtype.name)
        replay = join_replay(role, spec, peer_id, counters.environment_steps)
        opened.callback(replay.close)
        yield Learner(role, environment_spec, peer_id, algorithm, state, store, replay, weights, saver, counters)


def _restore(checkpointer: Checkpointer, state: State, key: str, architecture: str) -> tuple[State, Progress]:
    """Returns the state and the progress of the newest checkpoint; of a new run if there is none."""
    restored = checkpointer.restore_newest(state, key, architecture)
    if restored is None:
        return state, Progress(0, 0, 0.0, 0, key, architecture)
    arrays, progress = restored
    _log.info("resuming from the checkpoint at %d updates", progress.updates)
    return jax.device_put(type(state)(*arrays)), progress


def compute_dtype(config: Config) -> np.dtype[Any]:
    """Returns the dtype of the network's activations.

    "auto" is float32 on every device: bfloat16 is slower on CPUs, and near convergence its rounding errors are as
    large as TD errors and thus priorities. Configurations for GPUs choose bfloat16, which is up to 1.5 times as fast.
    """
    name = config.learner.compute_dtype
    return jnp.dtype("float32" if name == "auto" else name)


# The ending


def learn_and_end(learner: Learner, learn: Callable[[], str | None]) -> None:
    """Calls `learn` until the process is stopped or a limit of the run is reached, then saves a checkpoint.

    Also saves one if the replay server refuses the learner in mid-run (RunError), but none on a DivergenceError.
    """
    stop, saver = learner.role.stop, learner.saver
    try:
        reason = learn()
        if stop.signal_number and not os.environ.get(SUPERVISED):  # otherwise the supervisor does so
            acknowledge(STOPPING)
        learner.settle()
    except FatalError:
        raise
    except RunError:
        if learner.counters.updates > saver.checkpointer.saved_updates:
            saver.save_last(learner.save, stop)
        raise
    if reason is not None and not learner.is_accepted:
        learner.accept()
    learner.write_metrics()
    # Saved before the peers end: if it fails, a restarted learner needs them to repeat its last updates.
    saver.save_last(learner.save, stop)
    if reason is not None:
        _log.info("the run is over: %s", reason)
        learner.is_finished = True
        learner.publish(final=True)
        learner.replay.finish(reason)
        _wait_for_others(learner)


def _wait_for_others(learner: Learner) -> None:
    """Waits until the replay server has the Finish and all clients have the final weights.

    Only the replay server, which may be restarting, can stop the actors; the evaluator needs the final weights.
    """
    stop, replay, started, is_logged = learner.role.stop, learner.replay, time.monotonic(), False
    while not stop.is_set() and not (replay.is_finish_received.is_set() and learner.weights.is_drained):
        stop.beat()
        stop.wait(0.02)
        waited_seconds = time.monotonic() - started
        if waited_seconds > SOON_SECONDS and not is_logged:
            is_logged = True
            others = "the replay server, which alone can end the actors"
            missing = "clients of its weights" if replay.is_finish_received.is_set() else others
            _log.info("waiting up to %.0f s for %s", FINISH_SECONDS, missing)
        if waited_seconds > FINISH_SECONDS:
            if not replay.is_finish_received.is_set():
                _log.warning("the replay server did not receive that the run is over: stop it and the actors by hand")
            return


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs the role and returns the process's exit code."""
    environment_spec = checked_description(config)
    with open_role(config, "learner", name, stop) as role:
        if stop.is_set():
            return stop.exit_code  # stopped while the run was fetched; starting would replace its remote copy
        check_resumable(config)
        try:
            with open_learner(role, environment_spec) as learner:
                role.describe = learner.describe
                learn_and_end(learner, learner.learn)
        except jax.errors.JaxRuntimeError as error:
            # The state cannot be saved: the failed update has donated its buffers.
            fix = "if its memory is full, lower replay.capacity_transitions or learner.batch_size"
            raise RunError(f"{jax.devices()[0]} failed: {str(error).splitlines()[0]}; {fix}") from None
    return stop.exit_code
