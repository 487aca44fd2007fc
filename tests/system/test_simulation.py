"""A fleet under a virtual clock: a short run, its determinism, and the mistakes that it must find.

Long: `python -m tests.simulation --hours 200 --seed 1`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from tests.simulation.__main__ import main, report, simulate
from tests.simulation.mutations import MUTATIONS, find, mutated

CREDIT_TWICE = next(each for each in MUTATIONS if each.what == "the learner returns the credit of segments twice")

OF_CI = (
    "segments are acknowledged before they are written",
    "priorities are applied without a look at the generation",
    "segments in flight are not sent again on a new connection",
)


@functools.cache
def simulated(seed):
    """Returns the outcome of one round of faults and calm."""
    return simulate(seed, hours=0.05)


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.ci) for seed in (3, 4))])
def test_fleet_keeps_every_invariant_under_faults(seed):
    outcome = simulated(seed)
    assert not outcome.violation, report(outcome)
    assert outcome.hours >= 0.05
    assert min(outcome.updates, outcome.stored) > 50


def test_same_seed_gives_the_same_events():
    assert simulate(2, 0.05) == simulated(2)
    assert simulated(2).digest != simulated(3).digest


@pytest.mark.long
def test_same_seed_gives_the_same_events_in_another_process():
    command = [sys.executable, "-m", "tests.simulation", "--hours", "0.05", "--seed", "6"]
    digest = simulate(6, 0.05).digest
    for hash_seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
        assert f'"digest": "{digest}"' in done.stdout


def test_violation_ends_the_program_with_the_command_that_repeats_it(capsys):
    with mutated(CREDIT_TWICE):
        assert main(["--hours", "1", "--seed", "1"]) == 1
    shown = capsys.readouterr().err
    assert "seed 1: Violation: credit for 258 segments" in shown
    assert shown.endswith("repeat: python -m tests.simulation --hours 1 --seed 1\n")


@pytest.mark.parametrize("mutation", [
    pytest.param(each, id=each.what.replace(" ", "_"), marks=pytest.mark.ci if each.what in OF_CI else pytest.mark.long)
    for each in MUTATIONS
])  # fmt: skip
def test_mistake_in_the_protocol_is_found(mutation):
    assert find(mutation, seeds=10, hours=1.0) is not None
