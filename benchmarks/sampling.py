"""Prioritized sampling in one process, beside cpprb and Flashbax: draw a batch, weigh it, write new priorities.

indices   `apex_jax.replay.sum_tree` beside cpprb's PrioritizedReplayBuffer, a tree in C++. Draws are stratified. In
          cpprb a transition has only one byte, so that little but the tree is timed.
pixels    Each side also gathers the whole batch of 512 transitions of Atari: two observations of 4 x 84 x 84 pixels,
          action, return, discount, importance weights. All are on the CPU:
              ours      `replay.Replay` and the frame store, composed as in examples/one_process.py
              Flashbax  its prioritized flat buffer, which keeps whole stacks
              cpprb     its prioritized buffer with `next_of` and `stack_compress`, which keeps each frame once
          `python -m pip install -r benchmarks/requirements.txt` installs Flashbax.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.frame_store import create_store, gather, insert_segments
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.replay.importance_weights import importance_weights
from apex_jax.replay.replay import Replay
from apex_jax.replay.sum_tree import SumTree
from apex_jax.segment_codec import encode_record
from apex_jax.types import Segment, SegmentSpec, zero_columns
from benchmarks.report import finish, medians, peer, ratio, say, side_by_side, target
from benchmarks.roles import ROOT

ALPHA, BETA = 0.6, 0.4
SIZES = (2**16, 2**18, 2**20, 2**21)  # leaves of a tree
COMPARED_SIZES = (2**20, 2**21)
BATCH_SIZES = (64, 512, 4096)  # of indices
FILL = 2**16  # leaves per call
BATCH_SIZE = 512  # with pixels
INSERTED = 500  # transitions at once, into the peers


def main() -> None:
    """Measures one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", choices=("indices", "pixels"))
    parser.add_argument("--seconds", type=float, help="of measuring, for each figure: 2, with pixels 10")
    parser.add_argument(
        "--transitions", type=int, default=50_000, help="in each replay of pixels; Flashbax needs 28 kB each (50000)"
    )
    arguments = parser.parse_args()
    if arguments.of == "indices":
        measure_indices(arguments.seconds or 2.0)
    else:
        measure_pixels(arguments.transitions, arguments.seconds or 10.0)


def measure_indices(seconds: float) -> None:
    """Measures every size and prints the report."""
    peer("cpprb")  # ends the benchmark before any measurement if it is not installed
    rng = np.random.default_rng(0)
    microseconds: dict[str, float] = {}
    speedups: dict[str, float] = {}
    for batch_size in BATCH_SIZES:
        for num_leaves in SIZES:
            calls = {"ours": draw_indices(num_leaves, batch_size, rng)}
            if num_leaves in COMPARED_SIZES:
                calls["cpprb"] = draw_indices_of_cpprb(num_leaves, batch_size, rng)
            times = side_by_side(calls, seconds)
            case = f"{batch_size} of 2^{num_leaves.bit_length() - 1}"
            microseconds |= {f"{name}, {case}": 1e6 * median for name, median in medians(times).items()}
            text = f"{case}: {microseconds[f'ours, {case}']:.0f} us"
            if "cpprb" in times:
                speedups[case] = ratio(times["cpprb"], times["ours"])
                text += f", cpprb {microseconds[f'cpprb, {case}']:.0f} us: {speedups[case]:.1f} times as long"
            say(text)
    targets = {f"speedup, {case}": target(speedup, at_least=2.0) for case, speedup in speedups.items()}
    growths = [microseconds[f"ours, {size} of 2^21"] / microseconds[f"ours, {size} of 2^16"] for size in BATCH_SIZES]
    growth = statistics.geometric_mean(growths) / math.log(2**21, 2**16)
    targets["growth from 2^16 to 2^21 leaves, over that of the logarithm"] = target(growth, at_most=1.0)
    finish("sampling indices", {"microseconds": microseconds}, targets)


