"""Agents of every kind that can be exported, made without a run; and a process without apex_jax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from apex_jax.agent.policy_function import observation_shape
from apex_jax.agent.registry import make_algorithm, resolved
from apex_jax.config.load import load
from apex_jax.policy import Agent
from apex_jax.run.checkpoint import Progress
from apex_jax.types import ActionSpec, EnvironmentSpec, Part, SegmentSpec
from tests.rigs.runs import ROOT

NORMALIZED = ("network.layer_norm=true", "network.normalize_observations=true", "network.policy_units=[16, 24, 8]")
OPTIONS = (
    *("algorithm.munchausen=true", "algorithm.value_rescaling=true", "algorithm.quantiles=4"),
    "network.layer_norm=true",
)
PLAIN = ("network.layer_norm=false", "network.normalize_observations=false", "algorithm.twin_critics=true")
PIXELS = SegmentSpec((44, 44), "uint8", 3, 40, 3, ActionSpec.discrete(6))
VECTOR = SegmentSpec((10,), "float32", 1, 40, 3, ActionSpec.discrete(3))
BODY = SegmentSpec((5,), "float32", 1, 40, 3, ActionSpec.continuous(2))
PARTS = (Part(("height",), ()), Part(("joints",), (2, 2)))
BOUNDS = ((-2.0, 0.0), (2.0, 10.0))
KINDS: dict[str, tuple[str, EnvironmentSpec, tuple[str, ...]]] = {
    "pixels in stacks": (
        "pong_cpu",
        EnvironmentSpec(PIXELS, None, None, None),
        ("network.hidden_units=8", "network.layer_norm=true"),
    ),
    "a vector": ("catch", EnvironmentSpec(VECTOR, None, None, None), ()),
    "a vector, one stream": (
        "catch",
        EnvironmentSpec(VECTOR, None, None, None, first_action=5),
        ("network.dueling=false",),
    ),
    "a vector, all options": ("catch", EnvironmentSpec(VECTOR, None, None, None), OPTIONS),
    "continuous, normalized": ("walker", EnvironmentSpec(BODY, PARTS, *BOUNDS), NORMALIZED),
    "continuous, plain": ("pendulum", EnvironmentSpec(BODY, None, *BOUNDS), PLAIN),
}
OF_OTHERS = """
import json, sys, warnings
from pathlib import Path
import jax.export, numpy as np, onnxruntime
try:
    import apex_jax
    sys.exit("apex_jax is on the path")
except ModuleNotFoundError:
    pass
observations = np.load("observations.npy")
jax_outputs = jax.export.deserialize(bytearray(Path("policy.stablehlo").read_bytes())).call(observations)
session = onnxruntime.InferenceSession("policy.onnx")
names = [output.name for output in session.get_outputs()]
onnx_outputs = dict(zip(names, session.run(None, {"observation": observations})))
lists = [{name: np.asarray(each).tolist() for name, each in outputs.items()} for outputs in (jax_outputs, onnx_outputs)]
print(json.dumps(lists))
"""


def agent_of(kind: str) -> Agent:
    """Returns an agent whose params, biases and moments included, are all random."""
    name, environment_spec, settings = KINDS[kind]
    config = resolved(load(ROOT / "configs" / f"{name}.yaml", list(settings)), environment_spec.spec)
    algorithm = make_algorithm(config, environment_spec.spec)
    like = algorithm.acting_params(jax.eval_shape(algorithm.init, jax.random.key(1)))
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), like)
    if "observations" in params:
        params["observations"]["variance"] = np.abs(params["observations"]["variance"])
    return Agent(config, environment_spec, algorithm, params, Progress(120, 1200, 90.0, 120, "", ""))


def observations_of(environment_spec: EnvironmentSpec, count: int) -> np.ndarray:
    """Returns random observations, as a policy gets them."""
    shape, rng = (count, *observation_shape(environment_spec)), np.random.default_rng(count)
    if environment_spec.spec.frame_dtype == "uint8":
        return rng.integers(0, 256, shape, np.uint8)
    return rng.normal(size=shape).astype(np.float32)


def outputs_elsewhere(folder: Path, observations: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Returns what the StableHLO and the ONNX of a folder compute in a process that has no apex_jax."""
    np.save(folder / "observations.npy", observations)
    lists = json.loads(run_elsewhere(folder, OF_OTHERS))
    return [{name: np.array(each) for name, each in outputs.items()} for outputs in lists]


def run_elsewhere(folder: Path, program: str) -> Any:
    """Runs a program in a folder, isolated (-I: nothing of this checkout on its path); returns its output."""
    environment = {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
