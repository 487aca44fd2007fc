"""Checkpoints of a learner of Catch, and the error line of a process."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import jax
import numpy as np

from apex_jax.agent.dqn import LearnerState, make_dqn
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.transport.params_codec import architecture_of
from tests.rigs.processes import ROOT, Program


def config_of(directory: Path, *settings: str) -> Config:
    return load(ROOT / "configs" / "catch.yaml", settings).replace(run_directory=str(directory))


def fresh_state(config: Config) -> LearnerState:
    return make_dqn(config, describe(config).spec).init(jax.random.key(0))


def save_checkpoint(directory: Path, updates: int = 1, seed: int = 3) -> tuple[LearnerState, Progress]:
    """Saves a state of the real algorithm in which no leaf is zero, and no two alike."""
    config, rng = config_of(directory), np.random.default_rng(seed)
    state = jax.tree.map(
        lambda leaf: np.asarray(9 * rng.random(leaf.shape) + 1, leaf.dtype), jax.eval_shape(lambda: fresh_state(config))
    )
    architecture = architecture_of(state.online_params)
    progress = Progress(updates, 17, 3.5, 11, config.checkpoint_compatibility_key, architecture)
    checkpointer = Checkpointer(str(directory))
    checkpointer.save(state, progress)
    checkpointer.close()
    assert checkpointer.error is None
    return state, progress


def restored(directory: Path, *settings: str) -> tuple[LearnerState, Progress] | None:
    config = config_of(directory, *settings)
    state = fresh_state(config)
    checkpointer = Checkpointer(str(directory), read_only=True)
    found = checkpointer.restore_newest(
        state, config.checkpoint_compatibility_key, architecture_of(state.online_params)
    )
    return None if found is None else (LearnerState(*found[0]), found[1])


def files(directory: Path) -> dict[str, str]:
    """Returns a digest of every file but the lock."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def error_of(program: Program, exit_code: int) -> str:
    """Returns the one line that says why a process has ended; beside it there is only the log."""
    assert program.exit_code() == exit_code, program.stderr
    rest = [line for line in program.stderr.splitlines() if not re.match(r"\d\d:\d\d:\d\d [A-Z]+ [\w-]+: ", line)]
    assert len(rest) == 1, program.stderr
    assert rest[0].startswith("error: ")
    return rest[0]
