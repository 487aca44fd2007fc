"""The replay server alone, for a program that trains something else: here a linear regression, with NumPy.

    python examples/replay_only.py

It starts the server, inserts items, draws batches and writes priorities back. In the middle it kills the server and
starts it again: the client goes on by itself, and every acknowledged item is still there. docs/replay.md has the rest.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # finds apex_jax in a checkout, if it is not installed

from apex_jax import ReplayClient

SETTINGS = Path(__file__).with_suffix(".yaml")  # of the server and of its clients
TRUTH = np.arange(8, dtype=np.float32)  # the weights to be found
ITEMS = 4_000


def train(replay: ReplayClient, w: np.ndarray, updates: int) -> np.ndarray:
    """Returns the weights float32[8] of the regression after some updates, which draw the worst predictions most."""
    for _ in range(updates):
        items, weights, handles = replay.sample()
        error = items["y"] - items["x"] @ w
        w = w + 0.1 * (weights * error) @ items["x"] / len(error)
        replay.update_priorities(handles, np.abs(error) + 1e-3)
    return w


def insert(replay: ReplayClient, numbers: range, rng: np.random.Generator) -> None:
    """Inserts new items with a priority each; usually other processes do this, as many as wanted."""
    x = rng.normal(size=(len(numbers), 8)).astype(np.float32)
    y = (x @ TRUTH).astype(np.float32)
    replay.insert({"number": np.array(numbers), "x": x, "y": y}, priorities=np.abs(y) + 1e-3)


@contextlib.contextmanager
def server(directory: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `python main.py --role replay --config examples/replay_only.yaml`, and kills it at the end of the block."""
    command = [sys.executable, "-m", "apex_jax", "--role", "replay", "--config", str(SETTINGS)]
    process = subprocess.Popen([*command, f"run_directory={directory}", *sys.argv[1:]], cwd=SETTINGS.parents[1])
    try:
        yield process
    finally:
        process.kill()  # SIGKILL: the server has no time to save anything
        process.wait()


def main() -> None:
    """Trains, with a crash of the server in between; arguments are settings, such as addresses.sampling=..."""
    rng, w, half = np.random.default_rng(0), np.zeros(8, np.float32), ITEMS // 2
    with tempfile.TemporaryDirectory() as directory, ReplayClient(SETTINGS, *sys.argv[1:]) as replay:
        with server(directory):
            insert(replay, range(half), rng)
            w = train(replay, w, 50)
            replay.flush()  # returns once all items are acknowledged: no crash of the server can lose them now
        print(f"the server was killed; error of the weights: {np.abs(w - TRUTH).max():.3f}")
        with server(directory):
            insert(replay, range(half, ITEMS), rng)
            replay.flush()
            w = train(replay, w, 300)
            drawn = np.unique(np.concatenate([replay.sample().items["number"] for _ in range(1000)]))
        print(f"{np.sum(drawn < half)} of the {half} items from before the crash were drawn after it")
        print(f"error of the weights: {np.abs(w - TRUTH).max():.3f}")


if __name__ == "__main__":
    main()
