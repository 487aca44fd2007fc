"""The pages agree with the repository: links, paths, commands, numbers and recipes."""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import functools
import importlib
import importlib.util
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from apex_jax.config import Config
from apex_jax.config.command_line import parse
from apex_jax.config.load import SETTINGS
from apex_jax.main import COMMANDS
from tests.rigs.pages import Page
from tests.rigs.processes import ROOT

SINGLE = (
    "README.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    "deploy/kubernetes/README.md",
    "deploy/slurm/README.md",
    "deploy/ssh/README.md",
    "deploy/terraform/README.md",
    "deploy/terraform/TRIAL.md",
    "benchmarks/README.md",
    "results/README.md",
    "results/journal.md",
)
PATHS = [*(ROOT / name for name in SINGLE), *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [Page(path) for path in PATHS if path.is_file()]
ARCHITECTURE = Page(ROOT / "docs" / "architecture.md")
OF_CHANGED_CODE = "docs/extending.md"  # whose commands run after its diffs
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"runs", "replay", "logs", "keys", "metrics"}
SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".tf", ".hcl", ".service", ".timer"}
MADE_BY_USERS = {"deploy/terraform/.terraform.lock.hcl", "deploy/terraform/fleet.auto.tfvars"}
MAKE_TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def each(of: Callable[[Page], list[Any]]) -> pytest.MarkDecorator:
    """Parametrizes a test by the pages on which `of` finds anything, and by what it finds there."""
    found = [pytest.param(page, items, id=page.name) for page in PAGES if (items := of(page))]
    return pytest.mark.parametrize(("page", "items"), found)


def each_command(programs: Callable[[tuple[str, ...]], bool]) -> pytest.MarkDecorator:
    return each(lambda page: [words for words in page.commands if programs(words)])


# Links, paths and names ------------------------------------------------------------------------------------------


@each(lambda page: page.links)
def test_links_lead_to_files_and_headings_that_exist(page: Page, items: list[str]) -> None:
    for item in items:
        path, _, anchor = item.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), item
        assert not anchor or anchor in Page(target).anchors, item


def paths_of(page: Page) -> list[str]:
    """Returns the inline code that looks like a file or folder of the repository."""
    spans = [span for span in page.spans if re.fullmatch(r"[\w.*@/-]+", span) and not span.startswith(("/", ".", "*"))]
    return [span for span in spans if ("/" in span and span.split("/")[0] in FOLDERS) or Path(span).suffix in SUFFIXES]


@functools.cache
def file_names() -> set[str]:
    """Returns the names of the files of the repository, without their folders."""
    folders = [ROOT, *(ROOT / name for name in FOLDERS if not name.startswith("."))]
    return {name for folder in folders for _, _, files in os.walk(folder) for name in files}


@each(paths_of)
def test_paths_in_backticks_exist(page: Page, items: list[str]) -> None:
    for item in set(items) - MADE_BY_USERS:
        if "/" in item:
            assert any(next(iter(folder.glob(item)), None) for folder in (ROOT, page.path.parent)), item
        else:
            assert fnmatch.filter(file_names(), item), item


def named(name: str) -> Any:
    """Returns the module, or what a module has under a dotted name."""
    module, _, attribute = name.rpartition(".")
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(name)
    return getattr(named(module), attribute)


def test_numbers_of_the_architecture_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| ([\d,.^]+) \|", ARCHITECTURE.text, re.MULTILINE)
    assert len(rows) >= 20
    for name, number in rows:
        base, _, exponent = number.replace(",", "").partition("^")
        value = attrgetter(name)(Config()) if name in SETTINGS else named(name)
        assert float(base) ** int(exponent or 1) == value, name


# Commands --------------------------------------------------------------------------------------------------------


def arguments_of(words: tuple[str, ...]) -> list[str] | None:
    """Returns the arguments of this program; None for another program."""
    if words[0].endswith("python") and words[1:2] and words[1].endswith("main.py"):
        return list(words[2:])
    if words[:2] == ("make", "train"):
        given = [word.removeprefix("ARGS=") for word in words[2:] if word.startswith("ARGS=") and word != "ARGS="]
        return given[0].split() if given else None
    return list(words[1:]) if words[0] == "apex-jax" else None


@each_command(lambda words: arguments_of(words) is not None)
def test_command_lines_of_this_program_parse(
    page: Page, items: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name == OF_CHANGED_CODE:
        return
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    shutil.copy(ROOT / "examples" / "replay_only.yaml", "replay.yaml")
    for item in items:
        parse_command(arguments_of(item) or [])


def parse_command(arguments: list[str]) -> None:
    """Parses a command line of this program in a folder in which the runs that it names exist."""
    for word in arguments:
        key, _, directory = word.partition("=")
        if key.endswith("checkpoint"):
            Path(directory).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "configs" / "catch.yaml", Path(directory, "config.yaml"))
    if not arguments or arguments[0] not in COMMANDS:
        parser: Callable[[list[str]], object] = parse
    elif len(arguments) == 1:
        return  # only names the command
    else:
        parser = importlib.import_module(COMMANDS[arguments[0]])._parser().parse_args
        arguments = arguments[1:]
    try:
        parser(arguments)
    except SystemExit as end:  # of --help
        assert end.code == 0, arguments


@each_command(lambda words: words[0] == "make" and len(words) > 1)
def test_make_has_the_targets(page: Page, items: list[tuple[str, ...]]) -> None:
    assert {word for item in items for word in item[1:] if "=" not in word} <= set(MAKE_TARGETS)


@each_command(lambda words: words[1:2] == ("-m",) and words[0].endswith("python"))
def test_modules_that_are_run_exist_with_the_files_they_are_given(page: Page, items: list[tuple[str, ...]]) -> None:
    for item in items:
        assert importlib.util.find_spec(item[2]) is not None, item
        paths = [word.partition("::")[0] for word in item[3:] if item[2] == "pytest" and word.endswith((".py", "/"))]
        assert all((ROOT / path).exists() for path in paths), item


@each_command(lambda words: words[0].endswith("python") and words[1:2] != ("-m",) and len(words) > 1)
def test_scripts_that_are_run_exist(page: Page, items: list[tuple[str, ...]]) -> None:
    assert all((ROOT / item[1].removeprefix("/opt/apex-jax/current/")).is_file() for item in items)


# docs/faults.md -------------------------------------------------------------------------------------------------


def rows() -> dict[int, list[str]]:
    """Returns the files that docs/faults.md names for each number."""
    table = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    return {int(number): re.findall(r"`([^`]+)`", files) for number, files in table}


def found_tests() -> dict[int, set[str]]:
    """Returns the files that have tests of each number."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_fault_(\d\d)_\w", node.name)):
                found[int(match[1])].add(str(path.relative_to(ROOT)))
    return found


def test_every_fault_has_a_row_with_the_files_of_its_tests() -> None:
    assert list(rows()) == list(range(1, 41))
    assert found_tests() == {number: set(files) for number, files in rows().items()}
