"""A fleet of simulated processes: its configuration by seed, its faults, and what must be true once they have ended."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

from apex_jax.config import ActorConfig, Config, LearnerConfig, ReplayConfig
from apex_jax.links.connection import LinkClient
from apex_jax.transport import sockets
from tests.rigs.links import TRANSITIONS
from tests.simulation.clock import Clock, Violation
from tests.simulation.disk import Disk, SimWriter
from tests.simulation.faults import Faults
from tests.simulation.invariants import Oracle
from tests.simulation.network import Network
from tests.simulation.processes import Process, ServerThread, SimEvent, start_client
from tests.simulation.roles import ActorProcess, EvaluatorProcess, LearnerProcess, ReplayProcess

CHECK_SECONDS = 10.0  # between two of the expensive checks
CHAOS_SECONDS = (60.0, 240.0)
GRACE_SECONDS = 60.0  # after the last fault, until all must have joined again
PROGRESS_SECONDS = 20.0  # in which all must advance then; longer if updates take longer


class Fleet:
    """One fleet. Its size, its configuration, its faults and their times follow from the seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.clock = clock = Clock(seed)
        self.network = Network(clock)
        self.disk = Disk(clock)
        rng = clock.rng
        self.actors = rng.randint(1, 4)
        self.environments = rng.randint(1, 4)
        self.overflow = rng.choice(("wait", "wait", "drop"))
        self.segment_seconds = rng.choice((1.0, 2.0, 5.0))
        self.update_seconds = rng.choice((0.3, 1.0, 3.0))
        self.checkpoint = 0, 0  # the learner's: updates, version of the weights
        self.capacity_segments = rng.choice((6, 16, 40))
        self.config = self._config()
        self.directory = directory
        self.oracle = Oracle(self)
        self.faults = Faults(self)
        self.makers: dict[str, Callable[[], Process]] = {
            "replay": partial(ReplayProcess, self),
            "learner": partial(LearnerProcess, self),
            **{f"actor{number}": partial(ActorProcess, self, number) for number in range(self.actors)},
            "evaluator": partial(EvaluatorProcess, self),
        }
        self.processes: dict[str, Process] = {}
        self.is_over = False  # the learner has ended the run

    def _config(self) -> Config:
        rng = self.clock.rng
        actor = replace(
            ActorConfig(),
            environments=self.environments,
            ladder_size=self.environments * self.actors + rng.randint(0, 3),
            max_outstanding_segments=rng.choice((1, 4, 8)),
        )
        replay = replace(
            ReplayConfig(),
            capacity_transitions=self.capacity_segments * TRANSITIONS,
            min_size_to_sample=24,
            samples_per_insert=rng.choice((0.0, 1.0, 2.0)),
            error_buffer=rng.choice((0.6, 1.0)),
            snapshot_interval_seconds=rng.choice((5.0, 20.0, 60.0)),
        )
        return Config(actor=actor, replay=replay, learner=replace(LearnerConfig(), batch_size=4, updates_per_call=2))

    def config_of_replay(self) -> Config:
        """Configuration of the replay server, which has a directory of its own."""
        links = {link: self.address(link) for link in ("experience", "sampling")}
        addresses = replace(self.config.addresses, **links)
        return self.config.replace(addresses=addresses, run_directory=self.directory_of("replay"))

    def directory_of(self, name: str) -> str:
        """Run directory of a process, which survives a restart."""
        return str(self.directory / name)

    def address(self, link: str) -> str:
        port = {"experience": 5_100, "sampling": 5_200, "weights": 5_300}[link]
        return f"tcp://127.0.0.1:{port}"

    def peer_id(self) -> int:
        return self.clock.rng.getrandbits(62)

    def identity(self) -> str:
        return f"{self.clock.rng.getrandbits(64):016x}"

    def start(self, name: str) -> None:
        """Starts a process unless it runs."""
        if name not in self.processes or not self.processes[name].is_alive:
            self.processes[name] = self.makers[name]()

    def replays(self) -> list[ReplayProcess]:
        """The replay server, if it runs."""
        return [each for each in self.processes.values() if isinstance(each, ReplayProcess) and each.is_alive]

    # The run

    def run(self, hours: float) -> None:
        """Runs for so many hours of virtual time: faults, then calm, again and again. Raises Violation."""
        end = self.clock.now + 3600 * hours
        with virtual(self):
            for name in self.makers:
                self.start(name)
            while self.clock.now < end:
                self.faults.begin()
                self._advance(self.clock.between(*CHAOS_SECONDS))
                self.faults.end()
                self._advance(GRACE_SECONDS)
                self._check_progress()
            self._finish()
            for process in self.processes.values():
                process.die()

    def _advance(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.run(min(end, self.clock.now + CHECK_SECONDS))
            self.oracle.check_all()

    def _check_progress(self) -> None:
        """All processes are joined and advance, since nothing has been broken for GRACE_SECONDS."""
        seconds = PROGRESS_SECONDS * max(1.0, self.update_seconds)  # the rate limiter holds the actors to its pace
        before = self._progress()
        self._advance(seconds)
        after = self._progress()
        for name, (state, count) in after.items():
            stuck = state != "joined" or count <= before[name][1]
            if stuck:
                raise Violation(f"{name} waits for ever: {before[name]}, {seconds:.0f} s later {after[name]}")

    def _finish(self) -> None:
        """The learner ends the run: all others learn of it, and no transition is in flight any more."""
        learner = self.processes["learner"]
        assert isinstance(learner, LearnerProcess)
        self.is_over = True
        learner.finish()
        self._advance(PROGRESS_SECONDS)
        left = [name for name, process in self.processes.items() if name.startswith("actor") and process.is_alive]
        if left or not learner.replay.is_finish_received.is_set() or not learner.weights.is_drained:
            what = f"{learner.replay.is_finish_received.is_set()} {learner.weights.is_drained}"
            raise Violation(f"the end of the run does not reach all: {left} {what}")
        self.oracle.check_drained()

    def _progress(self) -> dict[str, tuple[str, int]]:
        """State and a count that must grow, by name."""
        progress = {}
        for process in self.processes.values():
            if isinstance(process, ActorProcess):
                progress[process.name] = process.stream.peer_state, process.stream.acknowledged
            if isinstance(process, LearnerProcess):
                progress["learner"] = process.replay.peer_state, process.updates
            if isinstance(process, ActorProcess | EvaluatorProcess):
                version = process.in_use.version if process.in_use is not None else 0
                progress[f"weights of {process.name}"] = process.weights.peer_state, version
        return progress


@contextlib.contextmanager
def virtual(fleet: Fleet) -> Iterator[None]:
    """Gives the modules of the links the clock and the disk of the fleet, and keeps them quiet."""
    clock, disk = fleet.clock, fleet.disk

    def writer(*args):
        made = SimWriter(*args)
        made.clock = clock
        return made

    timed = (
        "links.weights_server",
        "transport.sockets",
        "workers.replay_server",
    )
    changes = {
        **{f"{module}.time": clock for module in timed},
        "links.sampling_client.threading": mock.Mock(Event=partial(SimEvent, clock)),
        "links.weights_server.threading": mock.Mock(Thread=ServerThread, Event=threading.Event),
        "replay.header.new_identity": fleet.identity,
        "replay.journal.SnapshotWriter": writer,
        "replay.experience_log.FILE_BYTES": 8_000,
        "replay.experience_log.os": disk,
        "replay.experience_log.synchronize": disk.synchronize,
        "host.disk.synchronize": disk.synchronize,
    }
    with contextlib.ExitStack() as changed:
        for name, value in changes.items():
            changed.enter_context(mock.patch(f"apex_jax.{name}", value))
        start = partial(start_client, clock=clock)
        changed.enter_context(mock.patch.object(LinkClient, "_start", lambda *args: start(*args)))
        changed.enter_context(mock.patch.object(sockets.reading_turn, "__defaults__", (clock.reading_clock,)))
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        changed.callback(logging.disable, before)
        yield