def draw_indices(num_leaves: int, batch_size: int, rng: np.random.Generator) -> Callable[[], None]:
    """Returns a function that draws a batch from a full tree, computes its weights and updates its priorities."""
    tree = SumTree(num_leaves)
    for start in range(0, num_leaves, FILL):
        tree.set_range(start, rng.random(FILL) ** ALPHA)
    strata = np.arange(batch_size)
    new_priorities = rng.random(batch_size).astype(np.float32)

    def call() -> None:
        leaves = tree.find((strata + rng.random(batch_size)) * (tree.total / batch_size))
        importance_weights(tree.get(leaves)[None], BETA)
        tree.set(leaves, new_priorities.astype(np.float64) ** ALPHA)

    return call


def draw_indices_of_cpprb(num_leaves: int, batch_size: int, rng: np.random.Generator) -> Callable[[], None]:
    """Returns the same function for cpprb."""
    buffer = peer("cpprb").PrioritizedReplayBuffer(num_leaves, {"x": {"dtype": np.uint8}}, alpha=ALPHA)
    for _ in range(0, num_leaves, FILL):
        buffer.add(x=np.zeros(FILL, np.uint8), priorities=rng.random(FILL))
    new_priorities = rng.random(batch_size).astype(np.float32)

    def call() -> None:
        sample = buffer.sample(batch_size, BETA)
        buffer.update_priorities(sample["indexes"], new_priorities)

    return call


def measure_pixels(num_stored: int, seconds: float) -> None:
    """Fills the three replays, measures them in turns, and prints the report."""
    for package in ("cpprb", "flashbax"):
        peer(package)  # ends the benchmark before any measurement if one is not installed
    settings = [f"replay.capacity_transitions={num_stored}", "replay.journal=false", "replay.samples_per_insert=0"]
    config = load(ROOT / "configs" / "atari.yaml", [*settings, "replay.min_size_to_sample=1"])
    rng = np.random.default_rng(0)
    calls: dict[str, Callable[[], object]] = {}
    for name, make in (("ours", ours), ("flashbax", flashbax), ("cpprb", cpprb)):
        calls[name] = make(config, num_stored, rng)
        say(f"{name}: filled with {num_stored:,} transitions")
    times = side_by_side(calls, seconds)
    milliseconds = {name: 1e3 * median for name, median in medians(times).items()}
    for name, took in milliseconds.items():
        say(f"{name}: {took:.1f} ms a batch of {BATCH_SIZE}")
    speedups = {name: ratio(times[name], times["ours"]) for name in ("flashbax", "cpprb")}
    targets = {f"times as fast as {name}": target(speedup, at_least=1.0) for name, speedup in speedups.items()}
    finish("sampling pixels", {"milliseconds of a batch": milliseconds, "transitions": num_stored}, targets)


