"""Plays given actions in an environment of a package, without apex_jax: `python package_rollout.py SETTINGS`.

It runs in the interpreter of the package, of Python 3.8 or later; `benchmarks.packages` compares what it writes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import sys
import time
from typing import Any

import numpy as np


def made(module: str, name: str, settings: dict) -> Any:
    """Returns the environment."""
    package = importlib.import_module(module) if module else None
    if hasattr(package, name):
        return getattr(package, name)(**settings)
    for library in ("gymnasium", "gym"):
        try:
            registry = importlib.import_module(library)
            registry.spec(name)
        except Exception:
            continue
        return registry.make(name, **settings)
    raise LookupError(name)


def flat(space: Any, value: Any) -> list:
    """Returns the leaves of an observation as vectors."""
    parts = getattr(space, "spaces", None)
    if isinstance(parts, dict):
        return [leaf for key, part in parts.items() for leaf in flat(part, value[key])]
    if parts is not None:
        return [leaf for number, part in enumerate(parts) for leaf in flat(part, value[number])]
    if type(space).__name__ == "Discrete":
        return [np.eye(int(space.n))[int(value) - int(getattr(space, "start", 0))]]
    if type(space).__name__ == "MultiDiscrete":
        return [np.eye(int(count))[int(np.ravel(value)[i])] for i, count in enumerate(space.nvec.ravel())]
    return [np.asarray(value, np.float32).ravel()]


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def main(module: str, name: str, settings: dict, seed: int, actions: str, seconds: float, result: str) -> None:
    """Writes observations [T, D], rewards, terminated, truncated and whether an episode begins, all [T]."""
    chosen, observations, rows = np.load(actions), [], []
    _seed(seed)
    environment = made(module, name, settings)
    _seed(seed)
    is_discrete = type(environment.action_space).__name__ == "Discrete"
    has_ended, started = True, time.monotonic()
    for number, action in enumerate(chosen):
        if has_ended:
            try:
                returned = environment.reset(seed=seed) if number == 0 else environment.reset()
            except TypeError:
                with contextlib.suppress(TypeError, AttributeError):
                    environment.seed(seed)
                returned = environment.reset()
            is_pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)
            observation, row = (returned[0] if is_pair else returned), (0.0, False, False, True)
        else:
            observation, reward, *ends, info = environment.step(int(action) if is_discrete else action)
            if len(ends) == 1:
                is_cut = ends[0] and info.get("TimeLimit.truncated", False)
                ends = [ends[0] and not is_cut, is_cut]
            row = (float(reward), bool(ends[0]), bool(ends[1]), False)
        has_ended = row[1] or row[2]
        observations.append(np.concatenate(flat(environment.observation_space, observation)))
        rows.append(row)
        if time.monotonic() - started > seconds:
            break
    np.savez(result, observation=np.array(observations, np.float32), others=np.array(rows, np.float64).T)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    main(**json.loads(sys.argv[1]))
