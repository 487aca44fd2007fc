"""The replay server: one thread and one poller around the replay buffer, without locks or decompression of pixels."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import zmq

from apex_jax.config import Config
from apex_jax.host.errors import printable
from apex_jax.item_codec import item_spec
from apex_jax.links.experience_server import EpisodeMeans, ExperienceServer
from apex_jax.links.sampling_server import SamplingServer
from apex_jax.process import ROLE_NUMBERS, StopSignal, digest_of_peer_id, process_rng
from apex_jax.replay.replay import Replay
from apex_jax.run.metrics import RateMeter
from apex_jax.segment_codec import max_body_bytes
from apex_jax.transport import sockets
from apex_jax.transport.sockets import ServerMonitor
from apex_jax.types import SegmentSpec
from apex_jax.workers.role import RoleContext, open_role, task_description

_log = logging.getLogger(__name__)

POLL_MILLISECONDS = 200
LEAVING_SECONDS = 5.0  # after the end of the run, for actors and learner to disconnect
STARTING_SECONDS = 30.0  # the same if no actor has joined yet: of a fleet that is started again after the end


class ReplayServer:
    """Owns the replay buffer of a run and serves it on two links until stopped, or until the learner ends the run."""

    def __init__(self, role: RoleContext, spec: SegmentSpec):
        """Binds both links and restores the run's journal. Raises BindError, JournalError."""
        self._role = role
        config, run = role.config, role.run_identity
        rng = process_rng(config.seed, ROLE_NUMBERS["replay"])
        self.replay = Replay(config, spec, rng, run.name)
        self._monitors = {link: ServerMonitor() for link in ("experience", "sampling")}
        with contextlib.ExitStack() as opened:
            opened.callback(self.replay.journal.close)

            def serve(link: str, max_message_bytes: int) -> zmq.Socket:
                address, monitor = getattr(config.addresses, link), self._monitors[link]
                socket = opened.enter_context(sockets.serve(link, role.sockets, address, monitor, max_message_bytes))
                opened.callback(monitor.close)
                return socket

            self.experience_socket = serve("experience", max_body_bytes(spec))
            self.sampling_socket = serve("sampling", 4 * config.learner.largest_sample)
            self.experience = ExperienceServer(self.experience_socket, config, spec, self.replay, run)
            self.sampling = SamplingServer(self.sampling_socket, config, self.replay, run)
            run.adopt(self.replay.restore(time.monotonic()), f"the replay in {config.directory}/replay")
            self._opened = opened.pop_all()
        self._metrics = ReplayMetrics(self.replay, config.environment.frame_skip)
        self._had_actors = False

    def run(self) -> None:
        """Serves until the process is stopped or the run is over."""
        stop = self._role.stop
        poller = zmq.Poller()
        poller.register(self.experience_socket, zmq.POLLIN)
        poller.register(self.sampling_socket, zmq.POLLIN)
        next_check = next_metrics = 0.0
        while not stop.is_set() and self.sampling.finished is None:
            stop.beat()
            poller.poll(POLL_MILLISECONDS)
            now = time.monotonic()
            self.serve(now)
            if now >= next_check:
                self.experience.evict_dead_peers(now)
                self.sampling.evict_dead_peers(now)
                self._monitors["experience"].count(self.experience.dropped)
                self._monitors["sampling"].count(self.sampling.dropped)
                self.replay.snapshot_if_due(now)
                next_check = now + 1.0
            if now >= next_metrics:
                self.write_metrics()
                next_metrics = now + self._role.config.metrics_interval_seconds
        self._finish(stop)

    def serve(self, now_seconds: float) -> None:
        """Handles the pending messages of each link for one turn, stores segments and streams to the learner."""
        self.experience.read(now_seconds)
        self._had_actors = self._had_actors or bool(self.experience.actors)
        self.sampling.read(now_seconds)
        if not self.sampling.is_in_arrears:
            self.experience.store(now_seconds)
        else:
            self.replay.journal.flush(now_seconds)
        self.sampling.stream(now_seconds)

    def close(self) -> None:
        """Closes the sockets and the journal. Segments newer than the last snapshot are in the journal's log."""
        self._opened.close()

    def describe(self) -> dict[str, Any]:
        """Returns the server's part of its report. Callable from any thread."""
        learner, batches = self.sampling.learner, self.replay.limiter.sampled // self._role.config.learner.batch_size
        return {
            "counts": {"segments": self.replay.buffer.inserted_segments, "batches": batches},  # since the run began
            "environment_frames": self._run_steps * self._role.config.environment.frame_skip,
            "errors": self.replay.journal.failures,
            "peers": {
                "learner": None if learner is None else {"peer_id": digest_of_peer_id(learner.peer_id)},
                "actors": [
                    {
                        "peer_id": digest_of_peer_id(actor.peer_id),
                        "steps_per_second": actor.status.steps_per_second,
                        "weights_version": actor.status.weights_version,
                    }
                    for actor in list(self.experience.actors.values())
                ],
            },
        }

    def _finish(self, stop: StopSignal) -> None:
        """Writes the last metrics and snapshot; if the run is over, drains the peers first."""
        self.write_metrics()
        if self.sampling.finished is not None:
            self._drain(self.sampling.finished, stop)
            self.write_metrics()
        self.replay.finish(time.monotonic())

    def _drain(self, reason: str, stop: StopSignal) -> None:
        _log.info("the run is over: %s", printable(reason))
        until = time.monotonic() + (LEAVING_SECONDS if self._had_actors else STARTING_SECONDS)
        while time.monotonic() < until and not stop.is_set():
            if self._had_actors and not (self.experience.actors or self.sampling.learner):
                break
            stop.beat()
            self.experience.finish(reason)  # repeated for actors whose queue was full or that have just joined
            self.experience_socket.poll(POLL_MILLISECONDS)
            self.experience.read(time.monotonic())
            self.sampling.read(time.monotonic())  # the learner repeats its Finish until it is answered
        self.experience.store(time.monotonic())

    @property
    def _run_steps(self) -> int:
        """Environment steps of the run: the learner's count, or this server's own if that is larger."""
        return max(self.sampling.run_steps, self.replay.ledger.steps)

    def write_metrics(self) -> None:
        """Writes the metrics of both links and of the replay."""
        experience, sampling = self.experience, self.sampling
        values = self._metrics.take(experience.episodes, len(experience.actors))
        self._role.write_metrics(self._run_steps, values, experience.dropped + sampling.dropped)


