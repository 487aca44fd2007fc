"""What a run writes down about its starts, and refuses to resume."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from apex_jax.config import AddressConfig, Config
from apex_jax.config.load import load
from apex_jax.plotting.curves import read_run
from apex_jax.plotting.plot import run
from apex_jax.run import provenance
from tests.rigs.runs import make_run


def test_each_start_records_the_data_to_repeat_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/a/checkout/main.py", "seed=7"])
    config = Config(run_directory=str(tmp_path / "new"), seed=7)
    provenance.record_start(config)
    provenance.record_start(config)
    first, second = provenance.read_starts(tmp_path / "new")
    assert first["time"] <= second["time"]
    assert (first["task"], first["seed"]) == ("Pong-v5", 7)
    assert first["versions"]["numpy"] == np.__version__
    assert first["processor"]
    assert first["cores"] >= 1
    assert first["command"] == f"{Path(sys.executable).name} main.py seed=7"


@pytest.mark.parametrize("accelerator", ["NVIDIA H100 80GB HBM3", None])
def test_the_newest_start_records_the_accelerator_once_the_learner_is_accepted(
    tmp_path: Path, accelerator: str | None
) -> None:
    config = Config(run_directory=str(tmp_path))
    provenance.record_start(config)
    provenance.record_accelerator(config, accelerator="another")
    provenance.record_start(config)  # by the local supervisor
    for _ in range(2):  # a restarted learner repeats it
        provenance.record_accelerator(config, accelerator=accelerator)
    first, second = provenance.read_starts(tmp_path)
    assert (first["accelerator"], second["accelerator"]) == ("another", accelerator)
    ending = f"{second['processor']}, {accelerator}" if accelerator else second["processor"]
    assert provenance.machine_of(second) == f"{second['cores']} cores of {ending}"


def test_a_changed_file_of_the_users_is_named_when_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise RuntimeError('it is read, not imported')")
    config = load(None, ["run_directory=run", "algorithm.name=mine:make", "environment.task=gymnasium:mine:Env"])
    provenance.record_start(config)
    provenance.record_start(config)
    assert caplog.text == ""
    (tmp_path / "mine.py").write_text("changed")
    provenance.record_start(config)
    for setting in ("algorithm.name=mine:make", "environment.task=gymnasium:mine:Env"):
        assert f"{setting} (its file has changed)" in caplog.text
    first, _, last = provenance.read_starts("run")
    assert first["code"].keys() == last["code"].keys()
    assert first["code"] != last["code"]


def test_commit_is_the_checkouts_if_git_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "CHECKOUT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    config = Config(run_directory=str(tmp_path / "run"))
    provenance.record_start(config)
    for command in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m first"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    provenance.record_start(config)
    before, after = provenance.read_starts(tmp_path / "run")
    assert before["commit"] is None
    assert len(after["commit"]) == 40
    assert after["uncommitted_changes"] is False


@pytest.mark.parametrize(
    "line", ['{"ti', "[1]", "\xff", *(f'{{"time": {t}}}' for t in ("1e30", "-1", "true", '"now"'))]
)
def test_line_that_is_no_start_is_left_out(line: str, tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").write_bytes(f'{{"time": 1.5}}\n{line}\n{{"time": 1.7e9}}\n{line}'.encode("latin-1"))
    assert [start["time"] for start in provenance.read_starts(tmp_path)] == [1.5, 1.7e9]
    assert provenance.read_starts(tmp_path / "nowhere") == []


def test_config_of_a_run_is_written_completely_and_without_addresses(tmp_path: Path) -> None:
    config = load(None, [f"run_directory={tmp_path}", "seed=7", "addresses.weights=ipc:///run/somewhere"])
    for _ in range(2):
        provenance.write_config(config, config.directory)
    assert load(tmp_path / "config.yaml") == config.replace(addresses=AddressConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_changed_settings_are_logged_and_recorded_at_the_start_and_printed_by_plot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(run_directory=str(make_run(tmp_path / "run", [1.0, 2.0])))
    longer = config.replace(total_minutes=9.0, seed=1)
    for same in (config, longer):
        provenance.record_start(same)
        provenance.write_config(same, same.directory)
    assert caplog.text == ""
    changed = config.replace(learner=dataclasses.replace(config.learner, batch_size=64))
    for _ in range(2):  # the second before an update was made
        provenance.record_start(changed)
    change = f"learner.batch_size=64 (was {config.learner.batch_size})"
    assert f"{tmp_path}/run resumes with changed settings, {change}: to start afresh" in caplog.text
    with open(tmp_path / "run" / "starts.jsonl", "a") as file:
        file.write('{"time": 1.5, "changed_settings": 5}\n{"ti')  # not ours; torn by a kill
    provenance.write_config(changed, changed.directory)
    provenance.record_start(changed)
    assert read_run(tmp_path / "run").changed_settings == [change]
    assert run([str(tmp_path / "run"), "--output", str(tmp_path / "curves.png")]) == 0
    assert f"{tmp_path}/run went on with changed settings: {change}\n" in capsys.readouterr().out
