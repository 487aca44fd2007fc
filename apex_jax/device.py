"""The device that a process computes on: chosen before JAX is imported, checked, its memory, and what it compiled."""

from __future__ import annotations

import os
import platform
import zlib
from pathlib import Path

from apex_jax.config import Config
from apex_jax.errors import FatalError, first_line

OWN_GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def choose_device(role: str, config: Config) -> None:
    """Tells JAX, before it is first used, what this role computes on; "auto" leaves it the best there is."""
    if role == "local":
        return  # computes nothing, and what it sets its roles would inherit
    device = {"learner": config.learner.device, "actor": config.actor.device}.get(role, "cpu")
    if device != "auto":
        os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[device]
    if role == "actor":  # may share the learner's GPU, most of whose memory JAX reserves for the first that asks
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def check_device(role: str, config: Config) -> None:
    """Raises FatalError where a GPU is asked for and there is none that JAX can use."""
    if {"learner": config.learner.device, "actor": config.actor.device}.get(role) != "gpu":
        return
    import jax  # not at the top: the device is chosen before JAX is imported

    try:
        jax.devices()
    except Exception as error:  # RuntimeError, or whatever the plugin that is missing is missed with
        what, fix = f"JAX finds no GPU ({first_line(error)})", "install requirements-gpu.txt and a driver, or set auto"
        raise FatalError(f"{role}.device=gpu: {what}; {fix}") from None


def keep_compiled_programs() -> None:
    """Has JAX keep what it compiles, before it is first used, so that a second start learns sooner.

    In the user's cache folder, apart for each kind of processor; JAX_COMPILATION_CACHE_DIR says another place. Without
    a place that can be written every start compiles anew.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = caches / "apex_jax" / f"xla-{_processor_kind()}"
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return
    if os.access(cache, os.W_OK):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


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
    return int(stats.get("bytes_limit") or _main_memory_bytes())


def _main_memory_bytes() -> int:
    """Returns the machine's memory, or the limit of this process's control group where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        [group] = [line[3:] for line in OWN_GROUP.read_text().splitlines() if line.startswith("0::")]
        limit = int(Path(f"{GROUPS}{group}", "memory.max").read_text())
    except (OSError, ValueError):  # there are none, or "max"
        return machine
    return min(machine, limit)
