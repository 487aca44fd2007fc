"""The command status: prints the status of a process, its summary first."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from apex_jax.host.argument_parser import Parser
from apex_jax.host.errors import short_repr
from apex_jax.host.program import NAME
from apex_jax.operations.status_summary import as_text, duration, summary
from apex_jax.transport.status_link import fetch

ANSWER_SECONDS = 4.0  # so that the command, with the start of Python, ends within 5 seconds
HEAD = ("role", "name", "pid", "healthy", "uptime_seconds", "progress_age_seconds")  # shown in the first line


def run(arguments: Sequence[str]) -> int:
    """Prints the status of the process at an address; returns 0 if it is healthy, otherwise 1.

    `arguments`: after "status". Raises UsageError, and StatusError if no process answers.
    """
    options = _parser().parse_args(arguments)
    healthy, content = fetch(options.address, ANSWER_SECONDS)
    if options.json:
        json.dump(content, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(table(healthy, content)))
    return 0 if healthy else 1


def table(healthy: bool, content: dict[str, Any]) -> list[str]:
    """Returns a report as printable lines: a summary, then every value. The peer may have put anything into it."""
    who = f"{short_repr(content.get('name'))} ({short_repr(content.get('role'))}, pid {short_repr(content.get('pid'))})"
    age = content.get("progress_age_seconds")
    state = "healthy" if healthy else f"NOT HEALTHY: no progress for {as_text('', age)} s"
    head = f"{who}: {state}, up {duration(content.get('uptime_seconds'))}"
    rows = [row for row in _rows("", content) if row[0] not in HEAD]
    return [head, *_columns(list(summary(content))), "", *_columns(rows)]


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name.ljust(width)}  {text}" for name, text in rows]


def _rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the leaves of a report by their dotted names."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if members is None:
        yield short_repr(name), as_text(name, value)
        return
    for key, member in members:
        yield from _rows(f"{name}.{key}" if name else str(key), member)


def _parser() -> Parser:
    parser = Parser(
        "status",
        description="Queries a process's status. Exit code 0: healthy; 1: not, or no answer within 5 seconds.",
        epilog=f"example: {NAME} status tcp://127.0.0.1:8080",
        allow_abbrev=False,
    )
    parser.add_argument("address", metavar="ADDRESS", help="the addresses.status of that process")
    parser.add_argument("--json", action="store_true", help="print the report as it came")
    return parser
