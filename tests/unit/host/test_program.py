"""How the program knows whether it runs from a checkout or as a package, and what the user types."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.processes import ROOT

SHOWN = """
import json, sys
sys.argv[0] = {argv0!r}
from apex_jax.host import program as p
print(json.dumps([p.NAME, str(p.CHECKOUT), str(p.CONFIGS), p.command(), p.typed("py")]))
"""


def shown(folder: Path, argv0: str) -> list[object]:
    """Returns what a program with this argv[0] says whose package lies in `folder`."""
    command = [sys.executable, "-c", SHOWN.format(argv0=argv0)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return list(json.loads(done.stdout))


def test_program_of_a_checkout_is_main_py_with_the_configurations_beside_it() -> None:
    name, checkout, configs, command, typed = shown(ROOT, "main.py")
    assert (name, checkout, configs) == ("python main.py", str(ROOT), str(ROOT / "configs"))
    assert command == [sys.executable, str(ROOT / "main.py")]
    assert typed == "py main.py"


def test_the_command_of_an_editable_installation_is_named_as_it_was_typed() -> None:
    name, checkout, _, _, typed = shown(ROOT, "/somewhere/bin/apex-jax")
    assert (name, typed, checkout) == ("apex-jax", "apex-jax", str(ROOT))


@pytest.mark.parametrize("argv0", ["apex-jax", "-m"])
def test_installed_program_is_the_command_with_the_configurations_in_the_package(argv0: str, tmp_path: Path) -> None:
    (tmp_path / "apex_jax" / "host").mkdir(parents=True)
    for module in ("__init__.py", "host/__init__.py", "host/program.py"):
        shutil.copy(ROOT / "apex_jax" / module, tmp_path / "apex_jax" / module)
    (tmp_path / "main.py").write_text("raise SystemExit('of somebody else')")
    name, checkout, configs, command, typed = shown(tmp_path, argv0)
    assert (name, checkout, typed) == ("apex-jax", "None", "apex-jax")
    assert configs == str(tmp_path / "apex_jax" / "configs")
    assert command == [sys.executable, "-P", "-m", "apex_jax"], (
        "no file of the working directory stands in for a module"
    )
