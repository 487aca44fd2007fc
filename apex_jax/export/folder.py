"""The files of an exported policy, in the form that the Hugging Face hub expects, each checked against the policy."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from apex_jax import __version__
from apex_jax.agent.action_masks import INVALID
from apex_jax.agent.policy_function import Outputs, any_batch, for_any_batch, observation_shape, policy_function
from apex_jax.config.load import EXPORTED_CONFIG_NAME
from apex_jax.export.model_card import model_card, task_name
from apex_jax.host.disk import open_regular
from apex_jax.host.errors import RunError, short_repr
from apex_jax.host.program import NAME, installing
from apex_jax.policy import Agent, load_agent
from apex_jax.run.evaluations import best_evaluation, run_directory_of
from apex_jax.run.params_file import metadata_of, save_params
from apex_jax.run.provenance import PARAMS_NAME, playing_arguments, result_settings
from apex_jax.types import FRAMES, NUMBERS, Observation, SegmentSpec, StackSpec, joined, map_parts

RESULTS, CARD, VIDEO = "results.json", "README.md", "replay.mp4"


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
    (folder / EXPORTED_CONFIG_NAME).write_text(json.dumps(result_settings(agent.config), indent=2) + "\n")
    directory = run_directory_of(run)
    results, notes = results_of(directory, agent), []
    if results is not None:
        (folder / RESULTS).write_text(json.dumps(results, indent=2) + "\n")
    else:
        advice = f"{NAME} {playing_arguments(run, agent.config)} episodes=100"
        notes.append(f"{RESULTS} is left out: no evaluation of these parameters is recorded; to make one: {advice}")
    _copy_video(directory, folder / VIDEO)
    progress = agent.progress
    metadata = metadata_of(agent.config, agent.environment_spec, progress.updates, progress.environment_steps)
    save_params(folder / PARAMS_NAME, agent.params, metadata | {"apex_jax": __version__})

    like = any_batch(agent.environment_spec)
    function = for_any_batch(policy_function(agent.algorithm.greedy, agent.params, agent.environment_spec), like)
    write_stablehlo(folder / STABLEHLO, function, like)
    if problem := write_onnx(folder / ONNX, function, like):
        notes.append(f"{ONNX} is left out: {problem}")

    spec = agent.environment_spec.spec
    stacks = observations_of(spec)
    observations = map_parts(unstacked, spec.observation, stacks)
    expected = expected_outputs(agent, stacks)
    for name, run_file in ((STABLEHLO, run_stablehlo), (ONNX, run_onnx)):
        if (folder / name).exists():
            outputs = run_file(folder / name, observations)
            check_outputs(name, outputs, expected, agent.environment_spec.numbered)
    card = model_card(agent, directory, results, {path.name for path in folder.iterdir()})
    (folder / CARD).write_text(card)
    return notes


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
        "lowest": float(games.returns.min()),
        "median": float(np.median(games.returns)),
        "highest": float(games.returns.max()),
        "is_deterministic": games.exploration == 0,
        "exploration": games.exploration,
        "eval_datetime": datetime.datetime.fromtimestamp(games.time, datetime.UTC).isoformat(timespec="seconds"),
        "updates": agent.progress.updates,
        "environment_steps": agent.progress.environment_steps,
        "environment_frames": agent.progress.environment_steps * environment.frame_skip,
        **({"training_minutes": minutes} if minutes else {}),  # a best evaluation does not record them
        "seed": agent.config.seed,
    }


def _copy_video(run: Path, path: Path) -> None:
    """Copies the newest video of a run directory, if there is one. Raises OSError, also for a link."""
    videos = [video for video in run.glob("*.mp4") if not video.name.startswith(".")]
    if videos:
        newest = max(videos, key=lambda video: video.lstat().st_mtime)
        with open(open_regular(newest, os.O_RDONLY), "rb") as source, open(path, "wb") as copy:
            shutil.copyfileobj(source, copy)


# The policy as programs that run without this package: StableHLO for JAX, and ONNX ------------------------------------


STABLEHLO = "policy.stablehlo"
ONNX = "policy.onnx"
INPUT = "observation"  # name of the input in ONNX of one part; the names of several are FRAMES, NUMBERS and MASK
PLATFORMS = ("cpu", "cuda")  # the StableHLO is lowered for both, which needs no GPU
INSTALL_ONNX = installing("export")


def write_stablehlo(path: Path, function: Any, like: Observation) -> None:
    """Writes a jitted function of observations as `jax.export` serializes it. Raises OSError."""
    # Without the folders of this machine, which the source locations in the file would name.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    with jax.default_matmul_precision("highest"):  # a GPU would multiply with 10 bits (TF32), and miss the tolerance
        exported = export.export(function, platforms=PLATFORMS)(like)
    path.write_bytes(exported.serialize())


def run_stablehlo(path: Path, observations: Observation) -> dict[str, np.ndarray]:
    """Returns the outputs of a file for a batch of observations."""
    outputs = export.deserialize(bytearray(path.read_bytes())).call(observations)
    return {name: np.asarray(output) for name, output in outputs.items()}


def write_onnx(path: Path, function: Callable[[Observation], Outputs], like: Observation) -> str:
    """Writes a function as an ONNX model; or returns, on one line, why it cannot be. Raises OSError."""
    try:
        from apex_jax.export.onnx_graph import UnsupportedError, onnx_model  # imported here: onnx is optional
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        return f"the package onnx is not installed: {INSTALL_ONNX}"
    try:
        path.write_bytes(onnx_model(function, INPUT, like).SerializeToString())
    except UnsupportedError as error:
        return str(error)
    return ""


def run_onnx(path: Path, observations: Observation) -> dict[str, np.ndarray]:
    """Returns the outputs of a file for a batch of observations, by ONNX's own reference implementation."""
    from onnx.reference import ReferenceEvaluator  # imported here: onnx is optional

    evaluator = ReferenceEvaluator(str(path))
    inputs = observations if isinstance(observations, dict) else {INPUT: observations}
    return dict(zip(evaluator.output_names, evaluator.run(None, inputs), strict=True))


