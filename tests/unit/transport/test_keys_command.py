"""The command keys tells where each file goes, and refuses arguments that it does not know."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from apex_jax.host.errors import RunError, UsageError
from apex_jax.transport import keys, keys_command
from tests.rigs.processes import Programs


def test_command_prints_in_three_lines_where_each_file_goes(programs: Programs, tmp_path: Path) -> None:
    first = programs.start("keys", "create", str(tmp_path / "keys"))
    assert (first.exit_code(), first.stderr) == (0, "")
    assert len(first.stdout.splitlines()) == 3
    assert "<role>.secret only to the hosts of that role" in first.stdout
    second = programs.start("keys", "create", str(tmp_path / "keys"))
    assert (second.exit_code(), second.stdout) == (2, "")
    assert second.stderr == (
        f"error: {tmp_path}/keys: Directory not empty; nothing is overwritten: give a folder that does not exist\n"
    )


@pytest.mark.parametrize("arguments", [[], ["create"], ["make", "x"], ["create", "x", "--secret=y"]])
def test_unknown_command_is_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="keys --help"):
        keys_command.run(arguments)


def test_disk_error_is_one_line_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "keys"))

    monkeypatch.setattr(keys_command, "create", fail)
    with pytest.raises(RunError, match=rf"^{tmp_path}/keys: No space left on device; choose another folder$"):
        keys_command.run(["create", str(tmp_path / "keys")])


def test_created_keys_can_be_read_and_the_output_names_every_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys_command.run(["create", str(tmp_path / "keys")]) == 0
    out = capsys.readouterr().out
    for role in keys.ROLES:
        assert role in out
        secret = keys.read_secret(str(tmp_path / "keys"), role)
        assert secret.decode() not in out
        keys.check_pair(str(tmp_path / "keys"), role, secret)
