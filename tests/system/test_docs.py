"""The pages agree with the repository: links, paths, commands, numbers and recipes."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import importlib.util
import os
import re
import shutil
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
    "deploy/slurm/README.md",
    "benchmarks/README.md",
    "results/README.md",
)
PATHS = [*(ROOT / name for name in SINGLE), *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [Page(path) for path in PATHS if path.is_file()]
ARCHITECTURE = Page(ROOT / "docs" / "architecture.md")
OF_CHANGED_CODE = "docs/extending.md"  # whose commands run after its diffs
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"runs", "replay", "logs", "keys", "metrics"}
SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".tf", ".hcl", ".service", ".timer"}
MADE_BY_USERS = {"deploy/terraform/.terraform.lock.hcl", "deploy/terraform/fleet.auto.tfvars"}
MAKE_TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def each(of: Callable[[Page], list[Any]], shown: Callable[[Any], str] = str) -> pytest.MarkDecorator:
    """Returns a test's parameters: what `of` finds on each page."""
    found = [pytest.param(page, item, id=f"{page.name}: {shown(item)}") for page in PAGES for item in of(page)]
    return pytest.mark.parametrize(("page", "item"), found)


def each_command(programs: Callable[[tuple[str, ...]], bool]) -> pytest.MarkDecorator:
    return each(lambda page: [words for words in page.commands if programs(words)], " ".join)


# Links, paths and names ------------------------------------------------------------------------------------------


@each(lambda page: page.links)
def test_link_leads_to_a_file_and_a_heading_that_exist(page: Page, item: str) -> None:
    path, _, anchor = item.partition("#")
    target = (page.path.parent / path).resolve() if path else page.path
    assert target.exists()
    assert not anchor or anchor in Page(target).anchors


def paths_of(page: Page) -> list[str]:
    """Returns the inline code that looks like a file or folder of the repository."""
    spans = [span for span in page.spans if re.fullmatch(r"[\w.*@/-]+", span) and not span.startswith(("/", ".", "*"))]
    return [span for span in spans if ("/" in span and span.split("/")[0] in FOLDERS) or Path(span).suffix in SUFFIXES]


@each(paths_of)
def test_path_in_backticks_exists(page: Page, item: str) -> None:
    if item in MADE_BY_USERS:
        return
    if "/" in item:
        assert any(next(iter(folder.glob(item)), None) for folder in (ROOT, page.path.parent))
    else:
        folders = [ROOT, *(ROOT / name for name in FOLDERS if not name.startswith("."))]
        names = {Path(name).name for folder in folders for _, _, files in os.walk(folder) for name in files}
        assert fnmatch.filter(names, item)


@each(lambda page: [span for span in page.spans if re.fullmatch(r"(apex_jax|tests|benchmarks|deploy)(\.\w+)+", span)])
def test_dotted_name_in_backticks_exists(page: Page, item: str) -> None:
    assert named(item) is not None


def named(name: str) -> Any:
    """Returns the module, or what a module has under a dotted name."""
    module, _, attribute = name.rpartition(".")
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(name)
    return getattr(named(module), attribute)


def numbers() -> list[Any]:
    rows = re.findall(r"^\| `([\w.]+)` \| ([\d,.^]+) \|", ARCHITECTURE.text, re.MULTILINE)
    return [pytest.param(name, number, id=name) for name, number in rows]


@pytest.mark.parametrize(("name", "number"), numbers())
def test_number_of_the_architecture_is_that_of_the_code(name: str, number: str) -> None:
    base, _, exponent = number.replace(",", "").partition("^")
    assert float(base) ** int(exponent or 1) == (attrgetter(name)(Config()) if name in SETTINGS else named(name))


def test_architecture_has_the_numbers_and_stays_short() -> None:
    assert len(numbers()) >= 20
    assert len(ARCHITECTURE.text.splitlines()) <= 250


# Commands --------------------------------------------------------------------------------------------------------


def arguments_of(words: tuple[str, ...]) -> list[str] | None:
    """Returns the arguments of this program; None for another program."""
    if words[0].endswith("python") and words[1:2] and words[1].endswith("main.py"):
        return list(words[2:])
    if words[:2] == ("make", "train"):
        given = [word.removeprefix("ARGS=") for word in words[2:] if word.startswith("ARGS=") and word != "ARGS="]
        return given[0].split() if given else None
    return list(words[1:]) if words[0] == "apex-jax" else None


@each(
    lambda page: [words for words in page.commands if arguments_of(words) is not None and page.name != OF_CHANGED_CODE],
    " ".join,
)
def test_command_line_of_this_program_parses(
    page: Page, item: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = arguments_of(item)
    assert arguments is not None
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    shutil.copy(ROOT / "examples" / "replay_only.yaml", "replay.yaml")
    for word in arguments:
        key, _, directory = word.partition("=")
        if key.endswith("checkpoint"):
            Path(directory).mkdir(parents=True)
            shutil.copy(ROOT / "configs" / "catch.yaml", Path(directory, "config.yaml"))
    if not arguments or arguments[0] not in COMMANDS:
        parser: Callable[[list[str]], object] = parse
    elif len(arguments) == 1:
        return  # only names the command
    else:
        parser = importlib.import_module(COMMANDS[arguments.pop(0)])._parser().parse_args
    try:
        parser(arguments)
    except SystemExit as end:  # of --help
        assert end.code == 0


@each_command(lambda words: words[0] == "make" and len(words) > 1)
def test_make_has_the_target(page: Page, item: tuple[str, ...]) -> None:
    targets = [word for word in item[1:] if "=" not in word]
    assert set(targets) <= set(MAKE_TARGETS)


@each_command(lambda words: words[1:2] == ("-m",) and words[0].endswith("python"))
def test_module_that_is_run_exists_with_the_files_it_is_given(page: Page, item: tuple[str, ...]) -> None:
    assert importlib.util.find_spec(item[2]) is not None
    paths = [word.partition("::")[0] for word in item[3:] if item[2] == "pytest" and word.endswith((".py", "/"))]
    assert all((ROOT / path).exists() for path in paths)


@each_command(lambda words: words[0].endswith("python") and words[1:2] != ("-m",) and len(words) > 1)
def test_script_that_is_run_exists(page: Page, item: tuple[str, ...]) -> None:
    assert (ROOT / item[1].removeprefix("/opt/apex-jax/current/")).is_file()


def test_page_is_read_without_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(ROOT / "nowhere.md")
    text = '# A `b` and [c](d.md#e)\n`[x](y)`\n## A b, and c!\n```bash\n# D\n[f](g)\n```\n<img src="h.png">\n`i\n  j`\n'
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert page.anchors == {"a-b-and-c", "a-b-and-c-1"}
    assert page.links == ["d.md#e", "h.png"]
    assert page.spans == ["b", "[x](y)", "i j"]