class ReplayMetrics:
    """The metrics of a replay, from one write to the next."""

    def __init__(self, replay: Replay, frame_skip: int):
        self._replay, self._frame_skip = replay, frame_skip
        self._rates = {tag: RateMeter() for tag in ("frames", "inserts", "samples")}

    def take(self, episodes: EpisodeMeans, actors: int) -> dict[str, float]:
        """Returns the values by tag. `episodes`: since the last call; `actors`: how many are connected."""
        replay = self._replay
        return {
            "charts/environment_frames_per_second": self._rates["frames"].update(
                replay.ledger.steps * self._frame_skip
            ),
            **replay.metrics(),
            "replay/inserts_per_second": self._rates["inserts"].update(replay.limiter.inserted),
            "replay/samples_per_second": self._rates["samples"].update(replay.limiter.sampled),
            "replay/actors": actors,
            **{f"ledger/{outcome}": transitions for outcome, transitions in replay.ledger.totals().items()},
            **episodes.means.take(),
        }


def run(config: Config, name: str, stop: StopSignal) -> int:
    """Runs the role and returns the process's exit code."""
    spec = item_spec(config) if config.replay.columns else task_description(config).spec
    with open_role(config, "replay", name, stop) as role:
        if stop.is_set():
            return stop.exit_code
        server = ReplayServer(role, spec)
        role.describe = server.describe
        _log.info(
            "replay of %d segments (%d transitions) on %s and %s",
            server.replay.buffer.capacity_segments,
            server.replay.buffer.capacity_segments * spec.max_transitions,
            config.addresses.experience,
            config.addresses.sampling,
        )
        with contextlib.closing(server):
            server.run()
    return stop.exit_code