def ours(config: Config, num_stored: int, rng: np.random.Generator) -> Callable[[], object]:
    """Returns a function that draws a batch with its pixels and writes new priorities."""
    spec = describe(config).spec
    replay = Replay(config, spec, rng)
    store = create_store(spec, replay.buffer.capacity_segments)
    for number in range(1, num_stored // spec.max_transitions + 1):
        segment = random_segment(spec, rng)
        record = encode_record(segment, spec, peer_id=1, sequence=number, produced=number * spec.max_transitions)
        slot = replay.insert(record, segment.columns, 0.0)
        store = insert_segments(store, np.array([slot]), *jax.tree.map(lambda array: array[None], segment))
    gathered = jax.jit(partial(gather, frame_stack=spec.frame_stack))
    priorities = rng.random(BATCH_SIZE).astype(np.float32)

    def call() -> object:
        draw = replay.sample(1, BATCH_SIZE, 0.0)
        importance_weights(draw.probabilities[None], BETA)
        batch = jax.block_until_ready(gathered(store, draw.indices))
        replay.buffer.update_priorities(draw.indices, draw.generations, priorities)
        return batch

    return call


def random_segment(spec: SegmentSpec, rng: np.random.Generator) -> Segment:
    """Returns a full segment without an end of an episode; half of each of its frames is noise."""
    frames = np.zeros((spec.slots, *spec.frame_shape), spec.frame_dtype)
    frames[:, ::2] = rng.integers(256, size=frames[:, ::2].shape, dtype=np.uint8)
    columns = zero_columns(spec)
    starts = slice(spec.frame_stack - 1, spec.slots - spec.n_step)
    columns["bootstrap_offset"][starts] = spec.n_step
    columns["discount"][starts] = 0.99**spec.n_step
    columns["priority"][starts] = rng.random(spec.max_transitions) + 0.01
    return Segment(frames, columns)


def flashbax(config: Config, num_stored: int, rng: np.random.Generator) -> Callable[[], object]:
    """Returns the same function for Flashbax, jitted as its documentation shows."""
    stack = (config.environment.frame_stack, config.environment.frame_size, config.environment.frame_size)
    buffer = peer("flashbax").make_prioritised_flat_buffer(
        max_length=num_stored,
        min_length=1,
        sample_batch_size=BATCH_SIZE,
        add_sequences=True,
        priority_exponent=ALPHA,
        device="cpu",
    )
    step = {"observation": jnp.zeros(stack, jnp.uint8), "action": jnp.int32(0), "reward": jnp.float32(0)}
    state = buffer.init(step | {"discount": jnp.float32(0)})
    add = jax.jit(buffer.add, donate_argnums=0)
    for _ in range(num_stored // INSERTED):
        observations = rng.integers(256, size=(INSERTED, *stack), dtype=np.uint8)
        numbers = {"action": np.zeros(INSERTED, np.int32), "reward": np.zeros(INSERTED, np.float32)}
        state = add(state, {"observation": observations, **numbers, "discount": numbers["reward"]})
    sample = jax.jit(buffer.sample)
    set_priorities = jax.jit(buffer.set_priorities, donate_argnums=0)
    priorities = jnp.asarray(rng.random(BATCH_SIZE), jnp.float32)
    key = jax.random.key(0)

    def call() -> object:
        nonlocal state, key
        key, used = jax.random.split(key)
        batch = sample(state, used)
        weights = (num_stored * batch.probabilities) ** -BETA
        state = set_priorities(state, batch.indices, priorities)
        return jax.block_until_ready((batch.experience, weights / weights.max(), state.sum_tree_state))

    return call


def cpprb(config: Config, num_stored: int, rng: np.random.Generator) -> Callable[[], object]:
    """Returns the same function for cpprb."""
    size, depth = config.environment.frame_size, config.environment.frame_stack
    columns = {
        "observation": {"shape": (size, size, depth), "dtype": np.uint8},
        "action": {"dtype": np.int32},
        "reward": {"dtype": np.float32},
        "discount": {"dtype": np.float32},
    }
    buffer = peer("cpprb").PrioritizedReplayBuffer(
        num_stored, columns, alpha=ALPHA, next_of="observation", stack_compress="observation"
    )
    for _ in range(num_stored // INSERTED):
        frames = rng.integers(256, size=(INSERTED + depth, size, size), dtype=np.uint8)
        stacks = np.stack([np.moveaxis(frames[i : i + depth], 0, -1) for i in range(INSERTED + 1)])
        numbers = {name: np.zeros(INSERTED) for name in ("action", "reward", "discount")}
        buffer.add(
            observation=stacks[:-1], next_observation=stacks[1:], **numbers, priorities=rng.random(INSERTED) + 0.01
        )
    priorities = rng.random(BATCH_SIZE)

    def call() -> object:
        batch = buffer.sample(BATCH_SIZE, BETA)
        buffer.update_priorities(batch["indexes"], priorities)
        return batch

    return call


if __name__ == "__main__":
    main()
