"""From the command line to a checked `Config`. Raises UsageError for every mistake of the user."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from apex_jax import __version__
from apex_jax.config.keys import Config
from apex_jax.config.load import (
    CONFIG_NAME,
    DEFAULT_CONFIG,
    OWNERS,
    Preset,
    closest,
    config_file,
    config_names,
    config_path,
    heading,
    is_file,
    load,
    load_run_to_play,
    load_with,
    parse_overrides,
    settings_of,
    yaml_text,
)
from apex_jax.host.disk import run_of_checkpoint
from apex_jax.host.errors import UsageError, short_repr
from apex_jax.host.program import CONFIGS, NAME, Parser

ROLES = ("local", "actor", "replay", "learner", "evaluator")
OPTIONS = ("--help", "--version", "--role", "--config", "--print-config", "--name")


OF_MANY_PROCESSES = {"actor.processes", "actor.environments_per_step", "evaluator.interval_seconds", "storage.url"}


class Command(NamedTuple):
    """The parsed command line."""

    role: str  # one of ROLES
    name: str  # of this process: its role, or given by the supervisor, such as actor-1
    config: Config
    action: Literal["run", "print_config"]
    seeds: tuple[int, ...] = ()  # of a series of runs; `config` has the first one; empty = one run, with its seed
    why: str = ""  # a line for the user: which configuration was chosen for the task


def parse(argv: Sequence[str], choose: Callable[[Mapping[str, Any]], Preset] | None = None) -> Command:
    """Parses `argv`, without the program's name. Raises UsageError; exits with 0 after --help.

    `choose`: see `apex_jax.environments.preset.preset_of`; called if the user names a task and no configuration.
    """
    options, rest = _parser().parse_known_args(list(argv))
    for text in rest:
        if text.startswith("-"):
            raise UsageError(_unknown_option(text))
    rest, seeds = _without_seeds(rest, options.role)
    if options.name is not None and not re.fullmatch(r"\w[\w.-]{0,63}", options.name, re.ASCII):
        raise UsageError(
            f"--name {options.name!r}: names a log file; use 1 to 64 letters, digits and _ . -, no . or - first"
        )
    given = parse_overrides(rest, options.role)
    checkpoint, why = given.get("evaluator.checkpoint"), ""
    file = DEFAULT_CONFIG if options.config is None else config_file(options.config)
    if file.resolve().parent == CONFIGS.resolve():  # some have one process, where their own environment is nearly free
        is_other = options.config and given.get("environment.task") not in (None, load(file).environment.task)
        if (options.role != "local" and not checkpoint) or is_other or OF_MANY_PROCESSES & given.keys():
            given.setdefault("processes", "many")
    if checkpoint and options.role == "evaluator" and options.config is None:
        config = load_run_to_play(_run_of(checkpoint), given)
    elif options.config is None and "environment.task" in given and choose is not None:
        preset = choose(given)
        config, why = load_with(config_file(preset.config), {**preset.settings, **given}), preset.why
    else:
        config = load_with(file, given)
    if config.evaluator.checkpoint and options.role != "evaluator":
        what = f"evaluator.checkpoint={short_repr(config.evaluator.checkpoint)}"
        raise UsageError(f"{what}: needs --role evaluator, got --role {options.role}")
    if config.processes == "one" and options.role not in ("local", "evaluator"):
        raise UsageError(f"processes=one: runs all roles; leave --role {options.role} out")
    if config.replay.columns and options.role != "replay":
        what = f"replay.columns={short_repr(config.replay.columns)}"
        raise UsageError(f"{what}: items of your own need --role replay, got --role {options.role}")
    if seeds:
        _check_series(config, seeds)
    name = options.role if options.name is None else options.name
    return Command(options.role, name, config, "print_config" if options.print_config else "run", seeds, why)


def _without_seeds(texts: Sequence[str], role: str) -> tuple[list[str], tuple[int, ...]]:
    """Returns the settings with `seed=1` in place of `seeds=1,2,3`, and the seeds; none if `seeds` is not given."""
    given = [text for text in texts if text.startswith("seeds=")]
    if not given:
        return list(texts), ()
    if role != "local":
        raise UsageError(f"{short_repr(given[0])}: trains whole runs one after the other; leave --role {role} out")
    if others := [text for text in texts if text.startswith("seed=")]:
        raise UsageError(f"{short_repr(given[0])} and {short_repr(others[0])} are both given; keep one")
    numbers = given[0].partition("=")[2].split(",")
    is_list = all(re.fullmatch("[0-9]{1,10}", number) and int(number) < 2**31 for number in numbers)
    if not is_list or len(set(map(int, numbers))) < len(numbers):
        raise UsageError(
            f"{short_repr(given[0])}: must be different whole numbers, 0 to 2147483647, such as seeds=1,2,3"
        )
    seeds = tuple(map(int, numbers))
    return [f"seed={seeds[0]}", *(text for text in texts if text != given[0])], seeds


def _check_series(config: Config, seeds: tuple[int, ...]) -> None:
    """Raises UsageError if runs of several seeds cannot follow each other."""
    limits = (config.total_minutes, config.total_environment_frames, config.total_updates)
    text = f"seeds={','.join(map(str, seeds))}"
    if config.run_directory:
        named = f"run_directory={short_repr(config.run_directory)}"
        what = f"{named}: {short_repr(text)} trains each seed in a directory of its own"
        raise UsageError(f"{what}, runs/<task>-<seed>; leave run_directory out")
    if config.storage.url:
        what = f"storage.url={short_repr(config.storage.url)}: holds the copy of one run"
        raise UsageError(f"{what}; give seed=N in place of {short_repr(text)}, or leave it out")
    if not any((*limits, config.evaluator.stop_at_return)):
        raise UsageError(f"{short_repr(text)}: the first run would never end; set total_updates, or another limit")


def _run_of(checkpoint: str) -> str:
    """Returns the directory of the run or of the exported policy whose checkpoint is given."""
    directory = run_of_checkpoint(checkpoint)[0]
    if not is_file(config_path(directory)):
        what = f"holds no {CONFIG_NAME}" if os.path.isdir(checkpoint) else "no such directory"
        raise UsageError(
            f"evaluator.checkpoint={short_repr(checkpoint)}: {what}; give the directory of a run, as runs/Pong-v5-1,"
            " or of an exported policy"
        )
    return directory


def _parser() -> Parser:
    parser = Parser(
        usage=f"{NAME} [--role ROLE] [--config FILE] [--print-config] [KEY=VALUE ...]\n"
        f"       {NAME} plot RUN ... | status RUN|ADDRESS ... | storage push RUN URL | storage pull URL RUN |\n"
        f"       {' ' * len(NAME)} export RUN FOLDER | film RUN | keys create DIR | tasks WORD (see --help of each)",
        description="Ape-X: distributed prioritized experience replay.",
        epilog=_keys_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--role", choices=ROLES, default="local", help="role to run; local = all of them, supervised")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"YAML file, or {config_names()} (default: the checkpoint's, or the one for the task)",
    )
    parser.add_argument("--version", action="version", version=f"apex-jax {__version__}", help="print it, and stop")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration as YAML, and stop")
    parser.add_argument("--name", help="of log and metrics (default: the role); a run's second actor needs its own")
    return parser


def _keys_help() -> str:
    lines = [
        "KEY=VALUE settings override the file's: environment.task=Breakout-v5 seed=3 'network.channels=[16,32]'.",
        "seeds=1,2,3 trains with one seed after the other, each in runs/<task>-<seed>, and then plots them together.",
        "The prefix of the role's own group may be omitted: --role evaluator checkpoint=runs/Pong-v5-1 video=pong.mp4.",
        "All keys and their defaults, used where the file sets none; --print-config shows the values of a run:",
    ]
    for group, owner in OWNERS:
        lines += ["", heading(group)]
        for setting in settings_of(owner, group):
            column = f"  {setting.name}={yaml_text(setting.default)} ".ljust(48)
            lines += textwrap.wrap(setting.meaning, 120, initial_indent=column, subsequent_indent=" " * 48)
    return "\n".join(lines)


def _unknown_option(text: str) -> str:
    option, _, value = text.partition("=")
    near = difflib.get_close_matches(option, OPTIONS, 1)
    near = near or [f"{name}={short_repr(value) or '...'}" for name in closest(option.lstrip("-"))]
    fix = f"did you mean {' or '.join(near)}?" if near else "see --help"
    return f"unknown option {short_repr(option)}: settings are given as KEY=VALUE, without dashes; {fix}"
