"""The files of an exported policy, in the form that the Hugging Face hub expects."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apex_jax import __version__
from apex_jax.agent.policy_function import any_batch, for_any_batch, observation_shape, policy_function
from apex_jax.config import Config
from apex_jax.config.load import EXPORTED_CONFIG_NAME, RESULT_KEYS, SETTINGS
from apex_jax.export import check, programs
from apex_jax.export.model_card import model_card, task_name
from apex_jax.host.disk import open_regular
from apex_jax.host.errors import RunError, short_repr
from apex_jax.host.program import NAME
from apex_jax.policy import Agent, load_agent
from apex_jax.run.best import run_directory_of
from apex_jax.run.environment_spec import as_record
from apex_jax.run.evaluations import best_evaluation
from apex_jax.run.params_file import FILE_NAME, save_params
from apex_jax.run.provenance import playing_arguments, value_of

RESULTS, CARD, VIDEO = "results.json", "README.md", "replay.mp4"
EXPORTED_KEYS = (*RESULT_KEYS, "total_")  # no paths, addresses or keys of the machine


def write_files(
    folder: Path, run: str | os.PathLike[str], updates: int | None = None, code: Mapping[str, Any] | None = None
) -> list[str]:
    """Writes all files of a run's policy into an empty folder, and checks them; returns notes for the user.

    `updates`: see `load_policy`; `code`: the settings of the run that name code (`code_settings`), if the user has
    given them, and so trusts the code. Raises OSError, UsageError and RunError.
    """
    agent = load_agent(run, updates, code or {})
    if agent.algorithm.greedy is None:
        raise RunError(
            f"{short_repr(run)}: algorithm.name={agent.config.algorithm.name} sets no `greedy`, so none is exported"
        )
    config = exported_config(agent.config)
    (folder / EXPORTED_CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    directory = run_directory_of(run)
    results, notes = results_of(directory, agent), []
    if results is not None:
        (folder / RESULTS).write_text(json.dumps(results, indent=2) + "\n")
    else:
        advice = f"{NAME} {playing_arguments(run, agent.config)} episodes=100"
        notes.append(f"{RESULTS} is left out: no evaluation of these parameters is recorded; to make one: {advice}")
    _copy_video(directory, folder / VIDEO)
    _write_params(folder, agent, config)

    like = any_batch(agent.environment_spec)
    function = for_any_batch(policy_function(agent.algorithm.greedy, agent.params, agent.environment_spec), like)
    programs.write_stablehlo(folder / programs.STABLEHLO, function, like)
    if problem := programs.write_onnx(folder / programs.ONNX, function, like):
        notes.append(f"{programs.ONNX} is left out: {problem}")

    stacks = check.observations_of(agent.environment_spec.spec)
    observations = stacks.reshape(len(stacks), *observation_shape(agent.environment_spec))
    expected = check.expected_outputs(agent, stacks)
    for name, run_file in ((programs.STABLEHLO, programs.run_stablehlo), (programs.ONNX, programs.run_onnx)):
        if (folder / name).exists():
            outputs = run_file(folder / name, observations)
            check.check_outputs(name, outputs, expected, agent.environment_spec.numbered)
    card = model_card(agent, directory, results, {path.name for path in folder.iterdir()})
    (folder / CARD).write_text(card)
    return notes


def exported_config(config: Config) -> dict[str, Any]:
    """Returns the settings that affect a run's results, in groups as in its `config.yaml`."""
    record: dict[str, Any] = {}
    for name in SETTINGS:
        if name.startswith(EXPORTED_KEYS):
            group, _, key = name.rpartition(".")
            (record.setdefault(group, {}) if group else record)[key] = value_of(config, name)
    return record


def results_of(run_directory: Path, agent: Agent) -> dict[str, Any] | None:
    """Returns the evaluation of an agent, with the hub's names; None if no evaluation of these params is recorded."""
    games = best_evaluation(run_directory, agent.progress.updates)
    if games is None:
        return None
    environment, minutes = agent.config.environment, round(agent.progress.elapsed_seconds / 60, 2)
    return {
        "env_id": task_name(environment),
        "mean_reward": float(games.returns.mean()),
        "std_reward": float(games.returns.std()),  # of the games, not of the mean
        "n_eval_episodes": len(games.returns),
        "is_deterministic": games.exploration == 0,
        "exploration": games.exploration,
        "eval_datetime": datetime.datetime.fromtimestamp(games.time, datetime.UTC).isoformat(timespec="seconds"),
        "updates": agent.progress.updates,
        "environment_steps": agent.progress.environment_steps,
        "environment_frames": agent.progress.environment_steps * environment.frame_skip,
        **({"training_minutes": minutes} if minutes else {}),  # a best evaluation does not record them
        "seed": agent.config.seed,
    }


def _write_params(folder: Path, agent: Agent, config: dict[str, Any]) -> None:
    """Writes the params. Raises OSError."""
    metadata = {
        "format": "flax",
        "apex_jax": __version__,
        "agent": agent.config.algorithm.name,
        "task": agent.config.environment.task,
        "updates": str(agent.progress.updates),
        "environment_steps": str(agent.progress.environment_steps),
        "interface": json.dumps(as_record(agent.environment_spec)),
        "config": json.dumps(config),
    }
    save_params(folder / FILE_NAME, agent.params, metadata)


def _copy_video(run: Path, path: Path) -> None:
    """Copies the newest video of a run directory, if there is one. Raises OSError, also for a link."""
    videos = [video for video in run.glob("*.mp4") if not video.name.startswith(".")]
    if videos:
        newest = max(videos, key=lambda video: video.lstat().st_mtime)
        with open(open_regular(newest, os.O_RDONLY), "rb") as source, open(path, "wb") as copy:
            shutil.copyfileobj(source, copy)
