"""From a copy of the checkout to a trained agent, with each Python, on a machine without libEGL, libGL and libOpenGL.

The libraries are hidden in a mount namespace, which nothing else sees.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.containers import tracked_files
from tests.rigs.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HIDE = r"""
set -euo pipefail
mount -t tmpfs none /mnt
folders='s#.*lib(EGL|GL|OpenGL)[.]so.* => (.*)/.*#\2#p'
for folder in $(ldconfig -p | sed -nE "$folders" | xargs --no-run-if-empty readlink --canonicalize | sort -u); do
    mkdir -p "/mnt$folder/upper" "/mnt$folder/work"
    mount -t overlay overlay -o "lowerdir=$folder,upperdir=/mnt$folder/upper,workdir=/mnt$folder/work" "$folder"
    rm -f "$folder"/lib{EGL,GL,OpenGL}.so*
done
"""
AS_ROOT = [] if os.geteuid() == 0 else ["--map-root-user"]
BARE = ["unshare", "--mount", *AS_ROOT, "bash", "-c", f'{HIDE}exec "$@"', "bare"]
LOADED = """
import contextlib, ctypes
for name in ("libEGL.so.1", "libGL.so.1", "libOpenGL.so.0"):
    with contextlib.suppress(OSError):
        print(ctypes.CDLL(name))
"""

Run = Callable[..., str]


def interpreter(version: str) -> str | None:
    """Returns the path of a Python of this version: on the path, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for path in [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]:
        command = [str(path), "-c", "import ensurepip, venv"]
        if path and subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0:
            return str(path)
    return None


@pytest.fixture(scope="module", params=["3.11", "3.12", "3.13"])
def python(request: pytest.FixtureRequest) -> str:
    if subprocess.run([*BARE, "true"], capture_output=True, check=False, timeout=60).returncode != 0:
        pytest.skip("this machine allows no mount namespace")
    return interpreter(request.param) or pytest.skip(f"there is no Python {request.param} here")


@pytest.fixture(scope="module")
def run(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Returns a function that runs a command in a copy of the checkout and returns its output."""
    checkout = tmp_path_factory.mktemp("bare")
    for name in tracked_files():
        if not name.startswith(("results/", "tests/")):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)

    # As a user's shell has it: pip's own cache, and no variables of the make that runs these tests.
    environment = {key: os.environ[key] for key in os.environ.keys() - {"XDG_CACHE_HOME", "MAKEFLAGS"}}

    def run_bare(*command: str) -> str:
        done = subprocess.run(
            [*BARE, *command], cwd=checkout, env=environment, capture_output=True, text=True, check=False, timeout=1500
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    assert run_bare(python, "-c", LOADED) == ""
    yield run_bare
    shutil.rmtree(checkout)  # two environments of more than 1 GB


def test_make_train_trains_catch_to_its_end(run: Run, python: str) -> None:
    assert "8,000 updates" in run("make", "train", f"PYTHON={python}", "ARGS=--config catch processes=many")


def test_make_train_trains_walker(run: Run, python: str) -> None:
    settings = "total_updates=400 replay.min_size_to_sample=1000 evaluator.episodes=2"
    assert "400 updates" in run("make", "train", f"PYTHON={python}", f"ARGS=--config walker {settings}")


def test_pip_installs_a_command_that_plays_atari(run: Run, python: str) -> None:
    run(python, "-m", "venv", "installed")
    run("installed/bin/python", "-m", "pip", "install", "--quiet", ".")
    assert "Pong-v5" in run("installed/bin/apex-jax", "tasks", "Pong")
