"""The keys of `Config` as named settings, and the way from YAML files and `key=value` texts to a checked `Config`.

It runs before a device is chosen, so it does not import JAX, EnvPool or ZMQ. Every mistake of the user ends in a
`UsageError`: one line that names the key, its value, what is allowed, and the fix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args, get_type_hints

from omegaconf import OmegaConf

from apex_jax.config.keys import Config, JsonObject, Key, names_code
from apex_jax.config.rules import check
from apex_jax.host.disk import open_regular
from apex_jax.host.errors import UsageError, short_repr
from apex_jax.host.program import CONFIGS

DEFAULT_CONFIG = CONFIGS / "atari_cpu.yaml"
CONFIG_NAME = "config.yaml"  # of a run directory
EXPORTED_CONFIG_NAME = "config.json"  # of the folder of an exported policy
RESULT_KEYS = (
    *("seed", "environment.", "algorithm.", "network.", "actor.", "replay.", "learner."),
    *("evaluator.epsilon", "evaluator.max_episode_frames"),
)
"""Keys that affect a run's results; a name that ends with a dot is a whole group."""
MAX_YAML_LENGTH = 16_384  # libyaml is recursive: some 30,000 open brackets overflow the stack and kill the process


class Setting(NamedTuple):
    """A key of `Config` with the data for help, checks and messages."""

    name: str  # dotted: learner.learning_rate
    kind: Any  # bool, int, float, str, JsonObject, tuple[int, ...] or tuple[str, ...]
    default: Any
    key: Key

    @property
    def allowed(self) -> str:
        """The allowed values, such as `1 to 64 steps`."""
        if self.kind is bool:
            return "true or false"
        if self.kind is JsonObject:
            return "{NAME: VALUE, ...}"
        if self.key.choices:
            return ", ".join(self.key.choices[:-1]) + f" or {self.key.choices[-1]}"
        if self.key.low is None or self.key.high is None:
            return ""
        return f"{_number_text(self.key.low)} to {_number_text(self.key.high)} {self.key.unit}".rstrip()

    @property
    def meaning(self) -> str:
        """The meaning and the allowed values."""
        return f"{self.key.text} [{self.allowed}]" if self.allowed else self.key.text


def _number_text(number: float) -> str:
    return f"{int(number):_}" if number == int(number) and number >= 10_000 else f"{number:g}"


def settings_of(owner: type, group: str) -> Iterator[Setting]:
    """Yields the settings of a dataclass of config.py, their names under `group`, such as learner."""
    prefix, hints = f"{group}." if group else "", get_type_hints(owner)
    for item in dataclasses.fields(owner):
        if "key" in item.metadata:
            yield Setting(prefix + item.name, hints[item.name], item.default, item.metadata["key"])


GROUPS: dict[str, type] = {
    item.name: type(item.default) for item in dataclasses.fields(Config) if "key" not in item.metadata
}
OWNERS: list[tuple[str, type]] = [("", Config), *GROUPS.items()]
# Keys in files of earlier releases, and the only value of each that is read.
REMOVED = {"replay.servers": 1, "replay.index": 0, "learner.devices": 1, "algorithm.value_rescaling": False}
OF_ATOMS = ("environment.task", "network.name", "algorithm.name")
SETTINGS = {setting.name: setting for group, owner in OWNERS for setting in settings_of(owner, group)}


class Preset(NamedTuple):
    """A configuration that was chosen for a task, since the user named none."""

    config: str  # in configs/, such as walker
    settings: Mapping[str, Any] = MappingProxyType({})  # by key, in place of its own
    why: str = ""  # a line for the user; empty = the default


def config_names() -> str:
    """Returns the configurations that come with the program, for a message: "one of atari, catch, ...\"."""
    return "one of " + ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))


def config_file(config: str) -> Path:
    """Returns the file at that path if it exists, otherwise the file in configs/ of that name, such as atari."""
    path, named = Path(config), CONFIGS / f"{config.removesuffix('.yaml')}.yaml"
    return named if path.name == config and is_file(named) and not is_file(path) else path


def is_file(path: Path) -> bool:
    """Returns whether there is such a file; False for a name that no file can have."""
    return os.path.isfile(path)


