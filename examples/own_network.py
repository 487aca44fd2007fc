"""Ape-X DQN with a network of your own, without an edit of the package; it learns CartPole in about a minute.

    python examples/own_network.py                       # arguments are settings, such as total_updates=1000

`train` of one_process.py finds the algorithm by its name. For actors, learner and evaluator as processes, start each
with `--role` and a program that registers the network, as here, and then calls `main` of apex_jax.main.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))  # finds examples, and apex_jax if it is not installed

from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.registry import ALGORITHMS, Entry
from apex_jax.config import NetworkConfig
from apex_jax.config.load import load
from examples.one_process import CARTPOLE, train


class PairNetwork(nn.Module):
    """Q-values from the numbers of an observation and all products of two of them, through two normalized layers."""

    config: NetworkConfig
    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps observations float32[B, F, D] to float32[B, num_actions]."""
        x = x.reshape(len(x), -1)
        pairs = (x[:, :, None] * x[:, None, :]).reshape(len(x), -1)
        x = jnp.concatenate([x, pairs], axis=-1).astype(self.dtype)
        for _ in range(2):
            x = nn.silu(nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.config.hidden_units, dtype=self.dtype)(x)))
        return nn.Dense(self.num_actions, dtype=jnp.float32, name="q")(x)


ALGORITHMS["pair_dqn"] = Entry(partial(make_dqn, network_class=PairNetwork), action_dtype="int32")

if __name__ == "__main__":
    train(load(None, [*CARTPOLE.split(), "algorithm.name=pair_dqn", *sys.argv[1:]]))
