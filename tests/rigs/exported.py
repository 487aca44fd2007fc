"""Agents of every kind that can be exported, made without a run."""

from __future__ import annotations

import jax
import numpy as np

from apex_jax.agent.registry import make_algorithm, resolved
from apex_jax.config.load import load
from apex_jax.policy import Agent
from apex_jax.run.checkpoint import Progress
from apex_jax.types import ActionSpec, EnvironmentSpec, Part, SegmentSpec
from tests.rigs.runs import ROOT

NORMALIZED = ("network.layer_norm=true", "network.normalize_observations=true", "network.policy_units=[16, 24, 8]")
OPTIONS = ("algorithm.munchausen=true", "algorithm.quantiles=4", "network.layer_norm=true")
PLAIN = ("network.layer_norm=false", "network.normalize_observations=false", "algorithm.twin_critics=true")
CONVOLUTION = ("network.channels=[4]", "network.kernel_sizes=[3]", "network.strides=[2]", "network.hidden_units=8")
PIXELS = SegmentSpec((44, 44), "uint8", 3, 40, 3, ActionSpec.discrete(6))
VECTOR = SegmentSpec((10,), "float32", 1, 40, 3, ActionSpec.discrete(3))
SIGHT = SegmentSpec((20, 24), "uint8", 2, 40, 3, ActionSpec.continuous(2))
MASKED = SegmentSpec((10,), "float32", 1, 40, 3, ActionSpec.discrete(6)._replace(is_masked=True))
BOTH = SegmentSpec((20, 24, 2), "uint8", 2, 40, 3, ActionSpec.discrete(4)._replace(is_masked=True), numbers=3)
REACH = SegmentSpec((20, 24), "uint8", 2, 40, 3, ActionSpec.continuous(2), numbers=3)
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
        ("network.dueling=false", "algorithm.atoms=5"),
    ),
    "a vector with a mask, several parts of an action": (
        "catch",
        EnvironmentSpec(MASKED, None, None, None, (), "int32", action_part=Part((), (2,), (2, 3), (0, -1))),
        ("network.normalize_observations=true",),
    ),
    "images, numbers and a mask": (
        "catch",
        EnvironmentSpec(BOTH, None, None, None),
        (*CONVOLUTION, "network.normalize_observations=true"),
    ),
    "a vector, all options": ("catch", EnvironmentSpec(VECTOR, None, None, None), OPTIONS),
    "continuous, normalized": ("walker", EnvironmentSpec(BODY, PARTS, *BOUNDS), NORMALIZED),
    "continuous, pixels": (
        "walker",
        EnvironmentSpec(SIGHT, None, *BOUNDS),
        CONVOLUTION,
    ),
    "continuous, pixels and numbers": (
        "walker",
        EnvironmentSpec(REACH, None, *BOUNDS),
        (*CONVOLUTION, "network.normalize_observations=true"),
    ),
    "continuous, plain": ("pendulum", EnvironmentSpec(BODY, None, *BOUNDS), PLAIN),
}


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
