"""A fleet under a virtual clock: a short run, its determinism, and the mistakes that it must find.

Long: `python -m tests.simulation --hours 200 --seed 1`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.__main__ import main, report, simulate
from tests.simulation.mutations import MUTATIONS, find, mutated

CREDIT_TWICE = next(each for each in MUTATIONS if each.what == "the learner returns the credit of segments twice")


@pytest.mark.parametrize("seed", [1, 4, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_fleet_keeps_every_invariant_under_faults(seed):
    outcome = simulate(seed, hours=0.15)
    assert not outcome.violation, report(outcome)
    assert outcome.hours >= 0.15
    assert min(outcome.updates, outcome.stored) > 50


def test_same_seed_gives_the_same_events():
    first, second, other = simulate(6, 0.02), simulate(6, 0.02), simulate(7, 0.02)
    assert first == second
    assert first.digest != other.digest


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
    assert "seed 1: Violation: credit for 257 segments" in shown
    assert shown.endswith("repeat: python -m tests.simulation --hours 1 --seed 1\n")


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.what.replace(" ", "_") for mutation in MUTATIONS])
def test_mistake_in_the_protocol_is_found(mutation):
    assert find(mutation, seeds=10, hours=1.0) is not None
