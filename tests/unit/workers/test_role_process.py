"""The process of a role: what its log says of its end, also if there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from apex_jax.workers import role_process
from apex_jax.workers.role_process import LOG_TAIL_LINES, RoleProcess


@pytest.mark.parametrize(
    ("last_line", "code", "error"),
    [
        ("error: no room", 1, "error: no room"),
        ("fatal: no room", 3, "fatal: no room"),
        ("error: no room", 0, ""),
        ("Segmentation fault", 1, ""),
    ],
)
def test_error_of_a_role_is_the_last_line_of_its_log_if_its_exit_code_fits(
    last_line: str, code: int, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"import sys; print(*range(20), {last_line!r}, sep='\\n'); sys.exit({code})"
    monkeypatch.setattr(role_process, "COMMAND", [sys.executable, "-c", program])
    role = RoleProcess("actor", "actor-0", tmp_path / "actor-0.log")
    role.start([])
    assert role.process is not None
    role.process.wait(30)
    assert role.exit_code() == code
    assert role.said_error() == error
    assert role.log_tail().splitlines() == [f"  {line}" for line in [*range(20 - LOG_TAIL_LINES + 1, 20), last_line]]
    role.log_path.unlink()  # by a user
    assert (role.said_error(), role.log_tail()) == ("", "")
    role.close_pipe()
