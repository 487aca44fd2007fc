"""The progress of a role: what it counts, how long ago that grew, its warnings, and its line in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from apex_jax.config import Config, LearnerConfig
from apex_jax.operations import role_progress
from apex_jax.operations.diagnosis import PATIENCE_SECONDS
from apex_jax.operations.role_progress import RoleProgress
from apex_jax.process import SUPERVISED
from tests.rigs.links import wait_until

CONFIG = Config(learner=LearnerConfig(batch_size=10))


def test_age_of_a_count_is_the_time_since_it_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"updates": 500}  # of a resumed run
    progress = RoleProgress(CONFIG, lambda: counts, dict)
    progress.look(100.0)
    monkeypatch.setattr(role_progress, "time", SimpleNamespace(monotonic=lambda: 130.0))
    assert progress.report()["progress"] == {"updates": {"count": 500, "age_seconds": 30.0, "has_changed": False}}
    counts["updates"] += 1
    progress.look(120.0)
    progress.look(125.0)
    assert progress.report()["progress"] == {"updates": {"count": 501, "age_seconds": 10.0, "has_changed": True}}


def warnings_after(metrics: dict[str, float], **counts: int) -> list[str]:
    """Returns the warnings once counts and metrics have grown for a while."""
    progress = RoleProgress(CONFIG, lambda: counts, lambda: metrics)
    for now in (0.0, 1.0, 2 * PATIENCE_SECONDS):
        progress.look(now)
        counts |= {name: number + 1 for name, number in counts.items()}
        metrics |= {tag: number + 1000 for tag, number in metrics.items() if tag == "ledger/stored"}
    return list(progress.report()["warnings"])


def test_each_role_has_the_warnings_of_a_local_run() -> None:
    [warning] = warnings_after({"learner/wait_seconds_share": 0.9}, updates=0)
    assert "the learner waits for batches 90% of the time" in warning
    [warning] = warnings_after({"ledger/stored": 0.0, "replay/samples_per_second": 20.0}, batches=0)
    assert "the learner is outrun" in warning
    assert "at 2 updates per second" in warning


@pytest.mark.parametrize("supervised", [False, True])
def test_a_role_of_a_fleet_logs_its_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, supervised: bool
) -> None:
    monkeypatch.setattr(role_progress, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(role_progress, "LINE_SECONDS", 0.02)
    monkeypatch.setenv(SUPERVISED, "1" if supervised else "")
    counts, looks = {"frames": 1000}, []

    def read() -> dict[str, int]:
        looks.append(counts["frames"])
        counts["frames"] += 1
        return counts

    with caplog.at_level(logging.INFO), RoleProgress(CONFIG, read, dict):
        wait_until(lambda: len(looks) > 20)
    lines = [record.message for record in caplog.records]
    assert bool(lines) != supervised
    assert all(line.startswith("progress in a minute: 1,0") and " frames (+" in line for line in lines)
