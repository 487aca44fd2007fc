"""From the command line and a YAML file to a checked `Config`.

Runs before any device is chosen, so it imports neither JAX nor EnvPool nor ZMQ. Every mistake of the user ends in a
`UsageError`: one line that names the key, its value, what is allowed, and the fix.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

from omegaconf import OmegaConf

from apex_jax.config import Config, Key
from apex_jax.config_rules import check
from apex_jax.errors import Parser, UsageError, shown

ROLES = ("local", "actor", "replay", "learner", "evaluator")
OPTIONS = ("--help", "--role", "--config", "--print-config", "--name")
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DEFAULT_CONFIG = CONFIGS / "pong_cpu.yaml"
MAX_YAML_LENGTH = 16_384  # libyaml recurses: some 30,000 open brackets overflow the stack and kill the process


class Command(NamedTuple):
    """What the command line asks for."""

    role: str  # one of ROLES
    name: str  # of this process: its role, or actor-1, actor-2 ... where a supervisor says so
    config: Config
    action: Literal["run", "print_config"]


class Setting(NamedTuple):
    """One key of `Config`: everything that help, checks and messages need."""

    name: str  # dotted: learner.learning_rate
    kind: Any  # bool, int, float, str or tuple[int, ...]
    default: Any
    key: Key

    @property
    def allowed(self) -> str:
        """The values it may take: `1 to 64 steps`."""
        if self.kind is bool:
            return "true or false"
        if self.key.choices:
            return ", ".join(self.key.choices[:-1]) + f" or {self.key.choices[-1]}"
        if self.key.low is None or self.key.high is None:
            return ""
        return f"{_number_text(self.key.low)} to {_number_text(self.key.high)} {self.key.unit}".rstrip()

    @property
    def meaning(self) -> str:
        """What it is, and the values it may take."""
        return f"{self.key.text} [{self.allowed}]" if self.allowed else self.key.text


def _number_text(number: float) -> str:
    return f"{int(number):_}" if number == int(number) and number >= 10_000 else f"{number:g}"


def _settings(owner: type, group: str) -> Iterator[Setting]:
    prefix, hints = f"{group}." if group else "", get_type_hints(owner)
    for item in dataclasses.fields(owner):
        if "key" in item.metadata:
            yield Setting(prefix + item.name, hints[item.name], item.default, item.metadata["key"])


GROUPS: dict[str, type] = {
    item.name: type(item.default) for item in dataclasses.fields(Config) if "key" not in item.metadata
}
OWNERS: list[tuple[str, type]] = [("", Config), *GROUPS.items()]
SETTINGS = {setting.name: setting for group, owner in OWNERS for setting in _settings(owner, group)}


# Command line -----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> Command:
    """Returns what `argv` (without the program's name) asks for; raises UsageError; exits 0 after --help."""
    options, rest = _parser().parse_known_args(list(argv))
    for text in rest:
        if text.startswith("-"):
            raise UsageError(_unknown_option(text))
    name = options.role if options.name is None else options.name
    if not re.fullmatch(r"\w[\w.-]{0,63}", name, re.ASCII):
        raise UsageError(f"--name {name!r}: names a log file; use 1 to 64 letters, digits and _ . -, no . or - first")
    _check_given_once(rest, options.role)
    checkpoint = _overrides(rest, options.role).get("evaluator.checkpoint")
    path = DEFAULT_CONFIG if options.config is None else options.config
    if checkpoint and options.role == "evaluator" and options.config is None:
        path = _config_of(checkpoint)
    config = load(path, rest, options.role)
    if config.evaluator.checkpoint and options.role != "evaluator":
        what = f"evaluator.checkpoint={shown(config.evaluator.checkpoint)}"
        raise UsageError(f"{what}: needs --role evaluator, got --role {options.role}")
    return Command(options.role, name, config, "print_config" if options.print_config else "run")


def _check_given_once(texts: Sequence[str], group: str) -> None:
    """Raises UsageError where the command line gives two values of one key, one of which would be ignored."""
    given: dict[str, str] = {}
    for text in texts:
        for name in _override(text, group):
            if name in given:
                raise UsageError(f"{name} is given twice, {shown(given[name])} and {shown(text)}; keep one")
            given[name] = text


def _config_of(checkpoint: str) -> Path:
    """Returns the configuration of the run whose checkpoint is asked for."""
    path = Path(checkpoint, "config.yaml")
    try:
        is_there = path.is_file()
    except OSError:  # a name that no file can have
        is_there = False
    if not is_there:
        what = "holds no config.yaml" if os.path.isdir(checkpoint) else "no such directory"
        raise UsageError(
            f"evaluator.checkpoint={shown(checkpoint)}: {what}; give the directory of a run, such as runs/Pong-v5-1"
        )
    return path


def _parser() -> Parser:
    parser = Parser(
        prog="python main.py",
        usage="python main.py [--role ROLE] [--config FILE] [--print-config] [KEY=VALUE ...]\n"
        "       python main.py plot RUN ... | status ADDRESS | storage push RUN URL | storage pull URL RUN |\n"
        "                      keys create DIR (each says more with --help)",
        description="Ape-X: distributed prioritized experience replay.",
        epilog=_keys_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--role", choices=ROLES, default="local", help="role to run; local = all of them, supervised")
    parser.add_argument("--config", metavar="FILE", help="YAML (default: configs/pong_cpu.yaml, or the checkpoint's)")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration as YAML, and stop")
    parser.add_argument("--name", help="of log and metrics (default: the role); a run's second actor needs its own")
    return parser


def _keys_help() -> str:
    lines = [
        "KEY=VALUE settings override the file's: environment.task=Breakout-v5 seed=3 'network.channels=[16,32]'.",
        "The prefix of the role's own group may be omitted: --role evaluator checkpoint=runs/Pong-v5-1 video=pong.mp4.",
        "All keys and their defaults, used where the file sets none; --print-config shows the values of a run:",
    ]
    for group, owner in OWNERS:
        lines += ["", _heading(group)]
        for setting in _settings(owner, group):
            column = f"  {setting.name}={_yaml_text(setting.default)} ".ljust(48)
            lines += textwrap.wrap(setting.meaning, 120, initial_indent=column, subsequent_indent=" " * 48)
    return "\n".join(lines)


def _heading(group: str) -> str:
    return f"{group}: {(GROUPS[group].__doc__ or '').splitlines()[0]}" if group else "The run as a whole."


def _unknown_option(text: str) -> str:
    option, _, value = text.partition("=")
    near = difflib.get_close_matches(option, OPTIONS, 1)
    near = near or [f"{name}={value or '...'}" for name in _closest(option.lstrip("-"))]
    fix = f"did you mean {' or '.join(near)}?" if near else "see --help"
    return f"unknown option {shown(option)}: settings are given as KEY=VALUE, without dashes; {fix}"


def _closest(name: str) -> list[str]:
    """Returns the up to 3 keys most like `name`: by dotted name, by name without group, or by initials (lr)."""
    wanted = name.lower().replace("-", "_")
    wanted_short = wanted.rpartition(".")[2]

    def likeness(setting: Setting) -> tuple[float, float]:
        short = setting.name.rpartition(".")[2]
        initials = "".join(word[:1] for word in short.split("_"))
        whole = difflib.SequenceMatcher(None, wanted, setting.name).ratio()
        alike = wanted_short == short or (len(initials) > 1 and wanted_short == initials)
        return 1.0 if alike else max(whole, difflib.SequenceMatcher(None, wanted_short, short).ratio()), whole

    ranked = sorted(((likeness(setting), name) for name, setting in SETTINGS.items()), reverse=True)
    best = ranked[0][0][0]
    return [name for score, name in ranked[:3] if score[0] >= max(0.6, best - 0.1)]


# Files and values -------------------------------------------------------------------------------------------------


def load(path: Path | str | None, overrides: Sequence[str] = (), group: str = "") -> Config:
    """Returns the checked Config of a YAML file (None: the defaults) with `key=value` texts over it.

    In a file a key stands once; of overrides the last one holds, and those of `group` need not name it. Nothing in
    either is evaluated. Raises UsageError.
    """
    config = load_as_written(path, overrides, group)
    check(config)
    return config


def load_as_written(path: Path | str | None, overrides: Sequence[str] = (), group: str = "") -> Config:
    """Returns the same without asking whether the keys fit each other: a run of before need not fit rules of today."""
    values = {} if path is None else _read(Path(path))
    values |= _overrides(overrides, group)
    members: dict[str, dict[str, Any]] = {group: {} for group in ("", *GROUPS)}
    for name, value in values.items():
        group, _, short_name = name.rpartition(".")
        members[group][short_name] = value
    groups = {name: group(**members[name]) for name, group in GROUPS.items()}
    return Config(**members[""], **groups)


def to_yaml(config: Config) -> str:
    """Returns every key with its value, and its meaning as a comment: `load` of it gives an equal Config."""
    lines = []
    for group, owner in OWNERS:
        members, indent = (getattr(config, group), "  ") if group else (config, "")
        lines += ["", f"# {_heading(group)}", f"{group}:"] if group else [f"# {_heading(group)}"]
        for setting in _settings(owner, ""):
            value = getattr(members, setting.name)
            lines += [f"{indent}# {setting.meaning}", f"{indent}{setting.name}: {_yaml_text(value)}"]
    return "\n".join(lines) + "\n"


def _yaml_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # JSON on one line is YAML


def _read(path: Path) -> dict[str, Any]:
    """Returns the checked values of a file by dotted name."""
    where = f"--config {shown(path)}"
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_YAML_LENGTH + 1)
    except OSError as error:
        known = ", ".join(sorted(file.name for file in CONFIGS.glob("*.yaml")))
        raise UsageError(f"{where}: {error.strerror}; the folder configs/ has {known}") from None
    except ValueError:  # bytes that are not UTF-8
        raise UsageError(f"{where}: is not text; give a YAML file") from None
    try:
        tree = _plain(text, lambda text: OmegaConf.load(io.StringIO(text)))
    except Exception as error:  # on odd input the parser raises nearly any class: KeyError for `!!bool x`
        raise UsageError(f"{where}: is not YAML that holds keys and values: {_first_problem(error)}") from None
    if not isinstance(tree, dict) or not tree:
        raise UsageError(f"{where}: has no keys; write lines such as `seed: 3`, or restore the file if a run wrote it")
    try:
        return _values(tree)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _overrides(texts: Sequence[str], group: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        values |= _override(text, group)
    return values


def _override(text: str, group: str) -> dict[str, Any]:
    """Returns the checked value, or the values of a group, of one `key=value`."""
    name, separator, value = text.partition("=")
    if name not in SETTINGS and f"{group}.{name}" in SETTINGS:
        name = f"{group}.{name}"
    if not separator:
        raise UsageError(f"{shown(text)}: settings are given as KEY=VALUE, such as seed=3; see --help")
    try:
        tree = {name: _value(value)}
    except Exception as error:  # as in _read
        raise UsageError(f"{shown(text)}: the value is not YAML: {_first_problem(error)}; put it in quotes") from None
    return _values(tree)


def _value(text: str) -> Any:
    """Returns the value of a text of YAML, such as what stands behind `key=`."""
    return _plain(text, lambda text: OmegaConf.from_dotlist([f"value={text}"]))["value"]


def _plain(text: str, parser: Callable[[str], Any]) -> Any:
    if len(text) > MAX_YAML_LENGTH:
        raise ValueError(f"it is longer than {MAX_YAML_LENGTH} characters")
    return OmegaConf.to_container(parser(text), resolve=False)  # `${...}` stays a text, which `_parsed` refuses


def _first_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or error or type(error).__name__).splitlines()[0]
    return f"{problem} in line {mark.line + 1}" if mark else problem


def _values(tree: Mapping[Any, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in _flatten(tree):
        if name in values:
            raise UsageError(f"{name} is given twice, the second time as {shown(value)}; keep one")
        try:
            values[name] = _parsed(SETTINGS[name], SETTINGS[name].kind, value)
        except ValueError as error:
            fix = _fix(SETTINGS[name].kind, value)
            raise UsageError(f"{name}={_written(value)}: {error}{fix}") from None
    return values


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf by its dotted name."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in SETTINGS:
            yield name, value
        elif name not in GROUPS:
            near = _closest(name)
            fix = f"did you mean {' or '.join(near)}?" if near else "--help lists all keys"
            raise UsageError(f"unknown key {shown(name)} (value {shown(value)}); {fix}")
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            first = next(_settings(GROUPS[name], name)).name
            raise UsageError(f"{name}={shown(value)}: is a group of keys, not one; set its keys, such as {first}")


def _written(value: Any) -> str:
    """Returns a refused value as YAML has it, so that null, an empty text and a quoted number can be told apart."""
    if value is None or value == "" or _is_quoted(value):
        return shown(json.dumps(value, ensure_ascii=False))
    return shown(json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list) else value)


def _fix(kind: Any, value: Any) -> str:
    if value is None:
        return "; null is no value: give one, or leave the key out"
    return "; it is text: leave out the quotes" if kind is not str and _is_quoted(value) else ""


def _is_quoted(value: Any) -> bool:
    """Tells whether a value is text for no reason but its quotes."""
    try:
        return isinstance(value, str) and not isinstance(_value(value), str | None)
    except Exception:  # as in _read
        return False


def _parsed(setting: Setting, kind: Any, value: Any) -> Any:
    """Returns the value as `kind`; raises ValueError that says what it must be."""
    if isinstance(value, str) and "${" in value:
        raise ValueError("nothing is looked up or evaluated; write the value itself in place of ${...}")
    if isinstance(value, str) and value.startswith("~"):  # a folder of that name invites rm -rf ~
        raise ValueError("nothing is looked up or evaluated; write the path itself in place of ~")
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if kind is str:
        return _parsed_text(setting, value)
    if kind in (int, float):
        return _parsed_number(setting, kind, value)
    if not isinstance(value, list):
        raise ValueError(f"must be a list of whole numbers, {setting.allowed}, such as {_yaml_text(setting.default)}")
    return tuple(_parsed(setting, int, item) for item in value)


def _parsed_text(setting: Setting, value: Any) -> str:
    text = "" if value is None else value
    if not isinstance(text, str):
        hint = f"""in a file "{shown(value)}", on the command line {setting.name}='"{shown(value)}"'"""
        raise ValueError(f"must be text; put it in quotes: {hint}")
    if not text.isprintable():
        raise ValueError("must be printable text on one line")
    if setting.key.choices and text not in setting.key.choices:
        raise ValueError(f"must be {setting.allowed}")
    return text


def _parsed_number(setting: Setting, kind: type, value: Any) -> int | float:
    low, high = setting.key.low, setting.key.high
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_finite = is_number and (isinstance(value, int) or math.isfinite(value))
    if not is_finite or (kind is int and value != int(value)):
        raise ValueError(f"must be a {'whole ' if kind is int else ''}number, {setting.allowed}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"must be {setting.allowed}")
    return kind(value)  # type: ignore[no-any-return]
