"""Keys are created as private files, and files that hold no keys are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from apex_jax.host.errors import UsageError
from apex_jax.transport import keys
from tests.rigs.keys import directory

__all__ = ["directory"]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_each_role_gets_a_key_pair_with_a_private_secret(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        keys.create(tmp_path / "keys")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "keys") == 0o700
    assert len(list((tmp_path / "keys").iterdir())) == 2 * len(keys.ROLES)
    publics = set()
    for role in keys.ROLES:
        secret, [public] = (
            keys.read_secret(str(tmp_path / "keys"), role),
            keys.read_publics(str(tmp_path / "keys"), role),
        )
        assert zmq.curve_public(secret) == public
        assert mode_of(tmp_path / "keys" / f"{role}.secret") == 0o600
        assert mode_of(tmp_path / "keys" / f"{role}.public") == 0o644
        publics.add(public)
    assert len(publics) == len(keys.ROLES)


def test_no_key_is_ever_overwritten(directory: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(UsageError, match="nothing is overwritten"):
        keys.create(directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert [path.name for path in directory.parent.iterdir()] == ["keys"]


def test_incomplete_set_of_keys_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = iter([zmq.curve_keypair(), zmq.curve_keypair()])
    monkeypatch.setattr("apex_jax.transport.keys.zmq.curve_keypair", lambda: next(pairs))
    with pytest.raises(StopIteration):
        keys.create(tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []


def test_secret_readable_by_others_is_refused_with_the_fixing_command(directory: Path) -> None:
    secret = directory / "actor.secret"
    for mode in (0o640, 0o604, 0o620):
        secret.chmod(mode)
        with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600 {secret}"):
            keys.read_secret(str(directory), "actor")
    secret.chmod(0o400)
    assert keys.read_secret(str(directory), "actor")


@pytest.mark.parametrize("text", [b"", b"\n", b"short\n", b"'" * 40, b"#" * 40, b"\xff" * 40, b"a" * 41, bytes(40)])
def test_invalid_key_is_refused_without_showing_a_secret(directory: Path, text: bytes) -> None:
    (directory / "actor.public").write_bytes(text)
    (directory / "actor.secret").write_bytes(text)
    with pytest.raises(UsageError, match=r"actor\.public: .*40 Z85 characters"):
        keys.read_publics(str(directory), "actor")
    with pytest.raises(UsageError, match=r"actor\.secret: holds no secret key; .*40 Z85 characters") as caught:
        keys.read_secret(str(directory), "actor")
    assert not text.strip() or repr(text.decode(errors="replace")) not in str(caught.value)


def test_keys_are_not_created_in_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        keys.create(tmp_path / "no" / "keys")
