"""What a person sees in a real terminal while the live view is up: one panel, and the log lines above it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from tests.rigs.processes import ROOT

COLUMNS = 100
LOGS_A_WARNING = """
import logging, sys
from apex_jax.operations.live_view import LiveView
from apex_jax.host.output import outlast_lost_output
from apex_jax.process import start_log
from tests.rigs.live_views import config, progress
outlast_lost_output()
start_log("local")
with LiveView(config(), sys.stdout) as view:
    view.update(progress())
    logging.getLogger("apex_jax").warning("learner ended with exit code -9: starting it again in 1 s, see LOG")
    view.update(progress())
"""


def written_to_terminal(script: str, stderr: Path | None = None) -> str:
    """Returns what a Python script writes to its terminal; its standard error goes to that file instead, if given."""
    ours, terminal = pty.openpty()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": "40"}
    errors = os.open(stderr, os.O_WRONLY | os.O_CREAT) if stderr else os.dup(terminal)
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stdin=terminal, stdout=terminal, stderr=errors
    )
    os.close(terminal)
    os.close(errors)
    written = b""
    try:
        while block := os.read(ours, 65536):
            written += block
    except OSError:  # nobody has the terminal open any more
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0, written
    return written.decode()


def screen(written: str) -> list[str]:
    """Returns the lines that are on a screen of COLUMNS columns after this text, for the few codes that rich uses."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|.|\n", written, re.DOTALL):
        if token == "\x1b[1A":
            row = max(0, row - 1)
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token == "\r":
            column = 0
        elif token == "\n" or (not token.startswith("\x1b") and column == COLUMNS):
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        if not token.startswith("\x1b") and token not in "\r\n":
            lines[row] = f"{lines[row]:<{column}}"[:column] + token + lines[row][column + 1 :]
            column += 1
    return lines


def test_log_line_stays_above_the_panel_in_a_terminal() -> None:
    lines = screen(written_to_terminal(LOGS_A_WARNING))
    [panel] = [row for row, line in enumerate(lines) if line.startswith("╭─ Pong-v5: learning")]
    [warning] = [row for row, line in enumerate(lines) if "learner ended with exit code -9" in line]
    assert warning < panel
    assert [line for line in lines[panel:] if "WARNING" in line] == []


def test_log_line_goes_to_the_file_to_which_standard_error_was_redirected(tmp_path: Path) -> None:
    on_screen = written_to_terminal(LOGS_A_WARNING, stderr=tmp_path / "errors")
    assert "learner ended with exit code -9" in (tmp_path / "errors").read_text()
    assert "learner ended with exit code -9" not in on_screen
