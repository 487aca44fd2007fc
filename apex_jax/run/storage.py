"""A copy of a run on S3 or in a folder, from which another machine can continue the run.

    <url>/<section>/run_identity    the run that the section belongs to
    <url>/<section>/<path>          each other file, under its path in the run directory

The learner and the replay server write their own section. Each push checks run and progress of what is there, uploads
the files that have changed, and then deletes those that the run directory no longer has. Files that others rely on come
first: the logs of a replay before its snapshots, the files of a checkpoint before its checksums. A push that breaks off
therefore leaves either the checkpoint or snapshot before, or the new one with all that it needs.

A file has changed if its size differs from that of the copy, or if it was modified after its upload, by the clocks of
this machine and of the storage. The copy adds no checksums: each checkpoint, snapshot and record of a log has its own,
and a start passes over what is damaged.

A changed file is uploaded whole: sending only its new end would save too few bytes to justify the code. Checkpoints,
snapshots and all replay logs except the newest never change. A log is closed at 32 MiB; a learner's metrics and
TensorBoard files grow by about 25 MB a day, so it takes days until they are larger than the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from apex_jax.host.disk import atomic_write, open_regular, set_damaged_aside
from apex_jax.host.errors import RunError, first_line, short_repr
from apex_jax.host.program import installing
from apex_jax.run.checkpoint_files import is_sound, sound_steps
from apex_jax.run.identity import FILE_NAME, MAX_FILE_BYTES, RunIdentity

BLOCK_BYTES = 2**24  # read from a file at once
TIMEOUTS = {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 2}}  # of boto

Section: TypeAlias = str  # one of SECTIONS
SECTIONS: tuple[Section, ...] = ("learner", "replay")
FOLDERS = {"checkpoints", "metrics", "tensorboard", "logs", "replay", "best"}
COPIED = {  # patterns of paths; files with other names, such as keys and locks, are not copied
    "learner": r"config[.]yaml|interface[.]json|(changes|starts|evaluations)[.]jsonl|(curves|plot)[.]png"
    r"|video[.](mp4|gif)|best/(config[.]yaml|model[.]safetensors)"
    r"|checkpoints/[0-9]{1,18}/.+|metrics/\w[\w.-]*[.]jsonl|tensorboard/\w[\w.-]*/\w[\w.-]*|logs/\w[\w.-]*[.]log",
    "replay": r"replay/(journal[.]json|segments-[0-9]{20}[.]log|snapshot-[0-9]+)",
}
PROGRESS = {  # progress in paths: updates of a whole checkpoint; first event of a replay log, also of one set aside
    "learner": r"checkpoints/([0-9]{1,18})/checksums[.]json",
    "replay": r"replay/(?:(?:damaged-)?segments-([0-9]{20})[.]log.*|snapshot-[0-9]+)",
}
RELIES_ON_OTHERS = re.compile(r".*/(checksums[.]json|snapshot-[0-9]+)")


class Copied(NamedTuple):
    """A file of the copy."""

    num_bytes: int
    seconds: float  # time of its upload since the epoch


class Copy(NamedTuple):
    """What the copy of a section holds."""

    identity: str  # of the run, see `apex_jax.run.identity`; empty = not known at the time
    files: dict[str, Copied]  # by their path in the run directory


class StorageError(RunError):
    """The copy of a run cannot be written or read; the message names the place and the reason."""


class Storage:
    """Copies run directories to and from one URL. Not thread-safe."""

    def __init__(self, url: str):
        """`url`: on S3, or a folder. Raises StorageError."""
        self.url = url
        with self._errors():
            import fsspec  # not at the top: a run without a copy need not load it

            self._is_s3 = url.startswith("s3://")
            options = {"config_kwargs": TIMEOUTS, "use_listings_cache": False} if self._is_s3 else {"auto_mkdir": True}
            self._files, root = fsspec.core.url_to_fs(url, **options)
        self._root = root.rstrip("/")

    def copy(self, section: Section) -> Copy:
        """Returns what the copy of a section holds. Raises StorageError, also if the bucket does not exist."""
        with self._errors():
            found = self._files.find(self._root, prefix=f"{section}/", detail=True)  # S3 lists only the section
            root = self._place(section)
            files = {place[len(root) :]: info for place, info in found.items() if place.startswith(root)}
            identity = ""
            if FILE_NAME in files:
                identity = self._files.cat_file(root + FILE_NAME, start=0, end=MAX_FILE_BYTES).decode(errors="replace")
            names = [name for name in files if re.fullmatch(COPIED[section], name) and ".." not in name.split("/")]
            return Copy(identity, {name: _copied(files[name]) for name in names})

    def push(self, section: Section, run_directory: Path) -> int | None:
        """Updates the copy of a section; returns the bytes that were uploaded, None if there is nothing to copy.

        Raises RunError.
        """
        with self._errors():
            if not (paths := files_of(section, run_directory)):  # an existing copy is kept
                return None
            copy = self.copy(section)
            identity = RunIdentity(str(run_directory)).name
            self._check(section, copy, identity, run_directory)
            if identity != copy.identity:
                self._write(self._place(section) + FILE_NAME, io.BytesIO(identity.encode()), len(identity))
            num_bytes, newest = 0, progress_of(section, dict(paths))
            for name, path in paths:
                try:
                    num_bytes += self._upload(section, name, path, copy.files.get(name))
                except FileNotFoundError:  # the learner or replay server has deleted an old file meanwhile
                    if progress_of(section, [name]) == newest:
                        what = f"{run_directory} changes faster than it can be copied"
                        raise StorageError(f"{self.url}: {what}; make checkpoints less often") from None
            for name in sorted(copy.files.keys() - dict(paths).keys(), key=_order, reverse=True):
                with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                    self._files.rm_file(self._place(section) + name)
            return num_bytes

    def _check(self, section: Section, copy: Copy, identity: str, run_directory: Path) -> None:
        """Raises StorageError if the copy belongs to another run, or is ahead of this one."""
        if copy.identity not in ("", identity):
            what = f"the {section} of another run than {run_directory}"
            raise StorageError(f"{self.url} holds {what}: choose another URL")
        remote, local = progress_of(section, copy.files), local_progress(section, run_directory)
        if remote is not None and (local is None or remote > local):
            what = f"a checkpoint at {remote} updates" if section == "learner" else f"a replay up to event {remote}"
            here = "none" if local is None else f"one at {local}"
            raise StorageError(f"{self.url} holds {what}, {run_directory} {here}: choose another URL")

    def _upload(self, section: Section, name: str, path: Path, copied: Copied | None) -> int:
        """Uploads a file unless the copy has it already; returns the bytes uploaded. Raises OSError."""
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            status = os.fstat(file.fileno())
            if copied is not None and copied.num_bytes == status.st_size and copied.seconds > status.st_mtime:
                return 0
            self._write(self._place(section) + name, file, status.st_size)
            return status.st_size

    def _write(self, place: str, file: IO[bytes], num_bytes: int) -> None:
        """Uploads the beginning of a file; the next push uploads bytes that are appended meanwhile."""
        with contextlib.ExitStack() as opened:
            if self._is_s3:  # which shows a file once it is whole
                target = opened.enter_context(self._files.open(place, "wb", block_size=BLOCK_BYTES))
            else:
                Path(place).parent.mkdir(parents=True, exist_ok=True)
                target = opened.enter_context(open(opened.enter_context(atomic_write(Path(place))), "xb"))
            while data := file.read(min(BLOCK_BYTES, num_bytes)):
                target.write(data)
                num_bytes -= len(data)

    def pull(
        self, section: Section, run_directory: Path, is_cancelled: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Fetches a section into a run directory that lacks it; returns its size in bytes.

        Returns None if there is no copy, or if cancelled. Files are moved to their places only after all of them have
        been fetched. Raises RunError, also if a run that goes on deletes one of the files meanwhile.
        """
        with self._errors():
            arriving, copy = run_directory / f".fetching-{section}", self.copy(section)
            if not copy.files or not self._fetch(section, copy.files, arriving, is_cancelled):
                return None
            # The identity comes before the files: without it, they could be taken for those of another run.
            RunIdentity(str(run_directory)).adopt(copy.identity, f"the copy on {self.url}")
            _install(arriving, run_directory)
            return sum(file.num_bytes for file in copy.files.values())

    def _fetch(
        self, section: Section, files: dict[str, Copied], arriving: Path, is_cancelled: Callable[[], bool]
    ) -> bool:
        """Fetches files into the folder `arriving`; returns False if cancelled."""
        shutil.rmtree(arriving, ignore_errors=True)
        for name, (num_bytes, _) in files.items():
            (arriving / name).parent.mkdir(parents=True, exist_ok=True)
            with open(arriving / name, "xb") as file:
                for start in range(0, num_bytes, BLOCK_BYTES):
                    if is_cancelled():
                        return False
                    end = min(start + BLOCK_BYTES, num_bytes)
                    file.write(self._files.cat_file(self._place(section) + name, start=start, end=end))
        return True

    def _place(self, section: Section) -> str:
        return f"{self._root}/{section}/"

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors of the network, the disk and libraries into StorageErrors of one line."""
        try:
            yield
        except RunError:
            raise
        except ImportError:
            raise StorageError(f"{self.url}: needs `{installing('storage')}`") from None
        except Exception as error:
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
            fix = "make room, or choose another place" if is_full else "check the URL, its permissions and the network"
            raise StorageError(f"{self.url}: {short_repr(first_line(error))}; {fix}") from error


def files_of(section: Section, run_directory: Path) -> list[tuple[str, Path]]:
    """Returns (relative path, path) of a section's files in the order of their upload. Raises StorageError.

    Damaged checkpoints after the newest sound one are left out: they must not replace a sound copy.
    """
    found = []
    for folder, folders, names in os.walk(run_directory):  # it does not follow links
        if folder == str(run_directory):
            folders[:] = FOLDERS.intersection(folders)
            if links := [name for name in folders if Path(folder, name).is_symlink()]:
                raise StorageError(f"{folder}/{links[0]} is a link, which no copy follows: link {folder} instead")
        elif section == "learner" and folder == str(run_directory / "checkpoints"):
            folders[:] = map(str, sound_steps(Path(folder)))
        for path in (Path(folder, name) for name in names):
            relative = path.relative_to(run_directory).as_posix()
            if re.fullmatch(COPIED[section], relative) and path.is_file() and not path.is_symlink():
                found.append((relative, path))
    return sorted(found, key=lambda item: _order(item[0]))


def progress_of(section: Section, names: Iterable[str]) -> int | None:
    """Returns the progress that file names show: updates of the newest checkpoint, or first event of the newest log."""
    return max((int(match[1] or 0) for name in names if (match := re.fullmatch(PROGRESS[section], name))), default=None)


def local_progress(section: Section, run_directory: Path) -> int | None:
    """Returns the progress of a run directory, up to its newest sound checkpoint; None if it lacks the section."""
    if section == "learner":
        return max(sound_steps(run_directory / "checkpoints"), default=None)
    return progress_of(section, (path.relative_to(run_directory).as_posix() for path in run_directory.glob("*/*")))


def _order(name: str) -> tuple[bool, str]:
    """Sorts the names of files into the order of their upload; they are deleted in the opposite one."""
    return bool(RELIES_ON_OTHERS.fullmatch(name)), name


def _copied(info: dict[str, Any]) -> Copied:
    return Copied(info["size"], info["mtime"] if "mtime" in info else info["LastModified"].timestamp())


def _install(arriving: Path, run_directory: Path) -> None:
    """Moves fetched files to their places, checkpoints and the replay last and as whole folders; existing files stay.

    A damaged checkpoint of the same name is set aside; a sound one stays, because it has the same progress. Raises
    StorageError if another folder is in the way.
    """
    folders = {*arriving.glob("checkpoints/*"), *arriving.glob("replay")}
    files = [path for path in arriving.rglob("*") if path.is_file() and not folders.intersection(path.parents)]
    for unit in [*sorted(files), *sorted(folders)]:
        place = run_directory / unit.relative_to(arriving)
        place.parent.mkdir(parents=True, exist_ok=True)
        if unit in folders and place.is_dir() and {path.name for path in place.iterdir()} <= {"lock"}:
            for path in place.iterdir():  # a lock, which another process may hold
                os.replace(path, unit / path.name)
            place.rmdir()
        elif place.parent.name == "checkpoints" and place.is_dir() and not is_sound(place):
            set_damaged_aside(place)
        if not place.exists():
            os.rename(unit, place)
        elif place.is_dir() and place.parent.name != "checkpoints":
            raise StorageError(f"{place} is in the way of the fetched files; move it away")
    shutil.rmtree(arriving, ignore_errors=True)
