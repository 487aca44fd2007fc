"""The command status: prints a table of processes, with what is wrong, or serves it as a page."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from apex_jax.host.errors import UsageError, short_repr
from apex_jax.host.output import columns
from apex_jax.host.program import NAME, Parser
from apex_jax.operations.records import ProcessStatus, statuses_of_run
from apex_jax.transport.http_link import StatusError, fetch

ANSWER_SECONDS = 4.0  # so that the command, with the start of Python, ends within 5 seconds
ASKED_AT_ONCE = 64  # addresses


def run(arguments: Sequence[str]) -> int:
    """Prints the status of the processes at the addresses; returns 0 if none has a problem, otherwise 1.

    `arguments`: after "status". Raises UsageError.
    """
    options = _parser().parse_args(arguments)
    named = [_named(text) for text in [*options.addresses, *(_lines_of(options.fleet) if options.fleet else [])]]
    if not named:
        raise UsageError(
            "status: give an ADDRESS or a run directory, or a file of them with --fleet; see status --help"
        )
    if options.page is not None:
        from apex_jax.operations.pages import serve  # not at the top: a table needs no curves, which take a second

        return serve(lambda: _with_roles(_ask_all(named)), options.page)
    answers = _ask_all(named)
    statuses = _with_roles(answers)
    if options.json:
        json.dump({answer.address: answer.content for answer in answers}, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(table(statuses)))
    return 1 if any(status.problems for status in statuses) else 0


def table(statuses: Sequence[ProcessStatus]) -> list[str]:
    """Returns a row for each process, then the problems and the warnings, as printable lines."""
    head = ("process", "does", "speed", "progress", "address")
    lines = columns([head, *((status.name, *status.cells, status.address) for status in statuses)])
    problems = columns([(status.name, problem) for status in statuses for problem in status.problems])
    warnings = columns([(status.name, warning) for status in statuses for warning in status.warnings])
    lines += ["", "problems", *(f"  {line}" for line in problems or ["none"])]
    return lines + (["", "warnings", *(f"  {line}" for line in warnings)] if warnings else [])


def _ask_all(named: Sequence[tuple[str, str]]) -> list[ProcessStatus]:
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        return [status for answers in threads.map(lambda each: _ask(*each), named) for status in answers]


def _with_roles(answers: Sequence[ProcessStatus]) -> list[ProcessStatus]:
    return [status for answer in answers for status in answer.with_roles()]


def _ask(name: str, place: str) -> list[ProcessStatus]:
    """Returns the status of the process at an address, or of each process of a run directory."""
    if place and "://" not in place and Path(place).is_dir():
        return list(statuses_of_run(place))
    try:
        _, content = fetch(place, ANSWER_SECONDS)
    except StatusError as error:
        return [ProcessStatus(name or place, place, None, str(error))]
    return [ProcessStatus(name or short_repr(content.get("name")), place, content, "")]


def _named(text: str) -> tuple[str, str]:
    """Returns the name, empty if none is given, and the address of ADDRESS or NAME=ADDRESS."""
    name, separator, address = text.partition("=")
    is_named = separator and "://" not in name and not Path(text).is_dir()
    return (name, address) if is_named else ("", text)


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


def _parser() -> Parser:
    parser = Parser(
        "status",
        description="Shows the status of processes, and of those that a local run supervises. Exit code 0: all work;"
        " 1: one does not answer within 5 seconds, makes no progress, or cannot save what it has.",
        epilog=f"example: {NAME} status tcp://127.0.0.1:8080",
    )
    what = "a run directory of this machine, or addresses.status of a process; NAME is shown if it does not answer"
    parser.add_argument("addresses", nargs="*", metavar="[NAME=]ADDRESS", help=what)
    parser.add_argument("--fleet", metavar="FILE", help="a file with such an address in each line")
    page = "serve a page of these roles on this machine, until Ctrl-C (default: a free port); a local run has its own"
    parser.add_argument("--page", metavar="PORT", nargs="?", type=_port, const=0, help=page)
    parser.add_argument("--json", action="store_true", help="print every value of the reports, by address")
    return parser
