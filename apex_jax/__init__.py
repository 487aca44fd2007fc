"""Ape-X: distributed prioritized experience replay (Horgan et al. 2018), in JAX.

    train            trains in this program: `run = apex_jax.train("gymnasium:CartPole-v1")`
    load_policy      a trained agent: `apex_jax.load_policy("runs/CartPole-v1-1")`
    ReplayClient     the replay server alone, for items of your own

How its processes work together:

                 weights, on request
      +-----------------------------------------------+
      v                                               |
    actor x N --- segments ---> replay server --- segments, once each ---> learner
    EnvPool,      with initial  sum-tree over     --- index batches ------> frame store on its device,
    exploration   priorities    compressed                                  one jitted update
    ladder                      segments          <--- priorities --------
      |                                               |
      +--- statistics ---> metrics <--- evaluator <---+ weights

    types            the records that modules exchange, and the axis legend
    segment_codec    segments <-> bytes
    item_codec       items of a program of your own <-> segments
    device           the device that a process computes on

    config/          every key of a run; files and arguments -> a checked Config
    agent/           the algorithms
    replay/          the replay and its journal
    transport/       bytes between processes
    host/            the machine, and this program on it
    run/             the records of a run
    environments/    the tasks that are learned
    plotting/        the results of a run
    links/           the protocol of each link, both ends (transport/ moves the bytes)
    policy           a trained agent in a program of your own: `apex_jax.load_policy`
    replay_client    the replay server alone, from a program of your own: `apex_jax.ReplayClient`
    export/          a trained policy as files that others can use
    process          signals, seeds, log, hosts of a process
    operations/      the operator's view of a run
    workers/         the processes: loops around the modules above
    training         training from a program of your own: `apex_jax.train`
    main             the program: main.py, apex-jax and python -m apex_jax

Each folder describes its modules in its `__init__.py`.

Imports run one way: types, host -> config -> segment_codec, device -> item_codec -> run -> agent, environments, replay,
transport (none of which imports another) -> plotting, process, policy -> export, links, operations -> replay_client,
workers -> training, main.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apex_jax.policy import load_policy as load_policy
    from apex_jax.replay_client import ReplayClient as ReplayClient
    from apex_jax.training import train as train

__all__ = ["ReplayClient", "load_policy", "train"]
__version__ = "0.2.0"


_MODULES = {"load_policy": "apex_jax.policy", "ReplayClient": "apex_jax.replay_client", "train": "apex_jax.training"}
"""By the name that is imported when it is used: JAX takes a second, and `ReplayClient` does without it."""


def __getattr__(name: str) -> Any:
    """Imports and returns a name of `_MODULES`."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