def heading(group: str) -> str:
    """Returns the line above the settings of a group, in --help and in written files."""
    return f"{group}: {(GROUPS[group].__doc__ or '').splitlines()[0]}" if group else "The run as a whole."


def closest(name: str) -> list[str]:
    """Returns at most 3 keys that resemble `name`: the dotted name, the name without group, or the initials (lr)."""
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
    """Returns the checked Config of a YAML file (None: the defaults), overridden by `key=value` texts.

    A file may contain a key once; of several overrides of a key the last one counts, and the prefix `group` may be
    omitted. Nothing is evaluated. Raises UsageError.
    """
    return load_with(path, parse_overrides(overrides, group))


def load_with(path: Path | str | None, given: Mapping[str, Any]) -> Config:
    """Returns the checked Config of a YAML file, overridden by values that were parsed before, by key.

    The atoms of a file lie between the returns of its task, and need its network and its loss: if `given` has others,
    the file's `algorithm.atoms` is ignored. Tasks of EnvPool and Gymnasium with one name are the same.
    """
    of_file = {} if path is None else _read(Path(path))
    old = {name: str(of_file.get(name, SETTINGS[name].default)).removeprefix("gymnasium:") for name in OF_ATOMS}
    if any(str(given.get(name, of_name)).removeprefix("gymnasium:") != of_name for name, of_name in old.items()):
        of_file.pop("algorithm.atoms", None)
    config = _config_of(of_file | dict(given))
    check(config)
    return config


def load_run(directory: str | os.PathLike[str], keys: tuple[str, ...] = ("",)) -> Config:
    """Returns the configuration of a run directory, which somebody else may have made.

    The rules between keys are not checked, since the run may be older than a rule. `keys`: prefixes of the names of the
    keys to read. Raises UsageError; also if the file is a link or a FIFO.
    """
    return _config_of(_values_of_run(directory, keys))


def load_run_to_play(directory: str, given: Mapping[str, Any]) -> Config:
    """Returns the checked Config for evaluating a run: the run's settings that affect results, else the defaults.

    `given`: overrides by key. Raises UsageError; also if a setting names code (`code_settings`) and is not in `given`.
    """
    config = _config_of(_values_of_run(directory, (*RESULT_KEYS, "evaluator.episodes", "metrics.info")) | dict(given))
    check(config)
    check_trusted(config, directory, given)
    return config


def config_path(directory: str | os.PathLike[str]) -> Path:
    """Returns the path of the configuration of a run, or of an exported policy if the directory holds one."""
    path, exported = Path(directory, CONFIG_NAME), Path(directory, EXPORTED_CONFIG_NAME)
    return exported if is_file(exported) and not is_file(path) else path


def _values_of_run(directory: str | os.PathLike[str], keys: tuple[str, ...]) -> dict[str, Any]:
    values = _read(config_path(directory), of_run=True)
    return {name: value for name, value in values.items() if name.startswith(keys)}


def config_of(record: object) -> Config:
    """Returns the configuration of a mapping from keys to values, as in a file; rules between keys are not checked.

    Raises UsageError for anything but a mapping, such as a path.
    """
    if not isinstance(record, Mapping):
        raise UsageError(f"{short_repr(record)}: is no configuration; it must be a mapping from keys to values")
    return _config_of(_values(record))


def _config_of(values: Mapping[str, Any]) -> Config:
    members: dict[str, dict[str, Any]] = {group: {} for group in ("", *GROUPS)}
    for name, value in values.items():
        group, _, short_name = name.rpartition(".")
        members[group][short_name] = value
    groups = {name: group(**members[name]) for name, group in GROUPS.items()}
    return Config(**members[""], **groups)


def to_yaml(config: Config) -> str:
    """Returns every key with its value and its meaning as a comment; `load` restores an equal Config."""
    lines = []
    for group, owner in OWNERS:
        members, indent = (getattr(config, group), "  ") if group else (config, "")
        lines += ["", f"# {heading(group)}", f"{group}:"] if group else [f"# {heading(group)}"]
        for setting in settings_of(owner, ""):
            value = getattr(members, setting.name)
            lines += [f"{indent}# {setting.meaning}", f"{indent}{setting.name}: {yaml_text(value)}"]
    return "\n".join(lines) + "\n"


