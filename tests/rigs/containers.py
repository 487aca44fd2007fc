"""The files of the container as an engine reads them: Dockerfile, .dockerignore, compose.yaml."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import yaml

from tests.rigs.processes import ROOT


class Instruction(NamedTuple):
    """An instruction of the Dockerfile, such as COPY and what follows it."""

    name: str
    text: str


def instructions() -> list[Instruction]:
    """Returns the instructions of the Dockerfile, each on one line."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#")).replace("\\\n", " ")
    return [Instruction(*line.split(None, 1)) for line in text.splitlines() if line.strip()]


def texts_of(name: str) -> list[str]:
    """Returns what follows each instruction of this name."""
    return [instruction.text for instruction in instructions() if instruction.name == name]


def entrypoint() -> list[str]:
    """Returns the words of the image's program. Raises ValueError if a shell would run it."""
    (text,) = texts_of("ENTRYPOINT")
    words: list[str] = json.loads(text)
    return words


def context(paths: Iterable[str]) -> list[str]:
    """Returns those of these paths, relative to the repository, that .dockerignore lets into a build.

    A pattern also covers what is in a folder that it matches, and the last one that covers a path decides.
    """
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [path for path in paths if not _is_ignored(path, patterns)]


def tracked_files() -> list[str]:
    """Returns the paths that git tracks, or would if they were added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    return [path for path in done.stdout.decode().split("\0") if path and (ROOT / path).is_file()]


def services(environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Returns the services of compose.yaml, with the variables of `environment` or their defaults in it."""
    given = environment or {}
    text = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda found: given.get(found[1]) or found[2], (ROOT / "compose.yaml").read_text()
    )
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def arguments(service: Mapping[str, Any]) -> list[str]:
    """Returns the words of a service's command."""
    return shlex.split(service["command"])


def volumes(service: Mapping[str, Any]) -> dict[str, str]:
    """Returns the volume at each folder of a service."""
    return {mount.split(":")[1]: mount.split(":")[0] for mount in service["volumes"]}


def _is_ignored(path: str, patterns: Iterable[str]) -> bool:
    covering = [path, *map(str, PurePosixPath(path).parents)]
    ignored = False
    for pattern in patterns:
        regex = _regex(pattern.removeprefix("!"))
        if any(regex.fullmatch(name) for name in covering):
            ignored = not pattern.startswith("!")
    return ignored


def _regex(pattern: str) -> re.Pattern[str]:
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    parts = re.split(r"(\*\*/|\*\*|\*)", pattern.strip("/"))
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts))
