"""Writes frames to a video (H.264 in .mp4), an animation (.gif), or both."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from apex_jax.host.disk import atomic_write
from apex_jax.host.errors import RunError, UsageError, first_line, short_repr
from apex_jax.host.program import installing

ENLARGED = 2  # an Atari frame of 160 x 210 pixels is small on a modern display
LARGE_PIXELS = 300  # height from which a frame is not enlarged in a video, but halved in an animation
GIF_SECONDS = 30.0  # of the end of the game; a whole game would be many megabytes
GIF_EVERY = 2  # every second frame is kept


@contextlib.contextmanager
def video_writer(path: str | os.PathLike[str], frames_per_second: Fraction) -> Iterator[Callable[[np.ndarray], None]]:
    """Yields a function that appends a frame, uint8[height, width, 3], all of one size.

    The files exist once the context has ended without an error. `path` ends in .mp4 or .gif; without an ending, both
    are written beside each other. Raises UsageError, see `video_paths`, and RunError if the video cannot be encoded.
    """
    with contextlib.ExitStack() as files:
        encoders = [
            files.enter_context(ENCODERS[file.suffix](files.enter_context(atomic_write(file)), frames_per_second))
            for file in video_paths(path)
        ]

        def add(frame: np.ndarray) -> None:
            for encode in encoders:
                encode(frame)

        yield add


def video_of_run(name: str, run_directory: str | os.PathLike[str]) -> str:
    """Returns the path of a video; a name without a folder is a file in the run directory."""
    return name if os.path.dirname(name) else os.path.join(run_directory, name)


def video_paths(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the files that `video_writer` writes for this path.

    Raises UsageError for another ending, a missing folder, and .mp4 without its encoder.
    """
    path = Path(path)
    if not path.name or path.is_dir():
        raise UsageError(f"{short_repr(path)}: is a folder; name a file in it, such as {short_repr(path / 'game.mp4')}")
    if not path.parent.is_dir():
        raise UsageError(
            f"{short_repr(path)}: there is no folder {short_repr(path.parent)}; make it, or name another file"
        )
    encoders = set(ENCODERS) if importlib.util.find_spec("av") else {".gif"}
    if path.suffix in encoders:
        return [path]
    if path.suffix in ENCODERS:
        raise UsageError(f"{short_repr(path)}: needs `{installing('video')}`; run it, or end the name in .gif")
    if path.suffix:
        raise UsageError(
            f"{short_repr(path)}: videos are written as {' and '.join(ENCODERS)}; end the name so, or in nothing"
        )
    return [path.with_suffix(suffix) for suffix in ENCODERS if suffix in encoders]


@contextlib.contextmanager
def _mp4(path: Path, frames_per_second: Fraction) -> Iterator[Callable[[np.ndarray], None]]:
    import av  # not at the top: an extra

    @contextlib.contextmanager
    def errors_in_a_line() -> Iterator[None]:
        try:
            yield
        except av.FFmpegError as error:
            raise RunError(first_line(error)) from error

    with errors_in_a_line(), av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=frames_per_second, options={"crf": "20"})
        stream.pix_fmt = "yuv420p"  # the format that browsers play

        @errors_in_a_line()
        def encode(frame: np.ndarray) -> None:
            factor = ENLARGED if len(frame) < LARGE_PIXELS else 1
            enlarged = frame.repeat(factor, axis=0).repeat(factor, axis=1)
            odd = [(0, side % 2) for side in enlarged.shape[:2]]  # H.264 has none in this format
            enlarged = np.pad(enlarged, (*odd, (0, 0)), mode="edge") if any(map(any, odd)) else enlarged
            if not stream.codec_context.is_open:
                stream.height, stream.width = enlarged.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(enlarged, "rgb24")))

        yield encode
        container.mux(stream.encode())


@contextlib.contextmanager
def _gif(path: Path, frames_per_second: Fraction) -> Iterator[Callable[[np.ndarray], None]]:
    kept: deque[np.ndarray] = deque(maxlen=int(GIF_SECONDS * frames_per_second))
    yield lambda frame: kept.append(frame if len(frame) < LARGE_PIXELS else frame[::2, ::2].copy())
    pictures = [Image.fromarray(frame).quantize(64) for frame in list(kept)[::-GIF_EVERY]][::-1]
    milliseconds = round(1000 * GIF_EVERY / frames_per_second)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0)


ENCODERS = {".mp4": _mp4, ".gif": _gif}  # by file name extension
