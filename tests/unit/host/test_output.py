"""Output on a full disk does not end a run; a closed pipe ends a program, without a traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from apex_jax.run.metrics import read_metrics
from tests.rigs.processes import ROOT, catch

MAIN = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'main.py'))}"


def shell(command: str, seconds: float = 60.0) -> tuple[int, str]:
    """Runs a command of bash, pipes included; returns the exit code of its first part, and standard error."""
    line = f"{command}; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, env=environment, timeout=seconds)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("command", "code"), [
    ("--help >&-", 0), ("--print-config | head -0", 141), ("--help | head -0", 141), ("--print-config >&- 2>&-", 0),
    ("nonsense <&- >&-", 2), ("--print-config >/dev/full 2>/dev/full", 1),
])  # fmt: skip
def test_command_whose_output_is_lost_prints_no_traceback(command: str, code: int) -> None:
    found, errors = shell(f"{MAIN} {command}")
    assert found == code
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize(("output", "expected"), [(">/dev/full 2>/dev/full", 0), ("| head -1 >/dev/null", 141)])
def test_run_trains_to_its_end_on_a_full_disk_and_ends_quietly_at_a_closed_pipe(
    tmp_path: Path, output: str, expected: int
) -> None:
    arguments = shlex.join(catch(tmp_path / "run", "total_updates=200"))
    code, errors = shell(f"{MAIN} {arguments} {output}", seconds=150.0)
    assert code == expected, errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    if not expected:
        assert read_metrics(tmp_path / "run" / "metrics" / "evaluator.jsonl")[-1]["eval/updates"] == 200


def test_text_is_written_again_once_the_disk_has_room(tmp_path: Path) -> None:
    """A log of a role on a full disk: what is written once there is room arrives."""
    script = (
        "import os, resource, signal, sys\n"
        "from apex_jax.host.output import outlast_full_disk\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "outlast_full_disk()\n"
        "os.dup2(full := os.open('/dev/full', os.O_WRONLY), 1)\n"
        "print('lost for now', flush=True)\n"
        f"os.dup2(os.open({str(tmp_path / 'log')!r}, os.O_WRONLY | os.O_CREAT), 1)\n"
        "print('there is room', flush=True)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=30)
    assert (tmp_path / "log").read_text().endswith("there is room\n")
