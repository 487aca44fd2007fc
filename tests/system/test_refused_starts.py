"""A start that cannot resume its run directory is refused at once, with one line, and writes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from apex_jax.run.provenance import record_config
from tests.rigs.learner_runs import config_of, error_of, files, save_checkpoint
from tests.rigs.processes import Programs, catch, free_tcp_addresses

MINE, OTHER = "00112233aabbccdd", "fedcba9876543210"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run with a checkpoint."""
    directory = tmp_path / "run"
    save_checkpoint(directory)
    record_config(config_of(directory))
    (directory / "run_identity").write_text(MINE)
    (directory / "evaluations.jsonl").write_text("{}\n")
    return directory


def test_a_replay_of_another_game_alone_is_refused_before_anything_starts(programs: Programs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    (directory / "replay").mkdir(parents=True)
    (directory / "replay" / f"segments-{1:020}-{1:06}.log").write_bytes(b"left by a run killed before its checkpoint")
    record_config(config_of(directory))
    before, other = files(directory), ("algorithm.n_step=2", "network.hidden_units=32")
    error = error_of(programs.start(*catch(directory, *other)), 2)
    assert "algorithm.n_step: was 3, now 2" in error
    assert "network.hidden_units" not in error, "no network was saved"
    assert files(directory) == before


@pytest.mark.parametrize("role", ["local", "learner"])
def test_run_that_cannot_be_resumed_is_refused_with_the_differences_and_unchanged(
    programs: Programs, run: Path, role: str
) -> None:
    before = files(run)
    other = ("algorithm.n_step=2", "network.hidden_units=32", "learner.optimizer=rmsprop", "learner.batch_size=8")
    addresses = free_tcp_addresses() if role == "learner" else []
    error = error_of(programs.start("--role", role, *catch(run, *addresses, *other)), 2)
    assert f"error: {run} " in error
    assert re.findall(r"([\w.]+): was \w+, now (\w+)", error) == [
        ("algorithm.n_step", "2"), ("network.hidden_units", "32"), ("learner.optimizer", "rmsprop")
    ]  # fmt: skip
    assert files(run) == before


@pytest.mark.ci
def test_a_learner_that_its_replay_server_refuses_writes_nothing_into_its_run(
    programs: Programs, run: Path, tmp_path: Path
) -> None:
    before, addresses = files(run), free_tcp_addresses()
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / "run_identity").write_text(OTHER)
    programs.start("--role", "replay", *catch(tmp_path / "replay", *addresses))
    error = error_of(programs.start("--role", "learner", *catch(run, *addresses, "learner.batch_size=8")), 1)
    assert f"this learner is of run {MINE}, the replay server of run {OTHER}" in error
    assert files(run) == before