def yaml_text(value: Any) -> str:
    """Returns a value as YAML on one line."""
    if isinstance(value, JsonObject):
        return str(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # JSON on one line is YAML


def _read(path: Path, of_run: bool = False) -> dict[str, Any]:
    """Returns the checked values of a file by dotted name; with `of_run`, the file must be a regular one."""
    where = short_repr(path) if of_run else f"--config {short_repr(path)}"
    try:
        with open(open_regular(path, os.O_RDONLY) if of_run else path, encoding="utf-8-sig") as file:
            text = file.read(MAX_YAML_LENGTH + 1)
    except OSError as error:
        fix = "" if of_run else f"; give a YAML file, or {config_names()}"
        raise UsageError(f"{where}: {error.strerror}{fix}") from None
    except ValueError:  # bytes that are not UTF-8
        raise UsageError(f"{where}: is not text; give a YAML file") from None
    try:
        tree = _plain(text, lambda text: OmegaConf.load(io.StringIO(text)))
    except Exception as error:  # the parser raises almost any exception for odd input, such as KeyError for `!!bool x`
        raise UsageError(f"{where}: is not YAML that holds keys and values: {_first_problem(error)}") from None
    if not isinstance(tree, dict) or not tree:
        raise UsageError(f"{where}: has no keys; write lines such as `seed: 3`, or restore the file if a run wrote it")
    try:
        return _values(tree)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def parse_overrides(texts: Sequence[str], group: str) -> dict[str, Any]:
    """Returns the checked values of several `key=value` texts by dotted name; of a key given twice, the last."""
    values: dict[str, Any] = {}
    for text in texts:
        values |= parse_override(text, group)
    return values


def parse_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the checked values of a mapping from keys to values, and from groups to such mappings, by dotted name."""
    return _values({name: list(value) if isinstance(value, tuple) else value for name, value in tree.items()})


def parse_override(text: str, group: str) -> dict[str, Any]:
    """Returns the checked value, or the values of a group, of one `key=value`."""
    name, separator, value = text.partition("=")
    if name not in SETTINGS and f"{group}.{name}" in SETTINGS:
        name = f"{group}.{name}"
    if not separator:
        raise UsageError(f"{short_repr(text)}: settings are given as KEY=VALUE, such as seed=3; see --help")
    try:
        tree = {name: _value(value)}
    except Exception as error:  # as in _read
        raise UsageError(
            f"{short_repr(text)}: the value is not YAML: {_first_problem(error)}; put it in quotes"
        ) from None
    return _values(tree)


def _value(text: str) -> Any:
    """Returns the value of a YAML text, such as the part after `key=`."""
    return _plain(text, lambda text: OmegaConf.from_dotlist([f"value={text}"]))["value"]


def _plain(text: str, parser: Callable[[str], Any]) -> Any:
    if len(text) > MAX_YAML_LENGTH:
        raise ValueError(f"it is longer than {MAX_YAML_LENGTH} characters")
    return OmegaConf.to_container(parser(text), resolve=False)  # `${...}` stays text, which `_parse_value` rejects


def _first_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or error or type(error).__name__).splitlines()[0]
    return f"{problem} in line {mark.line + 1}" if mark else problem


def _values(tree: Mapping[Any, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in _flatten(tree):
        if name in values:
            raise UsageError(f"{name} is given twice, the second time as {short_repr(value)}; keep one")
        try:
            values[name] = _parse_value(SETTINGS[name], SETTINGS[name].kind, value)
        except ValueError as error:
            is_text = isinstance(value, str) and SETTINGS[name].kind in (bool, int, float)  # such as a quoted number
            is_quoted = is_text or isinstance(value, list | None)
            text = json.dumps(value, ensure_ascii=False, default=str) if is_quoted else value
            raise UsageError(f"{name}={short_repr(text)}: {error}") from None
    return values


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf by its dotted name."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in SETTINGS:
            yield name, value
        elif name in REMOVED:
            if value != REMOVED[name]:
                what = f"must be {yaml_text(REMOVED[name])}, or left out: nothing else is possible any more"
                raise UsageError(f"{name}={short_repr(value)}: {what}")
        elif name not in GROUPS:
            near = closest(name[:80])  # the search takes time in proportion to the square of the length
            fix = f"did you mean {' or '.join(near)}?" if near else "--help lists all keys"
            raise UsageError(f"unknown key {short_repr(name)} (value {short_repr(value)}); {fix}")
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            first = next(settings_of(GROUPS[name], name)).name
            raise UsageError(f"{name}={short_repr(value)}: is a group of keys, not one; set its keys, such as {first}")


def _parse_value(setting: Setting, kind: Any, value: Any) -> Any:
    """Returns the value as `kind`. Raises ValueError with the allowed values."""
    if isinstance(value, str) and "${" in value:
        raise ValueError("nothing is looked up or evaluated; write the value itself in place of ${...}")
    # If ~ were accepted, a folder of that name would be created, and a user might delete it with rm -rf ~.
    if isinstance(value, str) and value.startswith("~"):
        raise ValueError("nothing is looked up or evaluated; write the path itself in place of ~")
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if kind is str:
        return _parse_text(setting, value)
    if kind is JsonObject:
        return _parse_object(value)
    if kind in (int, float):
        return _parse_number(setting, kind, value)
    if not isinstance(value, list):
        items = "names" if get_args(kind)[0] is str else f"whole numbers, {setting.allowed}"
        raise ValueError(f"must be a list of {items}, such as {yaml_text(setting.default)}")
    return tuple(_parse_value(setting, get_args(kind)[0], item) for item in value)


def _parse_text(setting: Setting, value: Any) -> str:
    if isinstance(value, list) and len(value) == 1 and setting.name.startswith("addresses."):
        [value] = value  # as in files of earlier releases
    text = "" if value is None else value
    if not isinstance(text, str):
        hint = f"""in a file "{short_repr(value)}", on the command line {setting.name}='"{short_repr(value)}"'"""
        raise ValueError(f"must be text; put it in quotes: {hint}")
    if not text.isprintable():
        raise ValueError("must be printable text on one line")
    if setting.key.choices and text not in setting.key.choices:
        raise ValueError(f"must be {setting.allowed}")
    return text


def _parse_object(value: Any) -> JsonObject:
    """Returns a mapping, or its JSON text, as JSON text without blanks, which a compatibility key can contain."""
    with contextlib.suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a mapping, such as {gravity: -5.0}")
    text = json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    if not text.isprintable():
        raise ValueError("must be printable text on one line")
    return JsonObject(text.replace(" ", "\\u0020"))


def _parse_number(setting: Setting, kind: type, value: Any) -> int | float:
    low, high = setting.key.low, setting.key.high
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_finite = is_number and (isinstance(value, int) or math.isfinite(value))
    if not is_finite or (kind is int and value != int(value)):
        raise ValueError(f"must be a {'whole ' if kind is int else ''}number, {setting.allowed}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"must be {setting.allowed}")
    return kind(value)  # type: ignore[no-any-return]


# Settings that name code of the user ----------------------------------------------------------------------------------


def code_settings(config: Config) -> dict[str, str]:
    """Returns, by key, the settings that make a program import a module, or call it with arguments.

    A program must not do so if only the files of a run, which may be somebody else's, contain the setting.
    """
    environment, found = config.environment, {}
    if environment.has_spaces and (environment.task.count(":") > 1 or environment.settings != "{}"):
        found["environment.task"] = environment.task
    if environment.python:
        found |= {"environment.task": environment.task, "environment.python": environment.python}
    names = {"algorithm.name": config.algorithm.name, "network.name": config.network.name}
    return found | {key: value for key, value in names.items() if names_code(value)}


def check_trusted(
    config: Config, directory: str | os.PathLike[str], given: Mapping[str, Any], groups: tuple[str, ...] = ("",)
) -> None:
    """Raises UsageError if settings of a run name code, and are not in `given`.

    `directory`: of the run, for the message; `given`: the user's settings by key; `groups`: prefixes of keys to check.
    """
    code = {name: value for name, value in code_settings(config).items() if name.startswith(groups)}
    missing = [f"{name}={short_repr(value)}" for name, value in code.items() if given.get(name) != value]
    if missing:
        settings = " ".join(missing)
        what = f"{short_repr(directory)} names {settings}, which would run code with that run's settings"
        raise UsageError(f"{what}; if you trust the run and the code, add {settings} (in Python: code={missing})")
