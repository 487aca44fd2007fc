"""The processes in which environments of Gymnasium run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from apex_jax.config.load import load
from apex_jax.environments.gymnasium_processes import describe
from apex_jax.environments.gymnasium_tasks import BrokenEnvironment
from tests.rigs.environments import processes_of
from tests.rigs.processes import ROOT, wait_for_the_end_of

FRAMES = ("environment.frame_stack=1", "environment.frame_skip=1")


def test_environment_is_described_in_another_process_which_closes_it_and_ends_its_processes(tmp_path: Path) -> None:
    processes, closed = tmp_path / "processes", tmp_path / "closed"
    settings = f"environment.settings={{processes: {processes}, closed: {closed}}}"
    describe(load(None, ["environment.task=gymnasium:tests.rigs.environments:Simulated", settings, *FRAMES]))
    wait_for_the_end_of(*processes_of(processes))
    [leader], _ = processes_of(processes)
    assert leader != os.getpid()
    assert closed.read_text() == f"{leader}\n"


def test_environment_that_ends_its_process_when_it_is_made_is_one_line_with_the_exit_code() -> None:
    settings = ["environment.task=gymnasium:tests.rigs.environments:Dies", "environment.settings={made: true}", *FRAMES]
    with pytest.raises(BrokenEnvironment, match="ended its process, exit code 7"):
        describe(load(None, settings))


SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
if __name__ == "__main__":
    from apex_jax.environments.gymnasium_processes import fork_server, leader
    preloaded = "import sys; print(sys.modules['apex_jax.environments.gymnasium_pool'].__file__, flush=True)"
    path = "import os; print([os.environ.get(name) for name in ('PYTHONPATH', 'PYTHONSAFEPATH')], flush=True)"
    for arguments in ({{"target": exec, "args": [preloaded]}}, {{"target": leader(exec, path)}}):
        process = fork_server().Process(**arguments)
        process.start()
        process.join()
"""


def test_fork_server_imports_the_code_of_its_parent_and_no_other_copy(tmp_path: Path) -> None:
    for folder in ("installed", "working"):
        (tmp_path / folder / "apex_jax").mkdir(parents=True)
        (tmp_path / folder / "apex_jax" / "__init__.py").write_text("raise ImportError('another copy')")
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    variables.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, str(tmp_path / "script.py")]
    printed = subprocess.check_output(command, text=True, timeout=120, cwd=tmp_path / "working", env=variables)
    pool = ROOT / "apex_jax" / "environments" / "gymnasium_pool.py"
    assert printed.splitlines() == [str(pool), str([str(tmp_path / "installed"), None])]
