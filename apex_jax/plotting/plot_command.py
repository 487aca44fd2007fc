"""The command plot: several runs in one picture and one table."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from apex_jax.host.argument_parser import Parser
from apex_jax.host.errors import RunError, UsageError, short_repr
from apex_jax.host.program import NAME
from apex_jax.plotting.curves import Group, Run, grouped, is_packed, read_packed, read_run
from apex_jax.plotting.plot import draw_groups, table

_log = logging.getLogger(__name__)

FORMATS = (".png", ".svg", ".pdf")
FILE_NAME = "plot.png"  # not curves.png, the name of the picture that a run draws at its end


def run(arguments: Sequence[str]) -> int:
    """Runs the command; `arguments`: after "plot". Returns the exit code. Raises UsageError, RunError."""
    options = _parser().parse_args(arguments)
    if options.output is not None:
        _check_output(Path(options.output))
    # A shell's runs/* also matches the pictures that were drawn there.
    runs = [argument for argument in options.runs if not _is_picture(argument)] or options.runs
    output = Path(options.output or _default_output([directory for _, directory in map(_labelled, runs)]))
    try:
        groups = groups_of(runs)
        draw_groups(groups, output)
    except OSError as error:
        raise RunError(
            f"{error.filename or output}: {error.strerror or error}; choose another --output or run"
        ) from None
    print(table(groups))
    for drawn in (drawn for group in groups for drawn in group.runs if drawn.changed_settings):
        print(f"\n{drawn.directory} went on with changed settings: {', '.join(drawn.changed_settings)}")
    print(f"\n{output}: thin lines are runs, thick ones their interquartile mean, dotted ones the median")
    return 0


def _check_output(output: Path) -> None:
    if output.suffix not in FORMATS or not output.parent.is_dir():
        endings = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise UsageError(f"--output {short_repr(output)}: give a file in an existing folder that ends in {endings}")


def _is_picture(argument: str) -> bool:
    return Path(argument).suffix in FORMATS and Path(argument).is_file()


def _default_output(directories: Sequence[str]) -> str:
    """Returns the picture's path: in the directory of the only run, otherwise beside the first."""
    first = directories[0]
    is_one_run = len(set(directories)) == 1 and not is_packed(first)
    return os.path.join(first if is_one_run else os.path.normpath(os.path.join(first, os.pardir)), FILE_NAME)


def _labelled(argument: str) -> tuple[str, str]:
    """Returns the label, "" without one, and the directory or file of an argument."""
    label, separator, directory = argument.partition("=")
    return (label, directory) if separator and not Path(argument).exists() else ("", argument)


def groups_of(arguments: Sequence[str]) -> list[Group]:
    """Returns the runs of `PATH` and `LABEL=PATH` arguments in groups, without those that have no evaluation yet.

    Raises UsageError if none has one, or an argument is wrong.
    """
    labelled: dict[str, list[Run]] = {}
    blank: list[str] = []
    for text in arguments:
        label, directory = _labelled(text)
        runs = read_packed(directory) if is_packed(directory) else [read_run(directory)]
        for run in runs:
            if run.evaluation.returns.size:
                labelled.setdefault(label, []).append(run)
            else:
                blank.append(f"{short_repr(run.directory)}: has no evaluation yet")
    if not labelled:
        where = "if that has another run_directory, copy it beside this one"
        raise UsageError(f"{blank[0]}; plot it once its evaluator has played; {where}")
    for text in blank:
        _log.warning("%s: left out", text)
    unlabelled = labelled.pop("", [])
    return (grouped(unlabelled) if unlabelled else []) + [Group(*item) for item in labelled.items()]


def _parser() -> Parser:
    parser = Parser(
        "plot",
        description="Overlays the evaluation curves of runs, against frames and minutes. Runs that differ in"
        " nothing but the seed are one group: interquartile mean, median and, from three runs, bootstrap interval.",
        epilog=f"example: {NAME} plot runs/Pong-v5-* SB3=runs/sb3-1 SB3=runs/sb3-2 --output pong.png",
    )
    what = "run directories, and files of packed runs; LABEL names their group"
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help=what)
    where = f"picture to write (default: {FILE_NAME} in the run directory; of several runs beside the first)"
    parser.add_argument("--output", metavar="FILE", help=where)
    return parser
