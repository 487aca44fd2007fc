"""Frames become an .mp4 and a .gif of their end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from apex_jax.host.errors import UsageError
from apex_jax.plotting.video import GIF_SECONDS, video_paths, video_writer
from tests.rigs.recordings import RATE


def test_gif_shows_the_end_of_a_long_game(tmp_path: Path) -> None:
    with video_writer(tmp_path / "game.gif", RATE) as add:
        for i in range(int(GIF_SECONDS * RATE) + 200):
            add(np.full((8, 8, 3), i % 256, np.uint8))
    with Image.open(tmp_path / "game.gif") as image:
        frames = getattr(image, "n_frames", 1)
        image.seek(frames - 1)
        last = np.asarray(image.convert("RGB"))[0, 0]
    assert frames == GIF_SECONDS * RATE / 2
    assert abs(int(last[0]) - (int(GIF_SECONDS * RATE) + 199) % 256) <= 4


def test_error_while_recording_leaves_no_half_files(tmp_path: Path) -> None:
    def fail() -> None:
        with video_writer(tmp_path / "game", RATE) as add:
            add(np.zeros((20, 20, 3), np.uint8))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/game.mp4", "there is no folder .*nowhere; make it"),
        ("game.avi", "videos are written as .mp4 and .gif"),
    ],
)
def test_unwritable_video_is_reported_before_a_game_is_played(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        video_paths(tmp_path / name)
