"""The help text, unit and allowed values of a configuration key, held in the metadata of its dataclass field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class JsonObject(str):
    """The text of a JSON object; in files and on the command line, a mapping of any names to values."""

    __slots__ = ()


def names_code(value: str) -> bool:
    """Returns whether the value of `algorithm.name` or `network.name` names code of the user, MODULE:NAME."""
    return ":" in value


@dataclass(frozen=True)
class Key:
    """The help text of a key, the limits of its values, and which processes and files must have the same value.

    `scope`: "run": all roles of a run, and its files; "weights": the learner, receivers of its weights and checkpoints;
    "checkpoint": a learner and the checkpoint from which it resumes; empty: none.
    """

    text: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    scope: str = ""


def key(
    default: Any,
    text: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    scope: str = "",
) -> Any:
    """Returns a dataclass field whose metadata holds its `Key`."""
    return field(default=default, metadata={"key": Key(text, unit, low, high, choices, scope)})
