"""What a GPU makes of the program, in one command of at most four minutes; on a CPU a small version of the same.

The peaks of the device; the bare update of four configurations in float32 and bfloat16, each with its share of the
peak; the learner, relative to its bare update; the insertion of segments, relative to a copy; the memory of the frame
store; and whole runs of configs/atari.yaml with 1 to 4 actor processes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apex_jax.agent.frame_store import create_store, insert_segments, store_bytes
from apex_jax.agent.space_to_depth import frame_block_size
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.device import device_memory_bytes, keep_compiled_programs
from apex_jax.environments.environment import describe
from apex_jax.types import zero_columns
from benchmarks.report import finish, say, target
from benchmarks.roles import ROOT
from benchmarks.system import whole
from benchmarks.update import BareUpdate, Peak, measure_peak
from benchmarks.workers import measure_learner

CONFIGS = ("paper", "atari", "atari_cpu", "humanoid")
DTYPES = ("float32", "bfloat16")
PROCESSES = (1, 2, 3, 4)
SMALL_PEAK = 256, 2**20  # rows of a matrix, bytes of a copy
SMALL = ["learner.updates_per_call=1", "network.channels=[4,4,4]", "network.hidden_units=8"]
SMALL += ["network.policy_units=[8,8]", "network.critic_units=[8,8]"]
SMALL_RUN = ["actor.environments=4", "replay.capacity_transitions=20000", "replay.min_size_to_sample=500"]
METRICS = "metrics_interval_seconds=1"
SEGMENTS = 512  # of the frame store that segments are inserted into: 231 MB


def main() -> None:
    """Measures everything, the whole runs last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, help="of each measurement; 2, and on a CPU 0.1")
    parser.add_argument("--batch-size", type=int, help="512; on a CPU 4, with tiny networks")
    parser.add_argument("--processes", type=int, nargs="*", help="actor processes of the whole runs; on a CPU only 1")
    parser.add_argument("--configs", nargs="+", default=CONFIGS, help="of the updates")
    arguments = parser.parse_args()
    is_gpu = jax.default_backend() == "gpu"
    keep_compiled_programs()
    seconds = arguments.seconds or (2.0 if is_gpu else 0.1)
    settings = [f"learner.batch_size={arguments.batch_size or (512 if is_gpu else 4)}", *([] if is_gpu else SMALL)]
    peaks = {dtype: measure_peak(dtype, *([] if is_gpu else SMALL_PEAK)) for dtype in DTYPES}
    figures: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    figures["peak"] = {dtype: peak._asdict() for dtype, peak in peaks.items()}
    for dtype, peak in peaks.items():
        say(f"{figures['device']}, {dtype}: {peak.operations_per_second / 1e12:,.1f} TFLOP/s")
    figures["update"] = {name: updates(name, settings, peaks, seconds) for name in arguments.configs}
    figures["frame store"] = frame_store(load(ROOT / "configs" / "atari.yaml"), seconds, peaks["float32"])
    figures["learner"] = measure_learner("atari", 12_500.0 if is_gpu else 500.0, 5 * seconds, settings)
    say(f"learner: {figures['learner']['of the limit']:.2f} of the bare update")
    figures["whole"] = {}
    for processes in arguments.processes if arguments.processes is not None else PROCESSES if is_gpu else (1,):
        run = [f"actor.processes={processes}", METRICS, "total_minutes=0", *settings, *([] if is_gpu else SMALL_RUN)]
        frames, rate = whole("atari", run, warm_up_seconds=3 * seconds, seconds=5 * seconds)
        figures["whole"][f"{processes} actor processes"] = {"frames/s": frames, "updates/s": rate}
        say(f"whole, {processes} actor processes: {frames:,.0f} frames/s, {rate:,.1f} updates/s")
    targets = {"learner: of the bare update": target(figures["learner"]["of the limit"], at_least=0.95)}
    if is_gpu and figures["whole"]:
        targets["paper, bfloat16: updates/s"] = target(figures["update"]["paper"]["bfloat16"]["updates/s"], 1_500)
        targets["whole: frames/s"] = target(max(run["frames/s"] for run in figures["whole"].values()), 100_000)
    finish("gpu", figures, targets)


def updates(name: str, settings: list[str], peaks: dict[str, Peak], seconds: float) -> dict[str, dict[str, float]]:
    """Returns the speed of the bare update of a configuration in each dtype."""
    config, figures = load(ROOT / "configs" / f"{name}.yaml", settings), {}
    for dtype, peak in peaks.items():
        update = BareUpdate(config, jnp.dtype(dtype))
        rate = update.per_second(seconds)
        share = rate * update.operations / peak.operations_per_second
        figures[dtype] = {"updates/s": rate, "GFLOP": update.operations / 1e9, "share of peak operations": share}
        say(f"{name}, batch {config.learner.batch_size}, {dtype}: {rate:,.1f} updates/s, {share:.1%} of the peak")
    return figures


def frame_store(config: Config, seconds: float, peak: Peak) -> dict[str, float]:
    """Returns the memory of a million transitions, how many fit, and the speed at which segments are inserted."""
    spec = describe(config).spec
    of_a_million = store_bytes(spec, spec.ring_segments(1_000_000))
    rng = np.random.default_rng(0)
    frames = rng.integers(256, size=(8, spec.slots, *spec.frame_shape), dtype=np.uint8)
    columns = {name: np.stack([column] * 8) for name, column in zero_columns(spec).items()}
    store = create_store(spec, SEGMENTS, block_size=frame_block_size(config.network, spec.frame_shape))
    slots = [np.arange(start, start + 8, dtype=np.int32) for start in range(0, SEGMENTS, 8)]

    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:  # the first one compiles
        start = time.perf_counter()
        for of_a_call in slots:
            store = insert_segments(store, of_a_call, frames, columns)
        jax.block_until_ready(store)
        times.append(time.perf_counter() - start)
    rate = SEGMENTS * spec.slots * spec.frame_bytes / min(times)
    say(f"frame store: {of_a_million / 1e9:.2f} GB a million transitions, insertion {rate / 1e9:.2f} GB/s")
    return {
        "GB of a million transitions": of_a_million / 1e9,
        "million transitions that fit": 0.9 * device_memory_bytes() / of_a_million,
        "insertion, GB/s": rate / 1e9,
        "insertion, of a copy on the device": rate / peak.bytes_per_second,
    }


if __name__ == "__main__":
    main()
