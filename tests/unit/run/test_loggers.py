"""Specification of loggers: what a service is sent, and that its failures are one line, or none of the run's."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apex_jax.config import AddressConfig, Config, MetricsConfig
from apex_jax.host.errors import FatalError, UsageError
from apex_jax.run.loggers import Logger, check_loggers, make_loggers
from tests.rigs.services import NAME, calls_of, write_service


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which Python finds modules, until the end of the test."""
    before = set(sys.modules)
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in set(sys.modules) - before:
        if name == NAME or str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def config_with(*loggers: str, directory: str = "runs/Pong-v5-1") -> Config:
    metrics = MetricsConfig(loggers=("jsonl", *loggers), project="mine")
    return Config(run_directory=directory, metrics=metrics, seed=7)


def test_metrics_files_need_no_logger_module() -> None:
    check_loggers(Config())
    assert make_loggers(Config(), "learner", "learner") == []


def test_prometheus_needs_an_address_of_the_status_page_and_no_module() -> None:
    config = config_with("prometheus")
    with pytest.raises(UsageError, match=r"prometheus .*; add addresses.status=tcp://127.0.0.1:8080$"):
        check_loggers(config)
    served = replace(config, addresses=AddressConfig(status="tcp://127.0.0.1:8080"))
    check_loggers(served)
    assert make_loggers(served, "learner", "learner") == []


@pytest.mark.parametrize(("name", "words"), [
    ("no_such_tracker", "cannot be imported: No module .*; run `python -m pip install no_such_tracker`"),
    ("no_such.tracker", "cannot be imported: No module .*; run `python -m pip install no_such`"),
    (NAME, r"has no init\(\)"),  # a folder, as wandb makes one in the working directory
    ("half_service", r"has no log\(\)"),
    ("broken_service", "cannot be imported: too; "),
])  # fmt: skip
def test_a_name_that_is_no_service_is_one_line(packages: Path, name: str, words: str) -> None:
    (packages / NAME).mkdir()
    (packages / "half_service.py").write_text("def init(): ...\nlog = 3\n")
    (packages / "broken_service.py").write_text("raise RuntimeError('too\\nold')")
    with pytest.raises(UsageError, match=f"^metrics.loggers: {name} {words}") as error:
        check_loggers(config_with(name))
    assert "\n" not in str(error.value)


def test_a_process_is_a_run_in_the_group_of_its_run_directory(packages: Path, tmp_path: Path) -> None:
    write_service(packages)
    config = config_with(NAME, directory=str(tmp_path / "Pong-v5-7"))
    check_loggers(config)
    (logger,) = make_loggers(config, "learner", "learner")
    logger.log(400, {"losses/td_loss": np.float32(0.25), "learner/updates": 7, "losses/q_values": math.nan})
    logger.log(800, {"losses/td_loss": 0.5})
    logger.finish()
    [calls] = calls_of(packages)
    assert [function for function, _ in calls] == ["init", "log", "log", "finish"]
    begun = calls[0][1]
    assert (begun["project"], begun["name"], begun["group"]) == ("mine", "Pong-v5-7-learner", "Pong-v5-7")
    assert (begun["config"]["seed"], begun["config"]["learner.batch_size"]) == (7, 512)
    kept = ("addresses.", "security.", "storage.", "run_directory")
    assert not [name for name in begun["config"] if name.startswith(kept)]
    assert calls[1][1] == {"values": {"losses/td_loss": 0.25, "learner/updates": 7.0}, "step": 400}
    assert calls[2][1] == {"values": {"losses/td_loss": 0.5}, "step": 800}


def test_actors_create_no_run_in_a_logging_service(packages: Path) -> None:
    write_service(packages)
    assert make_loggers(config_with(NAME), "actor", "actor-0") == []
    assert len(make_loggers(config_with(NAME), "replay", "replay")) == 1


def test_a_logging_service_that_fails_at_the_first_start_ends_it_and_later_is_left_out(
    packages: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_service(packages, failing=("init",))
    config = config_with(NAME, directory=str(tmp_path))
    with pytest.raises(FatalError, match=f"^metrics.loggers: {NAME} .*: no key is configured; "):
        Logger(NAME, config, "learner")
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "learner.jsonl").touch()  # of the start before
    logger = Logger(NAME, config, "learner")
    logger.log(4, {})
    logger.finish()
    [line] = caplog.messages
    assert line.startswith(f"{NAME} does not begin")
    assert "no key is configured" in line


def test_values_that_a_logging_service_rejects_are_logged_once(
    packages: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_service(packages, failing=("log", "finish"))
    logger = Logger(NAME, config_with(NAME, directory=str(tmp_path)), "learner")
    for step in (4, 8):
        logger.log(step, {})
    logger.finish()
    assert logger.failures == 3
    [line] = caplog.messages
    assert line.startswith(f"{NAME} ")
