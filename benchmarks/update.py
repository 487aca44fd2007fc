"""The jitted update alone: its time, its operations and bytes, and their share of the device's measured peaks.

Operations are those of the matrix products and convolutions, counted from their shapes: XLA's own count does not see
what cuDNN computes. Bytes are XLA's count; the peaks are those of a large matrix product and of a large copy on the
same device in the same run. XLA counts every byte that an operation reads or writes, but some of them stay in caches
and never reach the memory: a small update may therefore exceed the peak bandwidth.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.frame_store import FrameStore, create_store
from apex_jax.agent.registry import make_algorithm
from apex_jax.agent.space_to_depth import frame_block_size
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
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
        spec = describe(config).spec
        self.updates_per_call = config.learner.updates_of_a_call(jax.default_backend() == "cpu")
        algorithm = make_algorithm(config, spec, dtype)
        self._store = noise_store(spec, SEGMENTS, frame_block_size(config.network, spec.frame_shape))
        rng = np.random.default_rng(0)
        shape = (self.updates_per_call, config.learner.batch_size)
        first, last = spec.frame_stack - 1, spec.slots - spec.n_step
        indices = rng.integers(SEGMENTS, size=shape) * spec.slots + rng.integers(first, last, size=shape)
        self._batch = jax.device_put((indices.astype(np.int32), np.ones(shape, np.float32), np.float32(1)))
        self._state = algorithm.init(jax.random.key(0))
        arguments = self._state, self._store, *self._batch
        update: Any = jax.jit(algorithm.update, donate_argnums=0)
        self.operations = num_operations(jax.make_jaxpr(update)(*arguments).jaxpr) / self.updates_per_call
        self._update = update.lower(*arguments).compile()
        # XLA counts a loop's body once.
        is_unrolled = jax.default_backend() == "cpu" and spec.action.dtype == "int32" and len(spec.frame_shape) > 1
        self.bytes = float(self._update.cost_analysis()["bytes accessed"])
        self.bytes /= self.updates_per_call if is_unrolled else 1
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
            self._state, output = self._update(self._state, self._store, *self._batch)
        jax.block_until_ready(output)
        return time.perf_counter() - start


def num_operations(jaxpr: Any) -> float:
    """Returns the operations of the matrix products and convolutions of a program; a product and its sum are two."""
    total = 0.0
    for equation in jaxpr.eqns:
        values, parameters = [each.aval for each in (*equation.invars, *equation.outvars)], equation.params
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            total += 2.0 * values[-1].size * math.prod(values[0].shape[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            image, kernel, output = values
            layout = parameters["dimension_numbers"]
            features, channels = (kernel.shape[axis] for axis in layout.rhs_spec[:2])
            window = math.prod(kernel.shape[axis] for axis in layout.rhs_spec[2:])
            # The smaller one: in a backward pass, most pixels of the output meet zeros between those of the image.
            total += 2.0 * window * min(output.size * channels, image.size * features)
        for parameter in parameters.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                total += parameters.get("length", 1) * num_operations(inner)
    return total


def noise_store(spec: SegmentSpec, num_segments: int, block_size: int = 1) -> FrameStore:
    """Returns a frame store full of noise."""
    store = create_store(spec, num_segments, block_size=block_size)
    rng = np.random.default_rng(0)
    is_pixels = store.frames.dtype == np.uint8
    noise = (
        rng.integers(256, size=store.frames.shape, dtype=np.uint8) if is_pixels else rng.normal(size=store.frames.shape)
    )
    return store._replace(
        frames=jnp.asarray(noise, store.frames.dtype),
        columns=store.columns
        | {
            "discount": jnp.full_like(store.columns["discount"], 0.97),
            "bootstrap_offset": jnp.full_like(store.columns["bootstrap_offset"], spec.n_step),
        },
    )


def measure_peak(dtype: str, size: int = 0, copy_bytes: int = 0) -> Peak:
    """Returns the speed of the fastest of 5 matrix products and of the fastest of 5 copies; 0: sizes by the device."""
    size = size or MATRIX[jax.default_backend()]
    copy_bytes = copy_bytes or COPY_BYTES[jax.default_backend()]
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    array = jnp.ones(copy_bytes // 4, jnp.float32)
    copy = jax.jit(lambda a: a + 1)  # reads and writes each byte once
    return Peak(2 * size**3 / fastest(lambda: product(matrix)), 2 * copy_bytes / fastest(lambda: copy(array)))


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
