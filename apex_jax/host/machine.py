"""The cores, memory and threads that this process may use, within the limits of its control groups; its packages."""

from __future__ import annotations

import math
import operator
import os
import re
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from apex_jax.host.errors import RunError
from apex_jax.host.program import CHECKOUT

FIX_OF_THREADS = "raise the limit: `ulimit -u`, or pids.max of the control group (--pids-limit of a container)"
OWN_GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Returns how many cores this process may use: those of its CPU affinity, or its CPU quota if that is less.

    A quota of 2.5 cores counts as 3: one thread too many just waits, one too few leaves half a core idle.
    """
    cores = len(os.sched_getaffinity(0))
    for text in _read("cpu.max"):  # "150000 100000" or "max 100000"
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def usable_memory_bytes() -> int:
    """Returns the machine's memory, or the lowest limit of this process's control groups if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = _read("memory.max")
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


def check_threads(count: int) -> None:
    """Raises RunError if this process cannot have `count` more threads now, without which XLA aborts."""
    checked = threading.Event()
    try:
        for _ in range(count):
            threading.Thread(target=checked.wait, daemon=True).start()
    except RuntimeError as error:
        raise RunError(f"{error}; {FIX_OF_THREADS}") from None
    finally:
        checked.set()


def _read(name: str) -> Iterator[str]:
    """Yields the content of a file in this process's control group and in each group above: the limits of all apply.

    A container often mounts only its own group, at the root, while `/proc/self/cgroup` names the path on the host;
    therefore the root is read too. Control groups of version 1, which few systems still have, are not read.
    """
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        return
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        for directory in (Path(path), *Path(path).parents):
            try:
                yield (GROUPS / directory / name).read_text().strip()
            except OSError:  # this group has no such limit, or is not mounted here
                continue


# Its packages -------------------------------------------------------------------------------------------------------


_REQUIREMENT = re.compile(r"([\w-]+)(?:\[[\w,-]+\])?((?:[<>=]=?[\d.]+,?)+)$")
_COMPARE = {">=": operator.ge, "<": operator.lt, "==": operator.eq, ">": operator.gt, "<=": operator.le}


def untried_packages() -> list[str]:
    """Returns a warning for each package of another version than the requirements name."""
    if CHECKOUT is not None:
        lines = (CHECKOUT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    else:
        lines = metadata.requires("apex-jax") or []
    return [warning for line in lines if (warning := _warning_of(line.partition("#")[0].replace(" ", "")))]


def _warning_of(requirement: str) -> str:
    if not (match := _REQUIREMENT.match(requirement)):  # of an extra, or a comment
        return ""
    name, needed = match.groups()
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:  # its import says so
        return ""
    limits = re.findall(r"([<>=]=?)([\d.]+)", needed)
    if all(_COMPARE[sign](_numbers(found), _numbers(limit)) for sign, limit in limits):
        return ""
    return f"{name} {found} is installed, not tried with this program, which needs {needed}; another package may pin it"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", re.split(r"[a-z+]", version)[0])]
