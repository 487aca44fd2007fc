"""Peers cannot flood a log: so many lines an interval, then a count of those left out."""

from __future__ import annotations

import logging

import pytest

from apex_jax.links import limited_log
from apex_jax.links.limited_log import INTERVAL_SECONDS, LimitedLog


def test_lines_beyond_the_limit_are_counted_and_the_next_interval_logs_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_log, "LINES_AT_ONCE", 3)
    caplog.set_level(logging.INFO)
    log = LimitedLog(logging.getLogger("a fleet"))
    log.tick(100.0)
    for number in range(5):
        log.info("actor %d has joined", number)
    log.warning("actor %d is gone", 5)
    assert [record.getMessage() for record in caplog.records] == [f"actor {number} has joined" for number in range(3)]
    caplog.clear()
    log.tick(100.0 + INTERVAL_SECONDS - 0.1)
    assert caplog.records == []
    log.tick(100.0 + INTERVAL_SECONDS)
    [record] = caplog.records
    assert record.getMessage().startswith("3 more lines")
    log.info("actor %d has joined", 6)
    assert caplog.records[-1].getMessage() == "actor 6 has joined"


def test_interval_within_the_limit_logs_no_count_of_suppressed_lines(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(logging.getLogger("a fleet"))
    for seconds in (0.0, 100.0, 200.0):
        log.tick(seconds)
        log.warning("actor-1 is gone")
    assert len(caplog.records) == 3