# Comparison of these programs with the policy itself, on random observations ------------------------------------------


TOLERANCE = 1e-5  # relative to the largest value of the batch, or to 1 if all are smaller
OBSERVATIONS = 64


def observations_of(spec: SegmentSpec) -> Observation:
    """Returns 64 observations [64, F, *O] of random numbers."""
    rng = np.random.default_rng(0)

    def random(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == FRAMES:
            return rng.integers(256, size=shape, dtype=np.uint8)
        numbers = rng.normal(size=shape).astype(np.float32)
        return numbers if name == NUMBERS else (numbers >= np.minimum(numbers.max(-1, keepdims=True), 0)).view(np.uint8)

    parts = {name: random(name, (OBSERVATIONS, part.stack, *part.shape)) for name, part in spec.parts.items()}
    return joined(parts)


def unstacked(part: StackSpec, stacks: np.ndarray) -> np.ndarray:
    """Returns a part of observations [N, F, *O] as the exported programs take it, see `observation_shape`."""
    return stacks.reshape(len(stacks), *observation_shape(part))


def expected_outputs(agent: Agent, stacks: Observation) -> dict[str, np.ndarray]:
    """Returns the actions and values of the policy itself for observations [N, F, *O]."""
    assert agent.algorithm.greedy is not None
    outputs = agent.algorithm.greedy(agent.params, jax.tree.map(jnp.asarray, stacks))
    arrays = {name: np.asarray(output) for name, output in outputs.items()}
    return arrays | {"action": agent.environment_spec.scaled(arrays["action"])}


def check_outputs(
    file: str,
    outputs: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    numbered: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> None:
    """Raises RunError if the outputs of an exported file differ from those of the policy by more than TOLERANCE.

    `numbered`: that of the `EnvironmentSpec`.
    """
    for name, wanted in expected.items():
        found = outputs.get(name)
        if found is None or found.shape != wanted.shape:
            raise RunError(
                f"{file} has no output {name} of shape {wanted.shape}: please report this; nothing is written"
            )
        if name == "action" and "q_values" in expected:  # of two actions with one value, either is right
            found, wanted = (_chosen(expected["q_values"], numbered(actions)) for actions in (found, wanted))
        # Next to the values of invalid actions, every difference would be small. NaN counts as valid.
        is_valid = ~(wanted <= INVALID / 2)
        found, wanted = found[is_valid], wanted[is_valid]
        difference = float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))
        if not difference <= TOLERANCE:  # true for NaN, too
            what = f"{file} differs from the policy: {name} by {difference:.1e}, where {TOLERANCE:g} is allowed"
            raise RunError(f"{what}; please report this; nothing is written")


def _chosen(q_values: np.ndarray, actions: np.ndarray) -> np.ndarray:
    return np.take_along_axis(q_values, actions[:, None].astype(np.int64), axis=1)
