"""The device of a process: chosen before JAX is imported, then checked; its memory and its cache of programs."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import zlib
from pathlib import Path

from apex_jax.config import Config
from apex_jax.host.errors import FatalError, first_line, short_repr
from apex_jax.host.machine import check_threads, usable_cores, usable_memory_bytes
from apex_jax.host.program import CHECKOUT

CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# A container may have only the second; the third is that of WSL.
GPU_FILES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
THREADS_OF_A_ROLE = 16  # a guess that is too low: with one core, a role that uses JAX has some 20
CORES_PER_ACTOR = 5  # on a GPU; an H100 and 16 cores, of which 10 were busy, were faster with 3 actors than with one
ACTORS_ON_A_GPU = 8  # limit, a guess: each takes hundreds of MB of the GPU's memory, and some of its time


def choose_device(role: str, config: Config) -> None:
    """Chooses the device of this role, before JAX is first used; with "auto" JAX chooses the best one.

    XLA starts a thread for each core of the machine. With a lower CPU quota, the kernel would stop all of them for
    most of each period, so XLA gets only as many cores as the quota allows.
    """
    if role == "local":  # the supervisor computes nothing, and its roles would inherit the settings
        if config.environment.is_jax:  # but it traces this environment
            import jax

            jax.config.update("jax_platforms", "cpu")
        return
    device = _device_of(role, config)
    if device != "auto":
        os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[device]
    if role != "learner":  # it may share the learner's GPU, of which each process would reserve most of the memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if usable_cores() < len(os.sched_getaffinity(0)):
        os.environ.setdefault("PJRT_NPROC", str(usable_cores()))


def _device_of(role: str, config: Config) -> str:
    """Returns auto, cpu or gpu; for an evaluator with auto, the CPU unless the learner finds a GPU."""
    if role == "evaluator" and config.evaluator.device == "auto":
        return "auto" if has_gpu(config) else "cpu"
    devices = {"learner": config.learner.device, "actor": config.actor.device, "evaluator": config.evaluator.device}
    return devices.get("learner" if role == "one_process" else role, "cpu")


def has_gpu(config: Config) -> bool:
    """Returns whether the learner of this machine is going to use a GPU, without the second that importing JAX takes.

    JAX, too, looks for these files to find out whether there is a GPU.
    """
    platforms = "" if config.learner.device == "gpu" else os.environ.get("JAX_PLATFORMS", "")
    is_wanted = config.learner.device != "cpu" and (not platforms or "cuda" in platforms or "gpu" in platforms)
    is_visible = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and any(map(Path.exists, GPU_FILES))
    return is_wanted and is_visible and any(map(importlib.util.find_spec, CUDA_PLUGINS))


def actor_processes(cores: int, has_gpu: bool) -> tuple[int, str]:
    """Returns how many actor processes suit a machine, and a line for the user.

    Without a GPU the policy and EnvPool of one actor use all cores.
    """
    number = min(max(1, round(cores / CORES_PER_ACTOR)), ACTORS_ON_A_GPU) if has_gpu else 1
    why = f"{cores} core{'s' * (cores > 1)}{' and a GPU' * has_gpu}"
    return number, f"{number} actor process{'es' * (number > 1)}, for {why}"


def check_device(role: str, config: Config) -> None:
    """Raises FatalError if JAX cannot use the device of the configuration or of JAX_PLATFORMS.

    Raises RunError if the limit of threads is too low for the role, or for all roles of a local run.
    """
    roles = 3 + max(1, config.actor.processes) if role == "local" else 1
    check_threads(THREADS_OF_A_ROLE * roles)
    wanted = _device_of(role, config)
    platforms = os.environ.get("JAX_PLATFORMS", "")  # if the device is "auto", the user has set it
    if wanted != "gpu" and not (wanted == "auto" and platforms):
        return
    import jax  # not at the top: the device is chosen before JAX is imported

    packages = "requirements-gpu.txt" if CHECKOUT else "apex-jax[gpu]"
    try:
        jax.devices()
    except Exception as error:  # RuntimeError, or any other exception of a missing plugin
        asked, what, fix = f"{role}.device=gpu", "GPU", f"install {packages} and a driver, or set auto"
        if wanted == "auto":
            asked, what, fix = f"JAX_PLATFORMS={short_repr(platforms)}", "such device", "unset it, or set it to cpu"
        raise FatalError(f"{asked}: JAX finds no {what} ({first_line(error)}); {fix}") from None


def keep_compiled_programs() -> None:
    """Enables JAX's cache of compiled programs, before the first is compiled, so that a second start learns sooner.

    The cache is in the user's cache folder, separate for each kind of processor; JAX_COMPILATION_CACHE_DIR overrides
    it. If it is not writable, every start compiles again. A run of Pong on the CPU adds 0.8 MB to it.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = caches / "apex_jax" / f"xla-{_processor_kind()}"
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: `Path.home` finds no home directory
        return
    if os.access(cache, os.W_OK):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    if (jax := sys.modules.get("jax")) and (folder := os.environ.get("JAX_COMPILATION_CACHE_DIR")):
        jax.config.update("jax_compilation_cache_dir", folder)  # it has read the variables already
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _processor_kind() -> str:
    """Returns a name for this processor's instruction set: compiled programs may not run on another one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{zlib.crc32(features.encode()):08x}"


def accelerator_name() -> str | None:
    """Returns the name of the learner's GPU; None if it learns on a CPU."""
    import jax  # not at the top: the device is chosen before JAX is imported

    device = jax.devices()[0]
    return None if device.platform == "cpu" else str(device.device_kind)


def device_memory_bytes() -> int:
    """Returns the memory of the learner's device; for a CPU, what this process may use."""
    import jax  # not at the top: the device is chosen before JAX is imported

    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or usable_memory_bytes())
