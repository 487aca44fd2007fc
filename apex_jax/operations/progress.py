"""The progress of a local run, read from the metrics of all its processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from apex_jax.config import Config
from apex_jax.operations.diagnosis import Diagnosis
from apex_jax.run.metrics import MetricsFollower

SOUND_SECONDS = 5.0  # of learning before its pace is used to estimate the time left


class EvaluationSummary(NamedTuple):
    """Result of the evaluator."""

    episode_return: float
    human_normalized: float | None  # as a fraction; None for games without a human score
    updates: int | None  # of the weights; None if the metrics do not include it


@dataclass(frozen=True)
class RunProgress:
    """State of a run at one moment."""

    phase: str  # see `ProgressReader._phase`; "finishing" once a limit is reached
    elapsed_seconds: float
    frames: int  # emulator frames of the whole run
    frames_per_second: float
    updates: int
    updates_per_second: float
    replay_size: int  # transitions
    samples_per_insert: float
    training_return: float | None  # mean of the actors' last games
    latest_evaluation: EvaluationSummary | None
    best_evaluation: EvaluationSummary | None
    seconds_left: float | None  # until the nearest limit of the run; None if it is not known
    memory_bytes: int  # of all processes
    roles: Mapping[str, str] = field(default_factory=dict)  # name of a process -> short state; known to a supervisor
    warnings: tuple[str, ...] = ()  # problems, with the key to change
    reached_limits: tuple[str, ...] = ()  # of the run, as KEY=VALUE
    share: float | None = None  # fraction of the run that is done, 0 to 1, by its nearest limit; None without limits
    film: str | None = None  # about that in the task's own simulator, at the end of a run; None if it has none


@dataclass
class _Role:
    """The metrics that one process has written since the reader was created."""

    follower: MetricsFollower
    last: dict[str, Any] | None = None
    newest: dict[str, float] = field(default_factory=dict)  # value of each tag
    read_seconds: float = 0.0  # time at which `last` was read


class ProgressReader:
    """Follows the metrics of all processes of a local run.

    Create it before the processes start: existing lines are taken for those of earlier starts, of which only frames,
    updates, minutes and evaluations are used.
    """

    def __init__(self, run_directory: str, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds, because the wall clock, whose times the files hold, may be set back."""
        names = ["learner", "replay", *(f"actor-{i}" for i in range(config.actor.processes)), "evaluator"]
        paths = {name: Path(run_directory, "metrics", f"{name}.jsonl") for name in names}
        self._roles = {name: _Role(MetricsFollower(path)) for name, path in paths.items()}
        self._config = config
        self._clock = clock
        self._started = clock()
        self._values: dict[str, float] = {}  # newest value of each tag, of any process
        self._learning = False
        self._learning_began: tuple[float, float] | None = None  # time and share of the run
        self._evaluations: list[EvaluationSummary] = []
        self._past_frames = 0  # reached by earlier starts of the run
        self._past_updates = 0
        self._past_minutes = 0.0  # of the learner
        self._read_history()
        self._diagnosis = Diagnosis(config)
        self._frames_grew = (self._started, self._past_frames)  # time and number of frames when they last grew

    def read(self) -> RunProgress:
        """Returns the progress as of now."""
        lines = [(role, line) for role in self._roles.values() for line in role.follower.read_new()]
        for role, line in sorted(lines, key=lambda each: each[1]["time"]):
            self._take(role, line)
        frames, updates = self._frames(), int(self._value("learner/updates", self._past_updates))
        shares = self._shares_of_limits(frames, updates)
        share = min(1.0, max(shares.values())) if shares else None
        reached = tuple(limit for limit, share in shares.items() if share >= 1)
        memory = [role.newest.get("system/resident_memory_bytes", 0.0) for role in self._roles.values()]
        return RunProgress(
            phase="finishing" if reached else self._phase(),
            elapsed_seconds=self._clock() - self._started,
            frames=frames,
            frames_per_second=self._value("charts/environment_frames_per_second"),
            updates=updates,
            updates_per_second=self._value("charts/updates_per_second"),
            replay_size=int(self._value("replay/size_transitions")),
            samples_per_insert=self._value("replay/samples_per_insert"),
            training_return=self._values.get("charts/episodic_return"),
            latest_evaluation=self._evaluations[-1] if self._evaluations else None,
            best_evaluation=max(self._evaluations, default=None, key=lambda evaluation: evaluation.episode_return),
            seconds_left=self._seconds_left(share) if share is not None and self._learning else None,
            memory_bytes=int(max(memory) if self._config.processes == "one" else sum(memory)),
            warnings=self._warnings(frames, ends=bool(reached)),
            reached_limits=reached,
            share=share,
        )

    def _read_history(self) -> None:
        for name, role in self._roles.items():
            for line in role.follower.read_new():
                self._evaluations += _evaluation_of(line)
                if name == "learner":
                    self._past_frames = line["step"]
                    self._past_updates = int(line.get("learner/updates") or self._past_updates)
                    self._past_minutes = line.get("charts/elapsed_minutes") or self._past_minutes

    def _take(self, role: _Role, line: dict[str, Any]) -> None:
        role.last, role.read_seconds = line, self._clock()
        self._evaluations += _evaluation_of(line)
        self._learning |= bool(line.get("charts/updates_per_second"))
        for tag, value in line.items():
            if value is not None:
                role.newest[tag] = self._values[tag] = value

    def _warnings(self, frames: int, ends: bool) -> tuple[str, ...]:
        now = self._clock()
        has_actor = any(role.last for name, role in self._roles.items() if name.startswith("actor-"))
        if frames != self._frames_grew[1] or not has_actor:
            self._frames_grew = (now, frames)
        values = self._values.copy()
        # The learner and the replay server both write these tags; the larger value counts.
        for tag in ("storage/failed_copies", "storage/copy_age_seconds"):
            values[tag] = max((role.last or {}).get(tag) or 0.0 for role in self._roles.values())
        for tag in [tag for tag in values if tag.startswith("replay/dropped_")]:  # which every role counts for itself
            values[tag] = sum(role.newest.get(tag, 0.0) for role in self._roles.values())
        ages = [(role.last or {}).get("actor/weights_age_seconds") or 0.0 for role in self._roles.values()]
        values["actor/weights_age_seconds"] = max(ages)
        return self._diagnosis.warnings(now, values, self._learning, now - self._frames_grew[0], ends)

    def _value(self, tag: str, default: float = 0.0) -> float:
        return self._values.get(tag, default)

    def _frames(self) -> int:
        """Returns the larger of the learner's and the replay server's counts of frames: the learner receives its count
        with batches, so it is out of date without them."""
        lines = (self._roles[name].last for name in ("learner", "replay"))
        return max((line["step"] for line in lines if line), default=0) or self._past_frames

    def _learner_seconds(self) -> float:
        """Returns the time that counts towards `total_minutes`: the learner's count plus the time since it was read."""
        learner = self._roles["learner"]
        since_seconds = self._clock() - learner.read_seconds if learner.last and self._learning else 0.0
        return self._value("charts/elapsed_minutes", self._past_minutes) * 60 + since_seconds

    def _shares_of_limits(self, frames: int, updates: int) -> dict[str, float]:
        """Returns how much of each limit of the run is reached, from 0, by KEY=VALUE."""
        minutes = self._learner_seconds() / 60
        reached = {"total_environment_frames": frames, "total_updates": updates, "total_minutes": minutes}
        ends = {key: getattr(self._config, key) for key in reached}
        shares = {f"{key}={end}": reached[key] / end for key, end in ends.items() if end > 0}
        goal = self._config.evaluator.stop_at_return
        if not goal:
            return shares
        is_reached = any(evaluation.episode_return >= goal for evaluation in self._evaluations)
        return {f"evaluator.stop_at_return={goal:g}": float(is_reached), **shares}

    def _phase(self) -> str:
        """Returns the phase of a run that has not reached a limit: the step that it waits for."""
        if self._learning:
            return "learning"
        if not self._roles["replay"].last:
            return "starting the replay server"
        if not self._roles["learner"].last:
            return "starting the learner"
        if self._value("replay/size_transitions") >= self._config.replay.min_size_to_sample:
            return "compiling the learner"
        return "filling the replay" if self._value("replay/size_transitions") else "starting the actors"

    def _seconds_left(self, share: float) -> float | None:
        """Returns the time until the nearest limit, at the pace since this start began to learn."""
        self._learning_began = self._learning_began or (self._clock(), share)
        seconds, done = self._clock() - self._learning_began[0], share - self._learning_began[1]
        return seconds * (1 - share) / done if seconds >= SOUND_SECONDS and done > 0 else None


def _evaluation_of(line: dict[str, Any]) -> list[EvaluationSummary]:
    episode_return = line.get("eval/episodic_return")
    if episode_return is None:
        return []
    updates = line.get("eval/updates")
    human = line.get("eval/human_normalized_score")
    return [EvaluationSummary(episode_return, human, None if updates is None else int(updates))]
