"""Runs a benchmark, keeps what it measured, and makes the table of benchmarks/README.md of all that is kept.

python -m benchmarks.page replay_server --seconds 2     # runs it, and keeps its last line in benchmarks/results/
python -m benchmarks.page                               # makes the table
python -m benchmarks.page --check                       # exit code 1 if the table says anything else
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS, PAGE = FOLDER / "results", FOLDER / "README.md"
BEGIN, END = "<!-- made by python -m benchmarks.page -->\n", "<!-- end -->\n"


def main() -> None:
    """Runs the benchmark of the command line, if there is one, and writes or compares the table."""
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        keep(arguments)
    elif arguments not in ([], ["--check"]):
        sys.exit(f"{shlex.join(arguments)}: give the name of a benchmark with its arguments, --check, or nothing")
    if PAGE.read_text() != (text := with_table(PAGE.read_text())):
        if arguments == ["--check"]:
            sys.exit(f"{PAGE}: not what benchmarks/results/ says; run: python -m benchmarks.page")
        PAGE.write_text(text)


def keep(arguments: list[str]) -> None:
    """Runs a benchmark from the root of the checkout and keeps its last line; exits if it fails."""
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty=+"], cwd=FOLDER, text=True).strip()
    command = [sys.executable, "-m", f"benchmarks.{arguments[0]}", *arguments[1:]]
    last = ""
    with subprocess.Popen(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True) as program:
        for last in program.stdout or ():
            print(last, end="", flush=True)
    if program.returncode:
        sys.exit(program.returncode)
    record = json.loads(last) | {"command": f"python -m benchmarks.{shlex.join(arguments)}", "commit": commit}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{record['benchmark'].replace(' ', '_')}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def records() -> list[dict[str, Any]]:
    """Returns what is kept, in the order of the names."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def with_table(page: str) -> str:
    """Returns the text of a page with the table between its two comments."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def table() -> str:
    """Returns the table: a line for each target of each benchmark, with what was measured."""
    lines = ["| command | what | measured | target | commit, day |", "|---|---|--:|--:|---|"]
    for record in records():
        command, when = f"`{record['command']}`", f"{record['commit']}, {record['date']}"
        for name, found in record["targets"].items() or [("no target: see its file", None)]:
            measured, bound = ("", "") if found is None else (text_of(found), bound_of(found))
            lines.append(f"| {command} | {name} | {measured} | {bound} | {when} |")
            command = when = ""
    return "\n".join(lines) + "\n"


def text_of(found: dict[str, Any]) -> str:
    """Returns what was measured; a missed target says so."""
    value = found["measured"]
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"
    return f"**{text}**" if found["met"] else f"{text} (missed)"


def bound_of(found: dict[str, Any]) -> str:
    """Returns the bounds of a target."""
    bounds = {"at least": found.get("at_least"), "at most": found.get("at_most")}
    return ", ".join(f"{name} {bound:,g}" for name, bound in bounds.items() if bound is not None)


if __name__ == "__main__":
    main()
