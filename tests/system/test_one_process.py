"""A run in one process has the files of any other, resumes, and is the same each time, bit for bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.host.program import CONFIGS
from apex_jax.links.in_process import InProcessExperience
from apex_jax.policy import Agent, load_agent
from apex_jax.process import StopSignal, process_rng
from apex_jax.replay.replay import Replay
from apex_jax.workers import one_process
from tests.rigs.processes import ROOT

SMALL = (
    *("evaluator.interval_updates=8", "evaluator.episodes=2", "network.hidden_units=32", "page_port=-1"),
    "learner.updates_per_call=1",  # which compiles fastest
)
SETTINGS = {
    "cartpole": (*SMALL, "replay.min_size_to_sample=500"),
    "jax": (*SMALL, "environment.task=jax:tests.rigs.jax_environments:Corridor", "replay.min_size_to_sample=500"),
    "pendulum": (*SMALL, "network.policy_units=[32]", "network.critic_units=[32]", "replay.min_size_to_sample=500"),
}


def train(name: str, directory: Path, updates: int) -> Agent:
    settings = [*SETTINGS[name], "processes=one", f"total_updates={updates}", f"run_directory={directory}"]
    config = load(CONFIGS / f"{'cartpole' if name == 'jax' else name}.yaml", settings)
    assert one_process.run(config, "local", StopSignal()) == 0
    return load_agent(directory, None, {})


def evaluations(directory: Path) -> list[tuple[int, list[float]]]:
    lines = map(json.loads, (directory / "evaluations.jsonl").read_text().splitlines())
    return [(line["updates"], line["returns"]) for line in lines]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["cartpole", pytest.param("jax", marks=pytest.mark.long), pytest.param("pendulum", marks=pytest.mark.ci)]
)
def test_two_runs_with_one_seed_and_a_resume_are_equal_bit_for_bit(name: str, tmp_path: Path) -> None:
    agents = []
    for run in ("first", "second"):
        begun = train(name, tmp_path / run, updates=16).progress
        assert begun.updates >= 16
        agents.append(train(name, tmp_path / run, updates=40))
        assert agents[-1].progress.environment_steps > begun.environment_steps, "the replay goes on"
    assert agents[0].progress.updates == agents[1].progress.updates >= 40
    assert agents[0].progress.environment_steps == agents[1].progress.environment_steps
    jax.tree.map(np.testing.assert_array_equal, agents[0].params, agents[1].params)
    played = evaluations(tmp_path / "first")
    assert played == evaluations(tmp_path / "second")
    assert [updates for updates, _ in played] == sorted({updates for updates, _ in played})
    assert len(played) >= 5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_command_writes_the_files_of_a_run_and_saves_it_when_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "main.py"), "--config", "cartpole", "processes=one", "run_directory=run"]
    with subprocess.Popen(
        [*command, *SMALL, "total_updates=0"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        until = time.monotonic() + 200
        while not (tmp_path / "run" / "evaluations.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files >= {"best", "checkpoints", "config.yaml", "evaluations.jsonl", "metrics", "replay", "starts.jsonl"}
    for name in ("learner", "replay", "actor-0", "evaluator"):
        assert (tmp_path / "run" / "metrics" / f"{name}.jsonl").exists()
    saved = load_agent(tmp_path / "run", None, {}).progress.updates
    assert saved > 0


def test_environments_take_places_that_are_spread_over_a_longer_ladder() -> None:
    settings = ["actor.environments=4", "actor.ladder_size=100", "replay.journal=false"]
    config = load(CONFIGS / "cartpole.yaml", settings)
    spec = describe(config).spec
    welcome = InProcessExperience(Replay(config, spec, process_rng(1, 0)), config, spec).join()
    assert welcome.ladder_size == 100
    np.testing.assert_array_equal(welcome.ladder_indices, [0, 33, 66, 99])
