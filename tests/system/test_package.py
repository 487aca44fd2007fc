"""The package as pip makes and installs it; the slow test takes minutes: it installs all dependencies anew."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from apex_jax import __version__
from tests.rigs.processes import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the sdist of what git tracks here, and the wheel made of that sdist."""
    folder = tmp_path_factory.mktemp("package")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    for name in filter(None, files.decode().split("\0")):
        if not name.startswith(("results/", "tests/")) and (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


def test_version_is_the_same_in_every_file() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "apex_jax.__version__"
    }
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_sdist_and_wheel_hold_every_module_and_configuration_and_the_licence(built: Path) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "apex_jax").rglob("*.py")}
    configs = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        others = {"apex_jax/operations/page.html"}
        assert modules | {f"apex_jax/configs/{name}" for name in configs} | others == {
            name for name in names if ".dist-info/" not in name
        }
        assert any(name.endswith("/LICENSE") for name in names)
        metadata = wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert required == [re.match(r"[\w-]+", line)[0] for line in lines if line[0] != "#"]  # type: ignore[index]
    assert {"gpu", "video", "storage", "film", "export", "box2d", "jax-envs", "dev", "deploy"} == set(
        re.findall(r"^Provides-Extra: ([\w-]+)$", metadata, re.MULTILINE)
    )
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    others |= {"LICENSE", "README.md", "examples/one_process.py"}
    assert modules | {f"configs/{name}" for name in configs} | others <= inside


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_wheel_in_an_empty_environment_trains_by_the_command_apex_jax(built: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    install = [str(tmp_path / "venv" / "bin" / "pip"), "install", "--quiet", str(next(built.glob("*.whl")))]
    subprocess.run(install, check=True, timeout=900)

    def apex_jax(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "venv" / "bin" / "apex-jax"), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)

    assert apex_jax("--version").stdout == f"apex-jax {__version__}\n"
    assert apex_jax("--role", "nobody").returncode == 2
    assert "usage: apex-jax plot" in apex_jax("plot", "--help").stdout
    done = apex_jax("--config", "catch", "total_updates=300", "run_directory=run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "curves.png").stat().st_size > 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
    assert "apex-jax --role evaluator checkpoint=run episodes=100" in done.stdout
    assert '"command": "apex-jax --config catch' in (tmp_path / "run" / "starts.jsonl").read_text()
    again = apex_jax("--role", "evaluator", "checkpoint=run", "episodes=2")
    assert again.returncode == 0, again.stderr
