"""The supervisor's watch finds roles that live and do nothing."""

from __future__ import annotations

from unittest import mock

import pytest

from apex_jax.operations.role_watch import RoleWatch
from apex_jax.transport.status_link import StatusError
from tests.rigs.links import free_address, wait_until
from tests.rigs.statuses import Served, served

__all__ = ["served"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in dict(POLL=0.02, ANSWER=0.2, STARTING=0.0, STUCK=0.1).items():
        monkeypatch.setattr(f"apex_jax.operations.role_watch.{name}_SECONDS", seconds)


@pytest.mark.usefixtures("quick")
def test_watch_finds_a_silent_role_and_one_without_progress(served: Served) -> None:
    watch = RoleWatch({"learner": served.address, "replay": free_address(), "actor-0": "", "evaluator": free_address()})
    watch.start()
    for name in ("learner", "replay", "actor-0"):
        watch.started(name)
    wait_until(lambda: watch.fault("replay")[0])
    assert "has not answered for" in watch.fault("replay")[0]
    assert watch.fault("replay")[1] > 0
    wait_until(lambda: "learner" in watch.reports)
    assert [watch.fault(name) for name in ("learner", "actor-0", "evaluator")] == 3 * [("", 0.0)]
    served.healthy, served.content = False, {"role": "learner", "progress_age_seconds": 77.0}
    wait_until(lambda: watch.fault("learner") == ("has made no progress for 77 s", 77.0))
    watch.ended("learner")
    assert watch.fault("learner") == ("", 0.0)
    served.healthy = True
    watch.started("learner")
    wait_until(lambda: "learner" in watch.reports)
    assert watch.fault("learner") == ("", 0.0)
    watch.close()


@pytest.mark.usefixtures("quick")
def test_time_while_the_supervisor_is_stopped_does_not_count_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, asked = [1000.0], []

    def fetch(address: str, _: float) -> None:
        asked.append(address)
        raise StatusError("silent")

    monkeypatch.setattr("apex_jax.operations.role_watch.STARTING_SECONDS", 100.0)
    monkeypatch.setattr("apex_jax.operations.role_watch.time", mock.Mock(monotonic=lambda: seconds[0]))
    monkeypatch.setattr("apex_jax.operations.role_watch.fetch", fetch)
    watch = RoleWatch({"replay": "tcp://127.0.0.1:1"})
    watch.started("replay")
    watch.start()
    wait_until(lambda: asked)
    seconds[0] += 5000.0  # a suspension
    before = len(asked)
    wait_until(lambda: len(asked) > before + 2)
    assert watch.fault("replay") == ("", 0.0)
    watch.close()
