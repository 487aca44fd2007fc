"""Keys are created as private files, files that hold no keys are refused, and a command says where each file goes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import zmq

from apex_jax.host.errors import RunError, UsageError
from apex_jax.transport import keys, keys_command
from tests.rigs.keys import directory
from tests.rigs.processes import Programs

__all__ = ["directory"]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_each_role_gets_a_key_pair_with_a_private_secret(
    tmp_path: Path, umask: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    before = os.umask(umask)
    try:
        assert keys_command.run(["create", str(folder)]) == 0
    finally:
        os.umask(before)
    printed = capsys.readouterr().out
    assert mode_of(folder) == 0o700
    assert len(list(folder.iterdir())) == 2 * len(keys.ROLES)
    publics = set()
    for role in keys.ROLES:
        secret, [public] = keys.read_secret(str(folder), role), keys.read_publics(str(folder), role)
        assert zmq.curve_public(secret) == public
        assert mode_of(folder / f"{role}.secret") == 0o600
        assert mode_of(folder / f"{role}.public") == 0o644
        assert role in printed
        assert secret.decode() not in printed
        publics.add(public)
    assert len(publics) == len(keys.ROLES)


def test_no_key_is_ever_overwritten(directory: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(UsageError, match="nothing is overwritten"):
        keys.create(directory)
    with pytest.raises(UsageError, match="No such file or directory"):
        keys.create(directory.parent / "no" / "keys")
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert [path.name for path in directory.parent.iterdir()] == ["keys"]


def test_secret_readable_by_others_is_refused_with_the_fixing_command(directory: Path) -> None:
    secret = directory / "actor.secret"
    for mode in (0o640, 0o604, 0o620):
        secret.chmod(mode)
        with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600 {secret}"):
            keys.read_secret(str(directory), "actor")
    secret.chmod(0o400)
    assert keys.read_secret(str(directory), "actor")


@pytest.mark.parametrize("text", [b"", b"short\n", b"'" * 40, b"#" * 40, b"\xff" * 40, b"a" * 41, bytes(40)])
def test_invalid_key_is_refused_without_showing_a_secret(directory: Path, text: bytes) -> None:
    (directory / "actor.public").write_bytes(text)
    (directory / "actor.secret").write_bytes(text)
    with pytest.raises(UsageError, match=r"actor\.public: .*40 Z85 characters"):
        keys.read_publics(str(directory), "actor")
    with pytest.raises(UsageError, match=r"actor\.secret: .*40 Z85 characters") as caught:
        keys.read_secret(str(directory), "actor")
    assert not text.strip() or repr(text.decode(errors="replace")) not in str(caught.value)


def test_command_prints_where_each_file_goes_or_one_line_of_error(programs: Programs, tmp_path: Path) -> None:
    first = programs.start("keys", "create", str(tmp_path / "keys"))
    assert (first.exit_code(), first.stderr, first.stdout.count("\n")) == (0, "", 3)
    second = programs.start("keys", "create", str(tmp_path / "keys"))
    assert (second.exit_code(), second.stdout, second.stderr.count("\n")) == (2, "", 1)
    assert second.stderr.startswith(f"error: {tmp_path}/keys: ")


@pytest.mark.parametrize("arguments", [[], ["create"], ["make", "x"], ["create", "x", "--secret=y"]])
def test_unknown_command_is_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="keys --help"):
        keys_command.run(arguments)


def test_disk_error_is_one_line_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "keys"))

    monkeypatch.setattr(keys_command, "create", fail)
    with pytest.raises(RunError, match=f"{tmp_path}/keys: No space left on device"):
        keys_command.run(["create", str(tmp_path / "keys")])
