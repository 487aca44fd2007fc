"""Whether the packages that this program uses have versions that it was tried with; environments may pin others."""

from __future__ import annotations

import operator
import re
from importlib import metadata

from apex_jax.host.program import CHECKOUT

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
