"""Metrics of one process: written for TensorBoard and as JSON lines, which can be read while they grow.

The x-axis of every chart is emulator frames of the whole run. Each process writes under its own name:

    <directory>/metrics/<name>.jsonl     one JSON object a line; a restarted process appends
    <directory>/tensorboard/<name>/      one event file for each start of the process

A line holds "time" (unix seconds), "seconds" (since the process started), "step" (frames), and a value for each tag.
Within one start of a process, "time" grows exactly as "seconds" does, so that a change of the wall clock does not move
the points of a chart.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike

from apex_jax.run.metric_files import append_event, append_line

_log = logging.getLogger(__name__)

TAGS: dict[str, str] = {
    "charts/environment_frames_per_second": "emulator frames a second of all actors; steady, less during evaluations",
    "charts/updates_per_second": "learner updates a second; steady, less during evaluations",
    "charts/learning_rate": "step size of the optimizer; constant, or falls to learner.final_learning_rate_share of it",
    "charts/elapsed_minutes": "minutes of learning, which in each start begin with its first update; grows",
    "charts/episodic_return": "mean return of training games, raw rewards, all exploration mixed; rises, below eval/",
    "charts/episodic_return_epsilon_<band>": "DQN: the same, of one band of epsilon; low bands rise first",
    "charts/episodic_return_noise_<band>": "DPG: the same, of one band of noise on the actions; rises",
    "charts/episodic_length": "mean length of training games, in agent steps; how it should move depends on the game",
    "charts/info_<name>": "mean of this number of metrics.info at the end of training games; as the environment says",
    "losses/td_loss": "importance-weighted loss, mean of a batch, of all critics together; bounded, need not fall",
    "losses/q_values": "mean q-value of the actions replayed; settles, growth without end is divergence",
    "own/<name>": "a metric of an algorithm of your own, mean of an update; as that algorithm says",
    "losses/gradient_norm": "global norm before clipping, of the q-network or critics; mostly below"
    " learner.max_gradient_norm",
    "losses/policy_loss": "DPG: minus the mean of q(s, pi(s)) of a batch; falls as the policy improves",
    "losses/policy_gradient_norm": "DPG: global norm of the policy's gradient before clipping; small, never 0",
    "losses/action_saturation": "DPG: share of the elements of pi(s) beyond 0.95 of their range, 0 to 1; near 1,"
    " the policy hardly learns any more",
    "losses/priority_mean": "mean new priority (absolute TD error) of a batch; shrinks relative to q_values",
    "losses/priority_max": "largest new priority of a batch; within a few times the largest n-step return",
    "learner/weights_version": "version of the weights last published; grows about every publish_interval_seconds",
    "learner/updates": "updates since the run began; grows",
    "learner/failed_checkpoints": "checkpoints that could not be saved since the process started; 0",
    "learner/checkpoint_age_seconds": "seconds since the newest checkpoint was complete, at first since the first"
    " update; below twice checkpoint_interval_seconds",
    "storage/failed_copies": "copies to storage.url that failed since the process started; 0",
    "storage/copy_age_seconds": "seconds since what is copied was up to date; below twice storage.interval_seconds",
    "learner/wait_seconds_share": "share of its time the learner waits for batches, 0 to 1; near 0 on a slow learner",
    "learner/replay_disconnects": "times the replay server was lost, since the learner began; 0",
    "eval/episodic_return": "mean return of full games with the newest weights; the result of the run",
    "eval/episodic_return_median": "median return of the same games; far from the mean = a few games decide",
    "eval/episodic_return_lowest": "lowest return of the same games; rises with the mean",
    "eval/episodic_return_highest": "highest return of the same games; rises with the mean",
    "eval/episodic_return_standard_deviation": "standard deviation of these returns; small beside the mean",
    "eval/episodes": "games of the evaluation; evaluator.episodes",
    "eval/seconds": "time that the evaluation took, seconds; grows with the length of the games",
    "eval/human_normalized_score": "episodic_return with random play as 0 and a human tester as 1; rises above 1",
    "eval/film_return": "return of the episode in the video, in the task's own simulator and not in EnvPool; near"
    " eval/episodic_return",
    "eval/info_<name>": "mean of this number of metrics.info at the end of these games; as the environment says",
    "eval/updates": "learner updates behind the evaluated weights; grows from one evaluation to the next",
    "eval/frames": "emulator frames behind the evaluated weights; grows from one evaluation to the next",
    "replay/size_transitions": "transitions in the replay; grows to its capacity and stays",
    "replay/bytes": "memory of the compressed segments and their columns, bytes; stays once the replay is full",
    "replay/samples_per_insert": "transitions drawn per transition stored; replay.samples_per_insert if that is set",
    "replay/sample_age_seconds": "mean age of the drawn transitions, seconds; below the replay's turnover time",
    "replay/inserts_per_second": "transitions stored a second; follows the actors",
    "replay/samples_per_second": "transitions drawn a second; updates_per_second x batch_size",
    "replay/dropped_<reason>": "what was refused for this reason since the start; 0, except stale, duplicate",
    "replay/actors": "actors connected; as many as were started",
    "replay/journal_bytes": "size of the log of segments on the disk, bytes; stays once the replay is full",
    "replay/journal_errors": "times the disk took no segments or snapshot, since the start of the server; 0",
    "ledger/produced": "transitions produced by all actors of the run, the sum of all that follow; grows",
    "ledger/stored": "transitions that were ever stored; grows, by far the most of those produced",
    "ledger/in_flight": "transitions that living actors have made and the replay has yet to store; bounded through"
    " actor.max_outstanding_segments and actor.environments",
    "ledger/lost_with_actor": "transitions that actors had when they were killed; 0, or some hundreds for each death",
    "ledger/lost_with_replay": "transitions acknowledged and then forgotten by the replay; 0, unless power failed, the"
    " disk did, or replay.journal is false",
    "ledger/dropped_<reason>": "transitions dropped for this reason; 0, but unsent where actors leave, and overflow"
    " where actor.overflow is drop",
    "actor/environment_steps": "agent steps since this actor began, each of which made a transition; grows",
    "actor/steps_per_second": "agent steps a second of this actor; steady",
    "actor/wait_seconds_share": "share of its time the actor waits for the replay to take segments, 0 to 1; near 0,"
    " more where replay.samples_per_insert makes it wait for the learner",
    "actor/replay_disconnects": "times the replay server was lost, since the actor began; 0",
    "actor/weights_age_seconds": "seconds since the actor's weights were published; near publish_interval_seconds",
    "system/resident_memory_bytes": "resident memory of the process, bytes; constant once the replay is full",
}
"""All tags, each with its unit and what is healthy; `<...>` stands for any ending."""

_OPEN_TAGS = tuple(tag.partition("<")[0] for tag in TAGS if "<" in tag)
TRAINING_TAG = "charts/episodic_return_"  # followed by the name of a band, see `Bands.names`
EVALUATED_RETURN = "eval/episodic_return"
TRAINING_INFO, EVALUATED_INFO = "charts/info_", "eval/info_"  # followed by a name in `metrics.info`


class Bands(NamedTuple):
    """Ranges of a measure of exploration; the returns of training games are reported separately for each range."""

    measure: str
    edges: tuple[float, ...]  # a band includes its lower edge
    largest: float  # largest possible value of the measure

    @property
    def names(self) -> list[str]:
        """The names of all bands, such as "epsilon_0.01_to_0.05"."""
        between = (f"{low:g}_to_{high:g}" for low, high in pairwise(self.edges))
        names = [f"below_{self.edges[0]:g}", *between, f"above_{self.edges[-1]:g}"]
        return [f"{self.measure}_{name}" for name in names]

    def split(self, exploration: np.ndarray, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """Splits `values` [N] by the band of `exploration` [N]: (name, values) of each band that is not empty."""
        bands = np.searchsorted(np.array(self.edges), np.asarray(exploration, np.float64), side="right")
        return [(self.names[band], values[bands == band]) for band in np.unique(bands).tolist()]


EPSILON_BANDS = Bands("epsilon", (0.01, 0.05, 0.2), 1.0)
NOISE_BANDS = Bands("noise", (0.1, 0.2, 0.4), 10.0)  # standard deviations, relative to actions in [-1, 1]


class MetricsWriter:
    """Writes the metrics of one process; no two live processes share a name.

    Disk errors are not raised: a record that cannot be written is lost and counted in `failed_writes`, the first error
    is logged, and the next write tries again. Each write opens and closes its files, so the writer needs no `close`.
    """

    def __init__(self, directory: str, name: str, has_tensorboard: bool = True) -> None:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"name is {name!r}: it becomes a file name, so use letters, digits, '.', '_' and '-' only")
        self.failed_writes = 0
        self._has_tensorboard = has_tensorboard
        self._started_at, self._started = time.time(), time.monotonic()
        self._lines_path = Path(directory, "metrics", f"{name}.jsonl")
        # Nanoseconds and the process id: a restart within the same second needs a file of its own.
        events_name = f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._events_path = Path(directory, "tensorboard", name, events_name)

    def write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Writes `values` at `step` environment frames.

        A value that is not finite is null in JSON and omitted in TensorBoard. Raises ValueError for a tag not in TAGS.
        """
        for tag in values:
            if not is_tag(tag):
                raise ValueError(f"unknown tag {tag!r}: apex_jax.run.metrics.TAGS explains every tag that is written")
        seconds = time.monotonic() - self._started
        now = self._started_at + seconds
        finite = {tag: float(value) for tag, value in values.items() if math.isfinite(value)}
        line = {"time": now, "seconds": seconds, "step": int(step)}
        text = json.dumps(line | {tag: finite.get(tag) for tag in values}) + "\n"
        self._try(self._lines_path, partial(append_line, line=text.encode()))
        if self._has_tensorboard:
            self._try(self._events_path, partial(append_event, now=now, step=int(step), values=finite))

    def _try(self, path: Path, append: Callable[[Path], None]) -> None:
        try:
            append(path)
        except OSError as error:
            self.failed_writes += 1
            if self.failed_writes == 1:
                _log.warning("cannot write metrics (logged once, retried at each write): %s: %s", path, error)


