"""The supervisor's watch finds roles that live and do nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from apex_jax.operations.records import STARTING_SECONDS, STUCK_SECONDS, RoleWatch, report_path
from tests.rigs.live_views import Clock


class Reports:
    """A watch on a clock of its own, and what its roles write."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.clock = directory, Clock()
        self.watch = RoleWatch(str(directory), self.clock)
        self._written = 0

    def write(self, name: str, text: str = '{"healthy": true}') -> None:
        path = report_path(self.directory, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        self._written += 1
        os.utime(path, ns=(self._written, self._written))  # a file system may not tell two writes at once apart

    def passes(self, seconds: float, *writing: str) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            for name in writing:
                self.write(name)
            self.watch.look()


@pytest.fixture
def reports(tmp_path: Path) -> Reports:
    return Reports(tmp_path)


def test_a_role_that_no_longer_reports_is_found_and_one_that_starts_has_longer(reports: Reports) -> None:
    reports.write("replay")  # of an earlier start
    for name in ("learner", "replay"):
        reports.watch.started(name)
    reports.passes(STUCK_SECONDS + 5, "learner")
    assert [reports.watch.fault(name) for name in ("learner", "replay", "evaluator")] == 3 * [("", 0.0)]
    assert reports.watch.reports.keys() == {"learner"}
    reports.passes(STUCK_SECONDS + 5)
    assert reports.watch.fault("learner") == ("has not reported for 65 s", 65.0)
    reports.passes(STARTING_SECONDS)
    assert reports.watch.fault("replay")[1] > STARTING_SECONDS
    reports.watch.ended("learner")
    assert reports.watch.fault("learner") == ("", 0.0)
    reports.watch.started("learner")
    reports.passes(2, "learner")
    assert reports.watch.fault("learner") == ("", 0.0)


def test_a_role_that_reports_that_its_loop_stands_still_is_found(reports: Reports) -> None:
    reports.watch.started("learner")
    reports.write("learner", json.dumps({"healthy": False, "progress_age_seconds": 77.0}))
    reports.passes(1)
    assert reports.watch.fault("learner") == ("has made no progress for 77 s", 77.0)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"healthy": 0, "progress_age_seconds": []}'])
def test_a_role_that_has_no_room_to_report_lives(reports: Reports, text: str) -> None:
    reports.watch.started("learner")
    for _ in range(int(2 * STUCK_SECONDS)):
        reports.write("learner", text)
        reports.passes(1)
    assert reports.watch.fault("learner") == ("", 0.0)


def test_fault_12_silence_while_the_disk_takes_nothing_is_no_fault(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports.watch.started("learner")
    reports.passes(2, "learner")
    with monkeypatch.context() as patch:
        patch.setattr("os.utime", mock.Mock(side_effect=OSError("read-only file system")))
        reports.passes(3 * STUCK_SECONDS)
    assert reports.watch.fault("learner") == ("", 0.0)
    reports.passes(STUCK_SECONDS + 2)
    assert reports.watch.fault("learner")[1] > STUCK_SECONDS


def test_time_while_the_supervisor_is_stopped_does_not_count_as_silence(reports: Reports) -> None:
    reports.watch.started("replay")
    reports.passes(5, "replay")
    reports.clock.now += 5000.0  # a suspension
    reports.watch.look()
    assert reports.watch.fault("replay") == ("", 0.0)
