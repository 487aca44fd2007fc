"""Damage of a checkpoint's files is found by their checksums."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.run.checkpoint_files import CHECKSUMS, sound_steps, write_checksums


@pytest.mark.parametrize("checksums", [None, b"", b"[1]", b"{}", b'{"files": 1}', b'{"files": {"x": [1, 2]}}'])
def test_newest_damaged_checkpoints_are_not_sound(tmp_path: Path, checksums: bytes | None) -> None:
    for updates in (100, 200, 300):
        (tmp_path / str(updates)).mkdir()
        (tmp_path / str(updates) / "x").write_bytes(b"x")
        write_checksums(tmp_path / str(updates))
    assert sound_steps(tmp_path) == [100, 200, 300]
    for updates in (100, 300):
        path = tmp_path / str(updates) / CHECKSUMS
        path.unlink() if checksums is None else path.write_bytes(checksums)
    assert sound_steps(tmp_path) == [100, 200], "only up to the newest sound one are they read"
