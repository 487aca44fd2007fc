"""A module with the interface of wandb and trackio, which records its calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "recording_service"
MODULE = """
import json, os, pathlib
_calls = pathlib.Path(__file__).with_name(f"calls-{os.getpid()}.jsonl")

def _record(function, **values):
    if function in {failing}:
        raise RuntimeError("no key is configured\\nsecond line")
    with open(_calls, "a") as file:
        file.write(json.dumps([function, values]) + "\\n")

def init(project, name, group, config):
    _record("init", project=project, name=name, group=group, config=config)

def log(values, step):
    _record("log", values=values, step=step)

def finish():
    _record("finish")
"""


def write_service(folder: Path, failing: tuple[str, ...] = (), name: str = NAME) -> None:
    """Writes the module; `failing`: its functions that raise."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(MODULE.replace("{failing}", repr(failing)))


def calls_of(folder: Path) -> list[list[tuple[str, dict[str, Any]]]]:
    """Returns the calls (function, values) of each process that used the module."""
    paths = sorted(folder.glob("calls-*.jsonl"))
    return [[(call[0], call[1]) for call in map(json.loads, path.read_text().splitlines())] for path in paths]
