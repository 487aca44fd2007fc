"""Writes what the pages say of the published runs: `python -m results.scores`; with `--check` it only compares.

results/scores.csv has every evaluation: a row is exp_name,env_name,seed,metric,env_step,value, the schema in which BRO,
SimBa, XQC and FlashSAC publish theirs. exp_name is the folder under results/ and the file; env_name is EnvPool's name
of the task; env_step counts emulator frames; the metrics are "return", the mean of the games of an evaluation, and
"minutes", when it ended.

The tables in results/README.md and README.md, between two comments, have a line for each file in rows.yaml: the mean of
the last evaluations of all its runs, the lowest and the highest of them, and when each run first reached a mark.
Another table of README.md has a line for each race in results/race/.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import yaml

from apex_jax.plotting.curves import Run, read_packed
from apex_jax.run.evaluations import return_text
from benchmarks.race import NEVER, OURS, groups_of, seconds_to

FOLDER = Path(__file__).parent
FILE = FOLDER / "scores.csv"
PAGE, SHORT_PAGE = FOLDER / "README.md", FOLDER.parent / "README.md"
BEGIN, END = "<!-- made by python -m results.scores -->\n", "<!-- end -->\n"
BEGIN_OF_RACES = "<!-- races, made by python -m results.scores -->\n"
HEADER = ("exp_name", "env_name", "seed", "metric", "env_step", "value")


class Row(NamedTuple):
    """A line of the tables, of all runs in one file; see rows.yaml."""

    file: str
    task: str
    command: str
    mark: float
    of: str = ""
    machine: str = "2 CPU cores"
    note: str = ""
    short: bool = False
    changed: Mapping[str, Any] = MappingProxyType({})  # `with`: settings that the command does not give any more

    @property
    def remark(self) -> str:
        """The last cell: what a reader must know besides."""
        had = [f"with {' '.join(f'`{key}={_setting(value)}`' for key, value in self.changed.items())}"]
        return "; ".join([*(had if self.changed else []), *([self.note] if self.note else [])])


def main() -> None:
    """Writes the files; with --check exits with the name of the first that differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page says anything else")
    is_check = parser.parse_args().check
    for path, text in pages().items():
        if path.read_text() == text:
            continue
        if is_check:
            sys.exit(f"{path}: not what the runs say; run: python -m results.scores")
        path.write_text(text)


def pages() -> dict[Path, str]:
    """Returns what each file should hold."""
    short_page = with_table(SHORT_PAGE.read_text(), short())
    return {
        FILE: table(),
        PAGE: with_table(PAGE.read_text(), results_table(rows())),
        SHORT_PAGE: with_table(short_page, races(), BEGIN_OF_RACES),
    }


def with_table(page: str, lines: str, begin: str = BEGIN) -> str:
    """Returns the text of a page with the table between its two comments."""
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    assert found, f"the page lacks {begin}"
    assert end, f"the page lacks {END}"
    return before + begin + lines + END + after


# The tables ----------------------------------------------------------------------------------------------------------


def rows() -> list[Row]:
    """Returns the lines of the table, in its order."""
    found = yaml.safe_load((FOLDER / "rows.yaml").read_text())
    return [Row(**{name.replace("with", "changed"): value for name, value in row.items()}) for row in found]


def results_table(of: Sequence[Row]) -> str:
    """Returns the long table: commands, machines and what else belongs to a row."""
    lines = ["| task | command | on | runs | minutes | last evaluation | a mark | |"]
    lines += ["|---|---|---|--:|--:|--:|---|---|"]
    for row in of:
        runs = read_packed(FOLDER / row.file)
        minutes = np.mean([run.evaluation.minutes[-1] for run in runs])
        cells = [row.task, row.command, row.machine, str(len(runs)), f"{minutes:.{int(minutes < 1)}f}"]
        cells += [last(runs), reached(row, runs), row.remark]
        lines.append("| " + " | ".join(cells).rstrip() + " |")
    return "\n".join(lines) + "\n"


