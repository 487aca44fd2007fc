"""The device that a process computes on: chosen before JAX is imported, checked, its memory, and what it compiled."""

from __future__ import annotations

import contextlib
import os
import platform
import zlib
from pathlib import Path

from apex_jax.config import Config
from apex_jax.errors import FatalError, first_line, shown
from apex_jax.machine import usable_cores, usable_memory_bytes

CACHE_LIMIT_BYTES = 2**28  # of compiled programs; a run of Pong on the CPU keeps 0.8 MB


def choose_device(role: str, config: Config) -> None:
    """Sets, before JAX is first used, what this role computes on; "auto" leaves the best device to JAX.

    XLA makes one thread for each core of the machine. With a CPU quota below that they would all be stopped together
    for most of each period, so XLA is given the cores that the quota pays for.
    """
    if role == "local":
        return  # computes nothing, and what it sets its roles would inherit
    device = {"learner": config.learner.device, "actor": config.actor.device}.get(role, "cpu")
    if device != "auto":
        os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[device]
    if role == "actor":  # may share the learner's GPU, most of whose memory JAX reserves for the first that asks
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if usable_cores() < len(os.sched_getaffinity(0)):
        os.environ.setdefault("PJRT_NPROC", str(usable_cores()))


def check_device(role: str, config: Config) -> None:
    """Raises FatalError if JAX cannot use the device that is asked for: by the configuration, or by JAX_PLATFORMS."""
    wanted = {"learner": config.learner.device, "actor": config.actor.device}.get(role)
    platforms = os.environ.get("JAX_PLATFORMS", "")  # of the user, if the choice is left to JAX
    if wanted != "gpu" and not (wanted == "auto" and platforms):
        return
    import jax  # not at the top: the device is chosen before JAX is imported

    try:
        jax.devices()
    except Exception as error:  # RuntimeError, or whatever the plugin that is missing is missed with
        asked, what, fix = f"{role}.device=gpu", "GPU", "install requirements-gpu.txt and a driver, or set auto"
        if wanted == "auto":
            asked, what, fix = f"JAX_PLATFORMS={shown(platforms)}", "such device", "unset it, or set it to cpu"
        raise FatalError(f"{asked}: JAX finds no {what} ({first_line(error)}); {fix}") from None


def keep_compiled_programs() -> None:
    """Has JAX keep what it compiles, before it is first used, so that a second start learns sooner.

    In the user's cache folder, apart for each kind of processor; JAX_COMPILATION_CACHE_DIR names another place. If no
    place can be written, every start compiles anew. The folder is kept below `CACHE_LIMIT_BYTES`.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = caches / "apex_jax" / f"xla-{_processor_kind()}"
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return
    _evict_least_recently_used(cache.parent, CACHE_LIMIT_BYTES)
    if os.access(cache, os.W_OK):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _evict_least_recently_used(caches: Path, limit_bytes: int) -> None:
    """Deletes the compiled programs that were read longest ago, of any kind of processor, until the rest fits.

    JAX's own limit (jax_compilation_cache_max_size) is not used: a process killed between its two files of a program
    would make every later write fail.
    """
    programs = []
    for path in caches.glob("xla-*/*-cache"):
        with contextlib.suppress(OSError):  # another process has just deleted it
            status = path.stat()
            programs.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total_bytes = sum(size for _, size, _ in programs)
    for _, size, path in sorted(programs):
        if total_bytes <= limit_bytes:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total_bytes -= size


def _processor_kind() -> str:
    """Returns a name for the instructions that this processor has: compiled programs may use all of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{zlib.crc32(features.encode()):08x}"


def device_memory_bytes() -> int:
    """Returns how much memory the device has that JAX chose: its own, or on a CPU what this process may use."""
    import jax  # not at the top: the device is chosen before JAX is imported

    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or usable_memory_bytes())
