"""The help text, unit and allowed values of a configuration key, held in the metadata of its dataclass field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class JsonObject(str):
    """The text of a JSON object; in files and on the command line, a mapping of any names to values."""

    __slots__ = ()


@dataclass(frozen=True)
class Key:
    """The help text of a key, and the limits of its values."""

    text: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


def key(
    default: Any,
    text: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Returns a dataclass field whose metadata holds its `Key`."""
    return field(default=default, metadata={"key": Key(text, unit, low, high, choices)})
