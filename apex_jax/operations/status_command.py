"""The command status: prints the status of a process, its summary first, or a table of the processes of a fleet."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from apex_jax.host.argument_parser import Parser
from apex_jax.host.errors import UsageError, short_repr
from apex_jax.host.program import NAME
from apex_jax.operations.status_summary import (
    MAX_LINES,
    ProcessStatus,
    as_text,
    duration,
    line,
    problems,
    summary,
    warnings,
)
from apex_jax.transport.status_link import StatusError, fetch

ANSWER_SECONDS = 4.0  # so that the command, with the start of Python, ends within 5 seconds
HEAD = ("role", "name", "pid", "healthy", "uptime_seconds", "progress_age_seconds")  # shown in the first line
ASKED_AT_ONCE = 64  # addresses


def run(arguments: Sequence[str]) -> int:
    """Prints the status of the processes at the addresses; returns 0 if none has a problem, otherwise 1.

    `arguments`: after "status". Raises UsageError; StatusError if there is only one address, and no process answers.
    """
    options = _parser().parse_args(arguments)
    named = [_named(text) for text in [*options.addresses, *(_lines_of(options.fleet) if options.fleet else [])]]
    if not named:
        raise UsageError("status: give an ADDRESS, or a file of them with --fleet; see status --help")
    if options.page is not None:
        from apex_jax.operations.fleet_page import serve  # not at the top: a table needs no curves, which take a second

        return serve(lambda: _ask_all(named), options.page)
    if len(named) == 1 and not options.fleet:
        healthy, content = fetch(named[0][1], ANSWER_SECONDS)
        print(json.dumps(content, indent=2) if options.json else "\n".join(table(healthy, content)))
        return 0 if healthy and not problems(content) else 1
    answers = _ask_all(named)
    wrong = [(answer.name, problem) for answer in answers for problem in answer.problems]
    if options.json:
        json.dump({answer.address: answer.content for answer in answers}, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(fleet_table(answers, wrong)))
    return 1 if wrong else 0


def table(healthy: bool, content: dict[str, Any]) -> list[str]:
    """Returns a report as printable lines: a summary, then every value. The peer may have put anything into it."""
    who = f"{short_repr(content.get('name'))} ({short_repr(content.get('role'))}, pid {short_repr(content.get('pid'))})"
    age = content.get("progress_age_seconds")
    state = "healthy" if healthy else f"NOT HEALTHY: no progress for {as_text('', age)} s"
    head = f"{who}: {state}, up {duration(content.get('uptime_seconds'))}"
    values = [row for row in _values("", content) if row[0] not in HEAD]
    return [head, *_columns(list(summary(content))), "", *_columns(values)]


def fleet_table(answers: Sequence[ProcessStatus], wrong: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a row for each process, then the problems (`wrong`: name, text) and warnings, as printable lines."""
    lines: list[tuple[str, ...]] = [("process", "does", "speed", "progress", "address")]
    advice: list[tuple[str, str]] = []
    for name, address, content, _ in answers:
        lines.append((name, *(line(content) if content is not None else ("unreachable", "", "")), address))
        advice += [(name, text) for text in warnings(content or {})[:MAX_LINES]]
    parts = [*_columns(lines), "", "problems", *(_columns(wrong) or ["  none"])]
    return parts + (["", "warnings", *_columns(advice)] if advice else [])


def _ask_all(named: Sequence[tuple[str, str]]) -> list[ProcessStatus]:
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        return list(threads.map(lambda each: _ask(*each), named))


def _ask(name: str, address: str) -> ProcessStatus:
    try:
        _, content = fetch(address, ANSWER_SECONDS)
    except StatusError as error:
        return ProcessStatus(name or address, address, None, str(error))
    return ProcessStatus(name or short_repr(content.get("name")), address, content, "")


def _named(text: str) -> tuple[str, str]:
    """Returns the name, empty if none is given, and the address of ADDRESS or NAME=ADDRESS."""
    name, separator, address = text.partition("=")
    return (name, address) if separator and "://" not in name else ("", text)


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**16):
        raise ArgumentTypeError(f"{short_repr(text)} is no port: give 0 (any that is free) to 65535, or --page last")
    return int(text)


def _lines_of(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"status: --fleet {short_repr(file)} cannot be read: {reason}") from None
    return [text for line in lines if (text := line.partition("#")[0].strip())]


def _columns(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]


def _values(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the leaves of a report by their dotted names."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if members is None:
        yield short_repr(name), as_text(name, value)
        return
    for key, member in members:
        yield from _values(f"{name}.{key}" if name else str(key), member)


def _parser() -> Parser:
    parser = Parser(
        "status",
        description="Queries the status of one process, or of those of a fleet. Exit code 0: all work; 1: one does not"
        " answer within 5 seconds, makes no progress, or cannot save what it has.",
        epilog=f"example: {NAME} status tcp://127.0.0.1:8080",
        allow_abbrev=False,
    )
    what = "addresses.status of a process; NAME, such as learner, is shown for one that does not answer"
    parser.add_argument("addresses", nargs="*", metavar="[NAME=]ADDRESS", help=what)
    parser.add_argument("--fleet", metavar="FILE", help="a file with such an address in each line")
    page = "serve a page of these roles on this machine, until Ctrl-C (default: a free port); a local run has its own"
    parser.add_argument("--page", metavar="PORT", nargs="?", type=_port, const=0, help=page)
    parser.add_argument("--json", action="store_true", help="print the reports as they came, by address if several")
    return parser
