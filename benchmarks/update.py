"""The jitted update alone: its time, its operations and bytes, and their share of the device's measured peaks.

Operations and bytes are XLA's own count of the compiled program; the peaks are those of a large matrix product and of a
large copy on the same device in the same run. XLA counts every byte that an operation reads or writes, but some of them
stay in caches and never reach the memory: a small update may therefore exceed the peak bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.frame_store import FrameStore, create_store
from apex_jax.agent.registry import make_algorithm
from apex_jax.config import Config
from apex_jax.environments.environment import segment_spec
from apex_jax.settings import load
from apex_jax.types import SegmentSpec
from benchmarks.report import finish, say
from benchmarks.roles import ROOT

CONFIGS = ("pong_cpu", "paper", "walker")
DTYPES = ("float32", "bfloat16")
SEGMENTS = 256  # segments of noise in the frame store
MATRIX = {"cpu": 3072, "gpu": 16384}
COPY_BYTES = {"cpu": 2**28, "gpu": 2**32}


class Peak(NamedTuple):
    """The highest measured speed of the device."""

    operations_per_second: float
    bytes_per_second: float


def main() -> None:
    """Measures every configuration, batch size and dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 128, 512, 4096])
    parser.add_argument("--seconds", type=float, default=4.0, help="of measuring, for each figure")
    arguments = parser.parse_args()
    peaks = {dtype: measure_peak(dtype) for dtype in DTYPES}
    for dtype, peak in peaks.items():
        say(
            f"{jax.devices()[0]}, {dtype}: {peak.operations_per_second / 1e9:,.0f} GFLOP/s,"
            f" {peak.bytes_per_second / 1e9:,.0f} GB/s"
        )
    figures: dict[str, Any] = {"peak": {dtype: peak._asdict() for dtype, peak in peaks.items()}}
    for name in CONFIGS:
        for batch_size in arguments.batch_sizes:
            for dtype in DTYPES:
                config = load(ROOT / "configs" / f"{name}.yaml", [f"learner.batch_size={batch_size}"])
                figure = measure_update(config, dtype, peaks[dtype], arguments.seconds)
                figures[f"{name} network, batch {batch_size}, {dtype}"] = figure
                say(
                    f"{name} network, batch {batch_size}, {dtype}: {figure['updates/s']:,.4g} updates/s,"
                    f" {figure['share of peak operations']:.0%} of the operations at peak"
                )
    finish("update", figures, {})


def measure_update(config: Config, dtype: str, peak: Peak, seconds: float) -> dict[str, float]:
    """Returns speed and cost of one update."""
    update = BareUpdate(config, jnp.dtype(dtype))
    seconds_each = 1 / update.per_second(seconds)
    compute = update.operations / peak.operations_per_second / seconds_each
    memory = update.bytes / peak.bytes_per_second / seconds_each
    return {
        "updates/s": 1 / seconds_each,
        "GFLOP": update.operations / 1e9,
        "MB": update.bytes / 1e6,
        "share of peak operations": compute,
        "share of peak bandwidth": memory,
    }


class BareUpdate:
    """The learner's jitted update on random data that are already on the device, without the rest of the learner."""

    def __init__(self, config: Config, dtype: Any):
        """Compiles the update."""
        spec = segment_spec(config)
        self.updates_per_call = config.learner.updates_of_a_call(jax.default_backend() == "cpu")
        self._algorithm = make_algorithm(config, spec, dtype)
        self._store = noise_store(spec, SEGMENTS)
        rng = np.random.default_rng(0)
        shape = (self.updates_per_call, config.learner.batch_size)
        first, last = spec.frame_stack - 1, spec.slots - spec.n_step
        indices = rng.integers(SEGMENTS, size=shape) * spec.slots + rng.integers(first, last, size=shape)
        self._batch = jax.device_put((indices.astype(np.int32), np.ones(shape, np.float32), np.float32(1)))
        self._state = self._algorithm.init(jax.random.key(0))
        compiled: Any = self._algorithm.update
        indices, weights, share = self._batch
        one = compiled.lower(self._state, self._store, indices[:1], weights[:1], share)  # XLA counts a loop's body once
        cost = one.compile().cost_analysis()
        self.operations, self.bytes = float(cost["flops"]), float(cost["bytes accessed"])
        self._run(1)

    def per_second(self, seconds: float) -> float:
        """Returns updates/s: the median of up to 5 rounds of calls; no call waits for the previous one's result."""
        calls = max(1, round(seconds / 5 / self._run(1)))
        rounds = [self._run(calls)]
        while len(rounds) < 5 and sum(rounds) < 2 * seconds:
            rounds.append(self._run(calls))
        return calls * self.updates_per_call / statistics.median(rounds)

    def _run(self, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            self._state, output = self._algorithm.update(self._state, self._store, *self._batch)
        jax.block_until_ready(output)
        return time.perf_counter() - start


def noise_store(spec: SegmentSpec, num_segments: int) -> FrameStore:
    """Returns a frame store full of noise."""
    store = create_store(spec, num_segments)
    rng = np.random.default_rng(0)
    is_pixels = store.frames.dtype == np.uint8
    noise = rng.integers(256, size=store.frames.shape) if is_pixels else rng.normal(size=store.frames.shape)
    return store._replace(
        frames=jnp.asarray(noise, store.frames.dtype),
        columns=store.columns
        | {
            "discount": jnp.full_like(store.columns["discount"], 0.97),
            "bootstrap_offset": jnp.full_like(store.columns["bootstrap_offset"], spec.n_step),
        },
    )


def measure_peak(dtype: str) -> Peak:
    """Returns the speed of the fastest of 5 matrix products and of the fastest of 5 copies."""
    device = jax.default_backend()
    size = MATRIX[device]
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    array = jnp.ones(COPY_BYTES[device] // 4, jnp.float32)
    copy = jax.jit(lambda a: a + 1)  # reads and writes each byte once
    return Peak(2 * size**3 / fastest(lambda: product(matrix)), 2 * COPY_BYTES[device] / fastest(lambda: copy(array)))


def fastest(call: Callable[[], jax.Array]) -> float:
    """Returns the seconds of the fastest of 5 calls, after a first call that compiles."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times[1:])


if __name__ == "__main__":
    main()
