"""What `main.py` says when it cannot do what it is asked: one line, an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from apex_jax.process import SUPERVISED
from tests.rigs.learner_runs import error_of
from tests.rigs.processes import ROOT, Programs, catch, free_tcp_addresses


@pytest.mark.parametrize("command", [["--help"], ["plot", "runs/x"], ["--role", "replay"]], ids=lambda words: words[0])
def test_python_without_the_packages_is_named_with_the_fix(command: list[str]) -> None:
    without_packages = [sys.executable, "-S", str(ROOT / "main.py")]
    done = subprocess.run([*without_packages, *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(rf"error: {re.escape(sys.executable)} has no package \w+: .*\n", done.stderr)
    assert ". .venv/bin/activate" in done.stderr


@pytest.mark.parametrize("command", [
    ["tasks", "Pong"],
    pytest.param(["--role", "actor"], marks=pytest.mark.long),
    pytest.param(["--config", "catch"], marks=pytest.mark.long),
    pytest.param(["environment.task=gymnasium:CartPole-v1"], marks=pytest.mark.long),
], ids=lambda words: words[-1])  # fmt: skip
def test_package_that_cannot_be_loaded_is_named_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "envpool.py").write_text("raise ImportError('libEGL.so.1: no such file', name='x', path=__file__)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = [sys.executable, str(ROOT / "main.py"), *command]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert error.startswith(f"error: {sys.executable} cannot load {tmp_path / 'envpool.py'} (libEGL.so.1: ")
    assert "pip install -r requirements.txt" in error


def test_config_is_printed_and_nothing_started(programs: Programs, tmp_path: Path) -> None:
    program = programs.start(*catch(tmp_path / "run"), "--print-config", "seed=7")
    assert (program.exit_code(), program.stderr) == (0, "")
    assert "\nseed: 7\n" in program.stdout
    assert not (tmp_path / "run").exists()


def test_a_supervised_role_leaves_loggers_and_the_address_of_prometheus_to_its_supervisor(tmp_path: Path) -> None:
    arguments = catch(tmp_path / "run", *free_tcp_addresses(), "metrics.loggers=[jsonl,prometheus]")
    command, environment = [sys.executable, str(ROOT / "main.py"), "--role", "replay", *arguments], dict(os.environ)
    for supervised, code in (("", 2), ("1", 0)):  # at the end of its standard input, a supervised role ends
        environment[SUPERVISED] = supervised
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        assert done.returncode == code, done.stderr


@pytest.mark.long
def test_unwritable_file_is_a_one_line_error(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "run" / "logs" / "config.yaml").mkdir(parents=True)
    error = error_of(programs.start(*catch(tmp_path / "run")), 1)
    assert "run/logs/config.yaml" in error
    assert "choose another run_directory" in error


LIMITED = """
import sys, threading
started, start = [], threading.Thread.start
def limited(thread):
    if len(started) == {limit}:
        raise RuntimeError("can't start new thread")
    started.append(thread)
    start(thread)
threading.Thread.start = limited
from apex_jax.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("limit", [3, 64])  # before anything starts, and later
def test_limit_of_threads_is_a_one_line_error(limit: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED.format(limit=limit), *catch(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    [error] = [line for line in done.stderr.splitlines() if not line.startswith(("Watch", "starting"))]
    assert error.startswith("error: ")
    assert all(word in error for word in ("thread", "`ulimit -u`", "pids.max"))


def test_signal_amid_a_wait_asks_a_worker_to_stop() -> None:
    lines = "stop._event._cond.acquire(); os.kill(os.getpid(), signal.SIGINT); sys.exit(stop.exit_code)"
    program = f"import os, signal, sys, apex_jax.process as p; stop = p.StopSignal(); stop.install(); {lines}"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False).returncode == 130


def test_jax_is_not_imported_before_the_device_is_chosen() -> None:
    lines = (
        "import sys, apex_jax.main, apex_jax.config.command_line, apex_jax.run.provenance, apex_jax.run.loggers",
        "import apex_jax.device, apex_jax.process",
        "sys.exit('jax' in sys.modules)",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, timeout=60, check=False).returncode == 0


NAMES = """
import json, sys
sys.argv[0] = {argv0!r}
from apex_jax.host import program as p
print(json.dumps([p.NAME, str(p.CHECKOUT), str(p.CONFIGS), p.command(), p.shell_command("py")]))
"""


def names_of(folder: Path, argv0: str, working_directory: Path | None = None) -> list[object]:
    """Returns the names and places of a program with this argv[0] whose package lies in `folder`."""
    command = [sys.executable, "-c", NAMES.format(argv0=argv0)]
    environment, cwd = os.environ | {"PYTHONPATH": str(folder)}, working_directory or folder
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return list(json.loads(done.stdout))


@pytest.mark.parametrize(("argv0", "name", "typed"), [
    ("main.py", "python main.py", "py main.py"), ("/somewhere/bin/apex-jax", "apex-jax", "apex-jax"),
])  # fmt: skip
def test_program_of_a_checkout_is_main_py_or_the_command_that_was_typed(argv0: str, name: str, typed: str) -> None:
    command = [sys.executable, str(ROOT / "main.py")]
    assert names_of(ROOT, argv0) == [name, str(ROOT), str(ROOT / "configs"), command, typed]


def test_command_to_type_outside_the_checkout_has_the_path_of_main_py(tmp_path: Path) -> None:
    assert names_of(ROOT, "main.py", tmp_path)[-1] == f"py {ROOT}/main.py"


@pytest.mark.parametrize("argv0", ["apex-jax", "-m"])
def test_installed_program_is_the_command_with_the_configurations_in_the_package(argv0: str, tmp_path: Path) -> None:
    (tmp_path / "apex_jax" / "host").mkdir(parents=True)
    for module in ("__init__.py", "host/__init__.py", "host/program.py", "host/errors.py"):
        shutil.copy(ROOT / "apex_jax" / module, tmp_path / "apex_jax" / module)
    (tmp_path / "main.py").write_text("raise SystemExit('of somebody else')")
    name, checkout, configs, command, typed = names_of(tmp_path, argv0)
    assert (name, checkout, typed) == ("apex-jax", "None", "apex-jax")
    assert configs == str(tmp_path / "apex_jax" / "configs")
    # With -P, no file of the working directory stands in for a module.
    assert command == [sys.executable, "-P", "-m", "apex_jax"]
