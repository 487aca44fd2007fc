"""Batches drawn with `apex_jax.ReplayClient` from a replay server of its own process, over tcp and with its journal.

The limit is the same batch gathered from the same items in this process: what the client does with each batch once its
indices are there. cpprb, whose prioritized buffer in C++ is in this process and keeps nothing on the disk, is the peer.
Each side draws, weighs, copies the items of all columns, and writes new priorities.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from apex_jax import ReplayClient
from apex_jax.item_codec import columns_of
from benchmarks.report import finish, medians, peer, ratio, say, side_by_side, target
from benchmarks.roles import free_tcp_addresses, role

ITEMS, BATCH_SIZE = 100_000, 512
INSERTED = 1_000  # at once
PREFETCH = 8
FILE = f"""
replay:
  columns: tokens:int32[512], reward:float32
  capacity_transitions: {2 * ITEMS}
  min_size_to_sample: {ITEMS}
learner:
  batch_size: {BATCH_SIZE}
"""


def main() -> None:
    """Fills the replay, then measures draws of the three in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring, for each figure")
    seconds = parser.parse_args().seconds
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32_000, size=(ITEMS, 512), dtype=np.int32)
    items = {"tokens": tokens, "reward": rng.normal(size=ITEMS).astype(np.float32)}
    experience, sampling = free_tcp_addresses(2)
    settings = [f"addresses.experience={experience}", f"addresses.sampling={sampling}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "replay.yaml")
        path.write_text(FILE)
        with role("replay", path, settings), ReplayClient(path, *settings, prefetch=PREFETCH) as replay:
            replay.insert({name: column[:1] for name, column in items.items()})
            replay.flush()  # the server has started
            inserts = insert(replay, items)
            say(f"{inserts:,.0f} items/s inserted and acknowledged, of {replay.dtype.itemsize} bytes")
            replay.sample()
            priorities = rng.random(BATCH_SIZE) + 0.1

            def draw() -> None:
                replay.update_priorities(replay.sample().handles, priorities)

            calls = {"ours": draw, "gather": gather(items, replay.dtype, rng), "cpprb": theirs(items, rng)}
            times = side_by_side(calls, seconds)
    milliseconds = {name: 1e3 * median for name, median in medians(times).items()}
    for name, took in milliseconds.items():
        say(f"{name}: {took:.2f} ms a batch of {BATCH_SIZE}")
    share = ratio(times["gather"], times["ours"])
    targets = {"speed of a draw, over that of its gather": target(share, at_least=0.3)}
    figures = {
        "milliseconds of a batch": milliseconds,
        "times as fast as cpprb": ratio(times["cpprb"], times["ours"]),
        "items/s inserted and acknowledged": inserts,
        "MB/s of them": inserts * replay.dtype.itemsize / 1e6,
    }
    finish("replay_client", figures, targets)


def insert(replay: ReplayClient, items: dict[str, np.ndarray]) -> float:
    """Inserts all items; returns the items/s until the last one is acknowledged."""
    start = time.perf_counter()
    for first in range(0, ITEMS, INSERTED):
        part = slice(first, first + INSERTED)
        replay.insert({name: column[part] for name, column in items.items()})
    replay.flush()
    return ITEMS / (time.perf_counter() - start)


def gather(items: dict[str, np.ndarray], dtype: np.dtype, rng: np.random.Generator) -> Callable[[], None]:
    """Returns a function that gathers a uniform batch from the bytes of the items."""
    rows = np.empty(ITEMS, dtype)
    for name, column in items.items():
        rows[name] = column
    ring = rows.view(np.uint8).reshape(ITEMS, -1)

    def draw() -> None:
        columns_of(ring[rng.integers(ITEMS, size=BATCH_SIZE)], dtype)

    return draw


def theirs(items: dict[str, np.ndarray], rng: np.random.Generator) -> Callable[[], None]:
    """Returns a function that draws from cpprb and writes new priorities."""
    columns = {"tokens": {"shape": 512, "dtype": np.int32}, "reward": {"dtype": np.float32}}
    buffer = peer("cpprb").PrioritizedReplayBuffer(ITEMS, columns, alpha=0.6)
    for first in range(0, ITEMS, INSERTED):
        part = slice(first, first + INSERTED)
        buffer.add(**{name: column[part] for name, column in items.items()}, priorities=rng.random(INSERTED))
    priorities = rng.random(BATCH_SIZE) + 0.1

    def draw() -> None:
        buffer.update_priorities(buffer.sample(BATCH_SIZE, 0.4)["indexes"], priorities)

    return draw


if __name__ == "__main__":
    main()
