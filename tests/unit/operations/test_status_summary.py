"""The first lines of a status say what a process does, how fast, with which peers, and what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from apex_jax.operations.status_summary import MAX_LINES, as_text, summary

LEARNER: dict[str, Any] = {
    "role": "learner",
    "healthy": True,
    "updates": 12_345,
    "environment_frames": 1_234_567,
    "weights_version": 1_234,
    "checkpoint": {"updates": 12_000, "age_seconds": 61.5},
    "peers": {"replay": "joined", "weights_clients": 2},
    "metrics": {
        "charts/updates_per_second": 277.125,
        "learner/wait_seconds_share": 0.03,
        "replay/dropped_stale_priority": 9,
    },
}


def test_summary_of_a_learner_at_work() -> None:
    assert list(summary(LEARNER)) == [
        ("now", "learns"),
        ("speed", "277.12 updates/s, waits 3% of the time"),
        ("progress", "12,345 updates, 1,234,567 environment frames, weights version 1234"),
        ("checkpoint", "at 12,000 updates, 0:01:01 old"),
        ("peers", "replay joined, weights clients 2"),
        ("problems", "none"),
    ]


@pytest.mark.parametrize(("report", "activity"), [
    (LEARNER | {"metrics": {}}, "waits for batches, or compiles"),
    (LEARNER | {"metrics": {}, "peers": {"replay": "connecting"}}, "waits for replay (connecting)"),
    ({"role": "actor", "metrics": {"actor/steps_per_second": 9.0}, "peers": {"learner": "lost"}}, "acts"),
    ({"role": "replay", "metrics": {"replay/inserts_per_second": 0.0}}, "waits for segments"),
    ({"role": "evaluator", "phase": "playing", "weights_version": 3}, "playing"),
    ({"role": "evaluator", "phase": "playing", "weights_version": None}, "waits for weights"),
])  # fmt: skip
def test_summary_shows_the_work_of_each_role(report: dict[str, Any], activity: str) -> None:
    assert dict(summary(report))["now"] == activity


def test_learner_that_has_saved_nothing_has_no_checkpoint() -> None:
    assert dict(summary(LEARNER | {"checkpoint": None}))["checkpoint"] == "none yet"


def test_summary_counts_the_peers_of_a_replay_server() -> None:
    report = {"role": "replay", "peers": {"learner": None, "actors": [{"peer_id": "a"}, {"peer_id": "b"}]}}
    assert dict(summary(report))["peers"] == "no learner, 2 actors"


def test_summary_lists_every_problem_up_to_its_limit() -> None:
    report = LEARNER | {
        "healthy": False,
        "progress_age_seconds": 75.0,
        "peers": {"replay": "lost"},
        "unreadable_keys": {"actor": "Permission denied"},
        "metrics": {"learner/failed_checkpoints": 2, "replay/dropped_bad_checksum": 1_000, "replay/journal_errors": 0},
    }
    rows = list(summary(report))
    problems = [
        "no progress for 75.00 s",
        "is not connected to replay (lost)",
        "keys of actor cannot be read: Permission denied",
        "learner/failed_checkpoints 2",
        "replay/dropped_bad_checksum 1,000",
    ]
    assert [text for _, text in rows[-len(problems) :]] == problems
    many = {"metrics": {f"replay/dropped_{number}": 1 for number in range(MAX_LINES + 3)}}
    assert list(summary(many))[-1] == ("", "and 3 more, see below")


def test_summary_of_a_supervisor_has_a_line_for_each_role() -> None:
    lost = {"role": "actor", "peers": {"replay": "lost"}, "metrics": {"actor/steps_per_second": 0.0}}
    report = {
        "roles": {"learner": "running", "actor-0": "restarted 1x"},
        "reports": {"learner": LEARNER, "actor-0": lost},
    }
    assert list(summary(report)) == [
        ("learner", "running, learns, 277.12 updates/s, waits 3% of the time"),
        ("actor-0", "restarted 1x, waits for replay (lost), 0.00 steps/s"),
        ("problems", "actor-0: is not connected to replay (lost)"),
    ]


@pytest.mark.parametrize("name", ["pid", "reports.learner.pid", "versions.protocol", "metrics.learner/weights_version"])
def test_name_that_is_a_number_has_no_separators(name: str) -> None:
    assert as_text(name, 26_390) == "26390"