def short() -> str:
    """Returns the short table, for README.md."""
    lines = ["| task | command | on | runs | minutes | at the end | a mark |", "|---|---|---|--:|--:|--:|---|"]
    for row in rows():
        if row.short:
            runs = read_packed(FOLDER / row.file)
            minutes = np.mean([run.evaluation.minutes[-1] for run in runs])
            name = row.task.replace("](#", "](results/README.md#")
            cells = [name, row.command, row.machine, str(len(runs)), f"{minutes:.{int(minutes < 1)}f}", last(runs)]
            lines.append("| " + " | ".join([*cells, "; ".join(filter(None, [reached(row, runs), row.remark]))]) + " |")
    return "\n".join(lines) + "\n"


def races() -> str:
    """Returns the table of the races, for README.md; the fastest is bold."""
    tasks = yaml.safe_load((FOLDER.parent / "benchmarks" / "race.yaml").read_text())["tasks"]
    lines = ["| the median run's seconds to | apex_jax | others |", "|---|---|---|"]
    for path in sorted((FOLDER / "race").glob("*.jsonl")):
        mark, groups = tasks[path.stem]["mark"], groups_of(path)
        found = {group.label: seconds_to(group.runs, mark) for group in groups}
        first = min(float(np.median(seconds)) for seconds in found.values())
        cells = [f"[{path.stem}](results/race/{path.stem}.md): {_text(mark)}", "", ""]
        for name, seconds in found.items():
            median = float(np.median(seconds))
            text = "never" if median == NEVER else f"**{median:.0f}**" if median == first else f"{median:.0f}"
            late = f" ({seconds.count(NEVER)} of {len(seconds)} never)" if NEVER in seconds and median < NEVER else ""
            words = f"{text}{late} ({name.partition(', ')[2]})" if name.startswith(OURS) else f"{name} {text}{late}"
            column = 1 if name.startswith(OURS) else 2
            cells[column] = ", ".join(filter(None, [cells[column], words]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def last(runs: Sequence[Run]) -> str:
    """Returns the mean of the runs' last evaluations, and the lowest and highest of them."""
    returns = [run.evaluation.returns[-1] for run in runs]
    mean = f"**{_text(np.mean(returns))}**"
    return mean if len(returns) == 1 else f"{mean} ({_text(min(returns))} to {_text(max(returns))})"


def reached(row: Row, runs: Sequence[Run]) -> str:
    """Returns how many runs reached the mark in an evaluation, and when the first and the last of them did."""
    mark = f"{_text(row.mark)}{f' ({row.of})' if row.of else ''}"
    minutes = []
    for run in runs:
        above = run.evaluation.returns >= row.mark
        minutes += [run.evaluation.minutes[above.argmax()]] if above.any() else []
    if not minutes:
        return f"{mark}: not reached"
    shown = list(dict.fromkeys(f"{max(each, 0.1):.1f}" for each in (min(minutes), max(minutes))))
    some = "" if len(minutes) == len(runs) else f", {len(minutes)} of {len(runs)}"
    return f"{mark}: after {' to '.join(shown)} minutes{some}"


def _setting(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else return_text(round(float(value), 1)).removesuffix(".0")


# All evaluations -----------------------------------------------------------------------------------------------------


def table() -> str:
    """Returns the content of scores.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for name, seed, run in published():
        curve = run.evaluation
        for frames, minutes, value in zip(curve.frames, curve.minutes, curve.returns, strict=True):
            row = (name, run.task, seed)
            writer.writerow((*row, "return", int(frames), f"{value:.6g}"))
            writer.writerow((*row, "minutes", int(frames), f"{minutes:.3f}"))
    return text.getvalue()


def packed_files() -> list[Path]:
    """Returns the files of runs under results/, but those of races, and of suites, which hold the returns of games."""
    return sorted(path for path in FOLDER.glob("*/*.jsonl") if path.parent.name not in ("suite", "race"))


def published() -> Iterator[tuple[str, int, Run]]:
    """Yields the name, seed and run of each run under results/, in the order of their names."""
    for path in packed_files():
        seeds = [json.loads(line)["starts"][0]["seed"] for line in path.read_text().splitlines()]
        for seed, run in zip(seeds, read_packed(path), strict=True):
            yield f"{path.parent.name}/{path.stem}", seed, run


if __name__ == "__main__":
    main()
