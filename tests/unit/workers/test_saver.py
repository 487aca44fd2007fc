"""A saver starts checkpoints when they are due, retries the last one, and ends a run that cannot save."""

from __future__ import annotations

from typing import cast
from unittest import mock

import pytest

from apex_jax.config import LearnerConfig
from apex_jax.host.errors import FatalError
from apex_jax.process import StopSignal
from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.workers import run_counters
from apex_jax.workers.run_counters import Saver

pytestmark = pytest.mark.timeout(480)

STATE, PROGRESS = object(), Progress(1, 1, 0.0, 1, "key", "architecture")
INTERVAL = 600.0


class Clock:
    """Time that passes only while somebody sleeps, or the test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class FalseCheckpointer:
    """A checkpointer whose saves last and end as the test says."""

    directory = "run/checkpoints"

    def __init__(self, clock: Clock, lasts_seconds: float = 0.0, fails: bool = False, saved_updates: int = 0) -> None:
        self.error: str | None = None
        self.saved_seconds = 0.0
        self.saved_updates, self.failed_in_a_row = saved_updates, 0
        self.saves: list[float] = []  # when each began
        self.closed_with: list[float] = []
        self.lasts_seconds, self.fails = lasts_seconds, fails
        self._clock = clock

    @property
    def is_saving(self) -> bool:
        return bool(self.saves) and self._clock.seconds < self.saves[-1] + self.lasts_seconds

    def save(self, state: object, progress: Progress) -> None:
        self.saves.append(self._clock.seconds)
        self.error = "No space left on device" if self.fails else None
        self.failed_in_a_row = self.failed_in_a_row + 1 if self.fails else 0
        self.saved_updates = self.saved_updates if self.fails else progress.updates

    def close(self, seconds: float) -> None:
        self.closed_with.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(run_counters, "time", clock)
    return clock


def saver_of(checkpointer: FalseCheckpointer, clock: Clock, limit: int = 0) -> Saver:
    settings = LearnerConfig(checkpoint_interval_seconds=INTERVAL, failed_checkpoints_limit=limit)
    return Saver(settings, cast(Checkpointer, checkpointer))


def saves_in(
    seconds: int, of: Saver, clock: Clock, checkpointer: FalseCheckpointer, first_update: int = 0
) -> list[float]:
    """Returns when saves begin if a learner asks each second; updates are made from `first_update` seconds on."""
    begun, before = clock.seconds, len(checkpointer.saves)
    for second in range(seconds):
        clock.seconds = begun + second
        if second >= first_update:
            of.first_update_seconds = min(of.first_update_seconds, clock.seconds)
        if of.is_due(clock.seconds):
            of.save(STATE, PROGRESS)
    return [at - begun for at in checkpointer.saves[before:]]


@pytest.mark.parametrize(("saved", "lasts", "first_update", "times"), [
    (0, 0.0, 100, [100 + run_counters.FIRST_CHECKPOINT_SECONDS + INTERVAL * number for number in range(4)]),
    (500, 0.0, 0, [INTERVAL, 2 * INTERVAL, 3 * INTERVAL]),  # resumed
    (500, 700.0, 0, [600, 1300]),  # none starts while one is in progress
])  # fmt: skip
def test_first_checkpoint_is_early_from_the_first_update_on_and_the_next_follow_at_the_interval(
    clock: Clock, saved: int, lasts: float, first_update: int, times: list[float]
) -> None:
    checkpointer = FalseCheckpointer(clock, lasts, saved_updates=saved)
    subject = saver_of(checkpointer, clock)
    assert subject.age_seconds(clock.seconds + 1000) == 0, "or the run would be told that its disk is full"
    assert saves_in(2000, subject, clock, checkpointer, first_update) == times


def test_failed_save_is_retried_sooner_and_the_interval_holds_after_a_success(clock: Clock) -> None:
    checkpointer = FalseCheckpointer(clock, fails=True, saved_updates=500)
    subject = saver_of(checkpointer, clock)
    assert saves_in(660, subject, clock, checkpointer) == [600, 630]
    checkpointer.fails = False
    clock.seconds += 1
    assert saves_in(660, subject, clock, checkpointer) == [0, 600]


def test_consecutive_failures_end_the_run_at_the_limit_if_there_is_one(clock: Clock) -> None:
    endless = FalseCheckpointer(clock, fails=True)
    assert len(saves_in(900, saver_of(endless, clock), clock, endless)) > 20
    checkpointer = FalseCheckpointer(clock, fails=True)
    subject = saver_of(checkpointer, clock, limit=3)
    with pytest.raises(FatalError, match=r"3 checkpoints in a row .*No space left on device"):
        saves_in(900, subject, clock, checkpointer)
    assert len(checkpointer.saves) == 3
    subject.close()
    assert checkpointer.closed_with == [0.0], "nobody waits for a save that was given up"


def test_save_that_does_not_end_counts_a_failure_for_each_interval(clock: Clock) -> None:
    checkpointer = FalseCheckpointer(clock, lasts_seconds=1e9)
    subject = saver_of(checkpointer, clock, limit=2)
    begun = run_counters.FIRST_CHECKPOINT_SECONDS
    assert saves_in(int(begun + 2 * INTERVAL), subject, clock, checkpointer) == [begun]
    with pytest.raises(FatalError, match="2 checkpoints in a row"):
        subject.is_due(clock.seconds + 1)


def test_last_save_is_tried_again_after_a_pause_and_succeeds_once(clock: Clock) -> None:
    checkpointer, stop = FalseCheckpointer(clock, lasts_seconds=1.0), StopSignal()
    subject = saver_of(checkpointer, clock)

    def save() -> None:
        checkpointer.fails = len(checkpointer.saves) == 0
        subject.save(STATE, PROGRESS)

    subject.save_last(save, stop)
    first, second = checkpointer.saves
    assert second - first == pytest.approx(1.0 + run_counters.LAST_PAUSE_SECONDS, abs=0.1)
    subject.close()
    assert checkpointer.closed_with == [run_counters.LAST_SAVE_SECONDS]


def test_last_save_that_fails_each_time_is_an_error_with_the_reason_and_the_place(clock: Clock) -> None:
    checkpointer = FalseCheckpointer(clock, fails=True)
    subject = saver_of(checkpointer, clock)
    with pytest.raises(FatalError, match=r"No space left on device; make run/checkpoints writable"):
        subject.save_last(lambda: subject.save(STATE, PROGRESS), StopSignal())
    assert len(checkpointer.saves) == run_counters.LAST_SAVES
    subject.close()
    assert checkpointer.closed_with == [0.0]


def test_last_save_waits_for_a_save_in_progress_within_its_time_limit_and_sends_heartbeats(clock: Clock) -> None:
    checkpointer, stop = FalseCheckpointer(clock, lasts_seconds=10.0), mock.Mock(spec=StopSignal)
    subject = saver_of(checkpointer, clock)
    subject.save(STATE, PROGRESS)
    subject.save_last(lambda: subject.save(STATE, PROGRESS), stop)
    first, last = checkpointer.saves
    assert 10.0 <= last - first < 11.0
    assert stop.beat.call_count > 100
    checkpointer.lasts_seconds = 1e9
    with pytest.raises(FatalError, match="the disk has not answered for 30 s"):
        subject.save_last(lambda: subject.save(STATE, PROGRESS), stop)
    assert checkpointer.saves == [first, last], "none starts behind one that does not end"
