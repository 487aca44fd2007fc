"""A start that cannot resume its run directory is refused at once, with one line, and writes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import apex_jax
from apex_jax.config.load import load_with, parse_settings
from apex_jax.host.errors import RunError, UsageError
from apex_jax.host.program import CONFIGS
from apex_jax.process import StopSignal
from apex_jax.run.provenance import write_config
from apex_jax.workers import local, one_process
from tests.rigs.learner_runs import config_of, error_of, files, save_checkpoint
from tests.rigs.processes import Programs, catch, free_tcp_addresses

MINE, OTHER = "00112233aabbccdd", "fedcba9876543210"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run with a checkpoint."""
    directory = tmp_path / "run"
    save_checkpoint(directory)
    write_config(config_of(directory), directory)
    (directory / "run_identity").write_text(MINE)
    (directory / "evaluations.jsonl").write_text("{}\n")
    return directory


def test_a_replay_of_another_game_alone_is_refused_before_anything_starts(programs: Programs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    (directory / "replay").mkdir(parents=True)
    (directory / "replay" / f"segments-{1:020}.log").write_bytes(b"left by a run killed before its checkpoint")
    write_config(config_of(directory), directory)
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


# After a whole run ------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "replay": {"min_size_to_sample": 500},
    "evaluator": {"episodes": 1, "interval_updates": 8},
    "network": {"hidden_units": 8},
    "total_updates": 8,
}


def newest(run: Path, pattern: str) -> Path:
    return max(run.glob(pattern))


def without_config(run: Path, change: Callable[[Path], object] = lambda run: None) -> None:
    """Leaves it to the replay's own files to refuse a start."""
    (run / "config.yaml").unlink()
    change(run)


def linked(path: Path) -> None:
    """Replaces a file by a link to it."""
    moved = path.rename(path.parents[2] / path.name)
    path.symlink_to(moved)


def of_another_format(run: Path) -> None:
    path = run / "replay" / "journal.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 6}))


REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "n_step": (lambda run: None, {"algorithm": {"n_step": 2}}, "algorithm.n_step: was 3, now 2"),
    "discount": (lambda run: None, {"algorithm": {"discount": 0.5}}, "algorithm.discount: was 0.98, now 0.5"),
    "network": (lambda run: None, {"network": {"hidden_units": 9}}, "network.hidden_units: was 8, now 9"),
    "task": (lambda run: None, {"environment": {"task": "MountainCar-v0"}}, "environment.task: was CartPole-v1"),
    "n_step, no config.yaml": (without_config, {"algorithm": {"n_step": 2}}, "is the replay of another configuration"),
    "segments, no config.yaml": (
        without_config,
        {"actor": {"segment_slots": 20}},
        "the replay of another configuration",
    ),
    "link to a log": (lambda run: linked(newest(run, "replay/segments-*")), {}, "cannot be read .*mend that"),
    "link to a snapshot": (lambda run: linked(newest(run, "replay/snapshot-*")), {}, "cannot be read .*mend that"),
    "link to the head": (lambda run: linked(run / "replay/journal.json"), {}, "cannot be read .*mend that"),
    "damaged head": (lambda run: (run / "replay/journal.json").write_bytes(b"?"), {}, "is damaged: restore it"),
    "another format": (of_another_format, {}, "has format 6, this release reads format 5; use the release"),
    "earlier format": (lambda run: (run / "replay/journal.json").unlink(), {}, "has format 4 or earlier, this release"),
    "identity of another run": (lambda run: (run / "run_identity").write_text(OTHER), {}, f"is of run {OTHER}"),
    "no identity": (lambda run: (run / "run_identity").write_text("me"), {}, "must hold the run's 16 hexadecimal"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained to its end in one process."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    apex_jax.train("cartpole", run_directory=str(directory), progress=False, **SMALL)
    return directory


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_start_leaves_every_byte_of_a_run(kind: str, trained: Path, tmp_path: Path) -> None:
    change, settings, message = REFUSED[kind]
    directory = Path(shutil.copytree(trained, tmp_path / "run"))
    change(directory)
    given = {**SMALL, **settings, "network": SMALL["network"] | settings.get("network", {}), "total_updates": 16}
    before = files(directory), sorted(os.listdir(directory)), sorted(os.listdir(directory / "replay"))
    config = load_with(CONFIGS / "cartpole.yaml", parse_settings({**given, "run_directory": str(directory)}))
    starts: dict[str, Callable[[], object]] = {
        "train": lambda: apex_jax.train("cartpole", run_directory=str(directory), progress=False, **given),
        "one process": lambda: one_process.run(config, "local", StopSignal()),
        "many processes": lambda: local.run(config, "local", StopSignal()),
    }
    for name, start in starts.items():
        if name != "train" and "was" in message:
            continue  # the command itself compares with config.yaml, see above
        with pytest.raises((RunError, UsageError), match=message) as error:
            start()
        assert "\n" not in str(error.value)
        assert (files(directory), sorted(os.listdir(directory)), sorted(os.listdir(directory / "replay"))) == before


def test_a_start_in_one_process_is_recorded_once(trained: Path) -> None:
    assert len((trained / "starts.jsonl").read_text().splitlines()) == 1
