"""A file that is looked at while it is made anew is always a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.plotting.files import written_whole


def test_reader_sees_the_old_file_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    path.write_text("before")
    with written_whole(path) as half:
        half.write_text("ne")
        assert path.read_text() == "before"
        assert half.suffix == ".png", "writers choose their format by the ending"
        half.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_writer_leaves_the_old_file_and_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    path.write_text("before")

    def fail() -> None:
        with written_whole(path) as half:
            half.write_text("half")
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
