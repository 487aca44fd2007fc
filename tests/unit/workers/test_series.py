"""Specification of a series: one run for each seed, in order, which ends where a run is stopped or fails."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.host.errors import RunError, UsageError
from apex_jax.process import StopSignal
from apex_jax.run.provenance import write_config
from apex_jax.workers import local, series
from tests.rigs.processes import ROOT
from tests.rigs.runs import make_run

CONFIG = load(ROOT / "configs" / "catch.yaml", ["seed=1", "processes=many"])


class Trainer:
    """Stands in for a local run: it leaves a run directory with evaluations."""

    def __init__(self, stop: StopSignal) -> None:
        self.trained: list[tuple[str, int]] = []
        self.fails_at = self.stops_at = 0
        self.stop = stop

    def __call__(self, config: Config, name: str, stop: StopSignal) -> int:
        assert stop is self.stop
        assert name == "local"
        self.trained.append((config.directory, config.seed))
        if config.seed == self.fails_at:
            raise RunError("the disk is full")
        if config.seed == self.stops_at:
            stop.signal_number = signal.SIGINT
            return stop.exit_code
        make_run(Path(config.directory), [1.0, 2.0 + config.seed], (f"seed={config.seed}",))
        return 0


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer(StopSignal())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "run", trainer)
    return trainer


def train(trainer: Trainer, *seeds: int, config: Config = CONFIG) -> int:
    return series.run(config, seeds, "local", trainer.stop)


def test_each_seed_trains_in_its_own_directory_and_all_are_plotted_together(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(trainer, 5, 2, 9) == 0
    assert trainer.trained == [(f"runs/Catch-v0-{seed}", seed) for seed in (5, 2, 9)]
    printed = capsys.readouterr().out
    assert "Seed 2, run 2 of 3\n" in printed
    assert printed.endswith("runs/Catch-v0-seeds.png, runs/Catch-v0-seeds.md\n")
    assert Path("runs/Catch-v0-seeds.png").read_bytes()[:4] == b"\x89PNG"
    table = Path("runs/Catch-v0-seeds.md").read_text()
    assert table in printed
    assert "| 3 |" in table, "three runs in one group"
    assert "7.0, 4.0, 11.0" in table


def test_ctrl_c_and_an_error_end_the_whole_series(trainer: Trainer) -> None:
    trainer.stops_at, trainer.fails_at = 2, 5
    assert train(trainer, 1, 2, 3) == 130
    trainer.stop = StopSignal()
    with pytest.raises(RunError, match="the disk is full"):
        train(trainer, 4, 5, 6)
    assert [seed for _, seed in trainer.trained] == [1, 2, 4, 5]
    assert not list(Path("runs").glob("*.png"))


def test_a_directory_that_cannot_be_resumed_is_refused_before_the_first_seed_trains(trainer: Trainer) -> None:
    record = load(ROOT / "configs" / "catch.yaml", ["seed=3", "network.hidden_units=8"])
    Path(record.directory, "checkpoints", "7").mkdir(parents=True)
    write_config(record, record.directory)
    with pytest.raises(UsageError, match=r"runs/Catch-v0-3 .*network\.hidden_units: was 8, now 64"):
        train(trainer, 1, 2, 3)
    assert trainer.trained == []