def is_tag(tag: str) -> bool:
    """Returns whether TAGS has this tag, or one with `<...>` for its ending."""
    return "<" not in tag and (tag in TAGS or any(tag.startswith(start) and tag != start for start in _OPEN_TAGS))


class RateMeter:
    """Turns a growing total into a rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, float] | None = None  # seconds, total
        self.rate = 0.0  # as of the last call

    def update(self, total: float) -> float:
        """Returns the growth per second since the last call; 0 at the first, and if a restart lowered the total."""
        now = self._clock()
        if self._last is None:
            self._last = (now, total)
        seconds = now - self._last[0]
        if seconds > 0:
            self.rate = max(0.0, (total - self._last[1]) / seconds)
            self._last = (now, total)
        return self.rate


class Mean:
    """Accumulates the mean of numbers and of the elements of arrays."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discards all numbers."""
        self.count = 0
        self._sum = 0.0

    def add(self, values: ArrayLike) -> None:
        """Adds a number, or every element of an array."""
        array = np.asarray(values, np.float64)
        self.count += array.size
        self._sum += float(array.sum())

    def result(self) -> float:
        """Returns the mean; NaN, for which a `MetricsWriter` writes null, if nothing was added."""
        return self._sum / self.count if self.count else math.nan


def resident_memory_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
