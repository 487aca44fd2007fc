"""A replay server that is killed and starts empty: the others wait for it and go on."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from apex_jax.config.load import load
from apex_jax.run.metric_files import read_metrics
from tests.rigs.fleet import Fleet
from tests.rigs.processes import ROOT, Programs, values

MINIMUM = load(ROOT / "configs" / "catch.yaml").replay.min_size_to_sample
LOST = re.compile(r"the replay server at \S+ is lost: looking for it")

pytestmark = pytest.mark.timeout(480)


def updates_at_rest(fleet: Fleet) -> float:
    """Waits until the learner has nothing left to learn from; returns its updates."""

    def last_two_seconds() -> list[float]:
        return values(fleet.directory, "learner", "learner/updates")[-8:]

    fleet.running["learner"].wait_until(lambda: len(set(last_two_seconds())) == 1)
    return last_two_seconds()[-1]


def updates_below_the_minimum(fleet: Fleet, replay_lines: int) -> set[float]:
    """Returns the learner's counts while the replay, after this many lines of metrics, was below its minimum."""
    replay, learner = (read_metrics(fleet.directory / "metrics" / f"{name}.jsonl") for name in ("replay", "learner"))
    small = [line["time"] for line in replay[replay_lines:] if line["replay/size_transitions"] < MINIMUM]
    return {line["learner/updates"] for line in learner if small[0] <= line["time"] <= small[-1]}


@pytest.mark.slow
def test_fault_04_learner_and_actor_of_a_fleet_wait_for_an_empty_replay_and_go_on_without_a_restart(
    programs: Programs, tmp_path: Path
) -> None:
    with Fleet(programs, tmp_path / "run", "replay.journal=false") as fleet:
        fleet.start("replay", "learner", "actor-0")
        learner, actor = fleet.running["learner"], fleet.running["actor-0"]
        learner.wait_until(lambda: fleet.updates() > 0)
        before = programs.living()
        fleet.end("replay")
        learner.wait_until(lambda: "is lost: looking for it" in learner.stderr)
        actor.wait_until(lambda: LOST.search(actor.stderr))
        held, replay_lines = updates_at_rest(fleet), fleet.lines("replay")
        actor.send(signal.SIGSTOP)  # so that nothing comes before the empty replay has been looked at
        fleet.start("replay")
        replay = fleet.running["replay"]
        replay.wait_until(lambda: "joins; 0 segments are live" in replay.stderr)
        lines = fleet.lines("learner")
        learner.wait_until(lambda: fleet.lines("learner") >= lines + 8)
        assert fleet.updates() == held
        assert fleet.newest("replay", "replay/size_transitions", -1.0) == 0
        actor.send(signal.SIGCONT)
        learner.wait_until(lambda: fleet.updates() > held)
        assert updates_below_the_minimum(fleet, replay_lines) == {held}
        after = programs.living()
        assert {name: pid for name, pid in after.items() if name != "replay"} == {
            name: pid for name, pid in before.items() if name != "replay"
        }
        assert len(LOST.findall(actor.stderr)) == learner.stderr.count("is lost: looking for it") == 1
        assert learner.stderr.count("the replay server is back after") == 1
        actor.wait_until(lambda: actor.stderr.count("the replay server is back after") == 1)
        assert fleet.with_traceback() == []
