"""Runs a benchmark, keeps its last line, and makes the table of benchmarks/README.md from all kept lines.

python -m benchmarks.page replay_server --seconds 2     # runs it, and keeps its last line in benchmarks/results/
python -m benchmarks.page                               # makes the table
python -m benchmarks.page --check                       # exit code 1 if the table differs
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CODE = ("apex_jax", "configs", ":(glob)benchmarks/*.py")  # what a measurement is of
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
    commit = of_git("describe", "--always") + ("+" if of_git("diff", "HEAD", "--name-only", *CODE) else "")
    command = [sys.executable, "-m", f"benchmarks.{arguments[0]}", *arguments[1:]]
    last = ""
    with subprocess.Popen(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True) as program:
        for last in program.stdout or ():
            print(last, end="", flush=True)
    if program.returncode:
        sys.exit(program.returncode)
    try:
        measured = json.loads(last)
    except ValueError:
        sys.exit(f"{shlex.join(command)}: its last line is no JSON object: nothing is kept")
    record = measured | {"command": f"python -m benchmarks.{shlex.join(arguments)}", "commit": commit}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', record['benchmark'])}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def of_git(*arguments: str) -> str:
    """Returns the output of a git command in the root of the checkout."""
    return subprocess.check_output(["git", *arguments], cwd=FOLDER.parent, text=True).strip()


def records() -> list[dict[str, Any]]:
    """Returns the kept records, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def with_table(page: str) -> str:
    """Returns the text of a page with the table between its two comments."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE} lacks {BEGIN}"
    assert end, f"{PAGE} lacks {END}"
    return before + BEGIN + table() + END + after


def table() -> str:
    """Returns the table: a line for each target of each record."""
    if not records():
        return "None yet.\n"
    lines = ["| command | what | measured | target | commit, day |", "|---|---|--:|--:|---|"]
    for record in records():
        command, when = f"`{record['command']}`", f"{record['commit']}, {record['date']}"
        for name, found in record["targets"].items() or [("no target: see its file", None)]:
            measured, bound = ("", "") if found is None else (text_of(found), bound_of(found))
            lines.append(f"| {command} | {name} | {measured} | {bound} | {when} |")
            command = when = ""
    return "\n".join(lines) + "\n"


def text_of(found: dict[str, Any]) -> str:
    """Returns a measured value, marked if it misses its target."""
    value = found["measured"]
    if value is None:
        return "never (missed)"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"
    return f"**{text}**" if found["met"] else f"{text} (missed)"


def bound_of(found: dict[str, Any]) -> str:
    """Returns the bounds of a target."""
    bounds = {"at least": found.get("at_least"), "at most": found.get("at_most")}
    return ", ".join(f"{name} {bound:,g}" for name, bound in bounds.items() if bound is not None)


if __name__ == "__main__":
    main()
