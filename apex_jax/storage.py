"""A copy of a run on object storage, from which another machine goes on.

    <url>/<section>/pieces/<sha256>    parts of files, named by what they hold, never changed
    <url>/<section>/manifest.json      which pieces make up which file; written last, so that a copy is whole

A file that has grown costs only what is new of it. Learner and replay server each write a section of their own.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from apex_jax.disk import open_regular, read_regular, write_durably
from apex_jax.errors import RunError, first_line, shown

FORMAT = 1
PIECE_BYTES = 2**24
MERGE_BYTES = 2**22  # a last piece smaller than this is copied again when its file grows, or files became very many
MAX_MANIFEST_BYTES = 2**28
MAX_FILE_BYTES = 2**42
ATTEMPTS = 3  # at a set of files that changes while it is read
TIMEOUTS = {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 2}}  # of boto
NEVER_COPIED = {"lock"}
NAME = "[0-9a-f]{32}"  # of a copy
IDENTITY = ".copy-of-{}"  # file of a run directory: what its copy of a section is called, so that none replaces another

Section: TypeAlias = Literal["learner", "replay"]
SECTIONS: tuple[Section, ...] = ("learner", "replay")


class Piece(NamedTuple):
    """Part of a file."""

    digest: str  # sha256 of its bytes, in hexadecimal
    size: int  # bytes


Files: TypeAlias = dict[str, list[Piece]]  # by their path in the run directory


class Copied(NamedTuple):
    """What a copy came to."""

    files: int
    transferred_bytes: int


class StorageError(RunError):
    """The copy of a run cannot be written or read; the message says where and why."""


class Cancelled(Exception):
    """The process is to stop; what was fetched so far is in nobody's way."""


class Storage:
    """Copies run directories to and from one URL; for one thread at a time."""

    def __init__(self, url: str):
        """Raises StorageError where no installed package serves such URLs."""
        self.url = url
        try:
            import fsspec  # not at the top: a run without a copy does not pay for it

            is_s3 = url.startswith("s3://")
            options = {"config_kwargs": TIMEOUTS, "use_listings_cache": False} if is_s3 else {}
            self._files, root = fsspec.core.url_to_fs(url, **options)
        except Exception as error:  # ImportError, ValueError, and what each package raises of its own
            raise self._error(error) from None
        self._root = root.rstrip("/")
        self._is_local = "file" in self._files.protocol
        self._known: dict[str, Files] = {}  # by section, what its manifest names
        self._identities: dict[str, str] = {}  # by section, as its manifest says
        self._copied: dict[
            str, tuple[tuple[int, int, int], list[Piece]]
        ] = {}  # by path: inode, size, time; and as what

    def push(self, section: Section, run_directory: Path) -> Copied:
        """Brings the copy of a section up to date. StorageError; the copy before it then still stands."""
        try:
            return self._push(section, run_directory)
        except StorageError:
            raise
        except Exception as error:  # whatever the network and the packages in between come up with
            self._known.pop(section, None)
            raise self._error(error) from error

    def pull(
        self, section: Section, run_directory: Path, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Copied | None:
        """Fetches a section into a run directory that lacks it; None where there is no copy. StorageError, Cancelled.

        Nothing is in its place before all of it has come and was found to be what was copied.
        """
        try:
            for _ in range(ATTEMPTS):
                if (files := self._manifest(section)) is None:
                    return None
                try:
                    return self._pull(section, files, run_directory, is_cancelled)
                except FileNotFoundError:  # another copy was finished meanwhile
                    continue
            raise StorageError(f"{self.url}: its {section} changes faster than it can be fetched, or is incomplete")
        except (StorageError, Cancelled):
            raise
        except Exception as error:
            raise self._error(error) from error

    def newest_checkpoint(self) -> int | None:
        """Returns the updates behind the newest checkpoint of the copy; None where there is none. StorageError."""
        try:
            files = self._manifest("learner") or {}
        except StorageError:
            raise
        except Exception as error:
            raise self._error(error) from error
        return _progress_of("learner", files)

    def is_copy_of(self, section: Section, run_directory: Path) -> bool:
        """Tells whether the copy, as last read, is that of this directory, or of one that was fetched from it."""
        name = self._identities.get(section, "")
        return bool(name) and name == _identity(section, run_directory)

    def _push(self, section: Section, run_directory: Path) -> Copied:
        known = self._known.get(section)
        if known is None:
            known = self._manifest(section) or {}
            self._delete_unnamed(section, known)
        self._check(section, known, run_directory)
        present = {piece.digest for pieces in known.values() for piece in pieces}
        transferred = 0
        for _ in range(ATTEMPTS):
            files: Files = {}
            try:
                for name, path in files_of(section, run_directory):
                    files[name], new_bytes = self._copy(section, path, known.get(name, []), present)
                    transferred += new_bytes
            except FileNotFoundError:  # a checkpoint that made room for a newer one
                continue
            if files.keys() <= {name for name, _ in files_of(section, run_directory)}:
                break
        else:
            raise StorageError(f"{run_directory}: its {section} changes faster than it can be copied to {self.url}")
        if not files:
            return Copied(0, 0)
        if files != known:
            self._write_manifest(section, files, _identity(section, run_directory))
        self._known[section] = files
        named = {piece.digest for pieces in files.values() for piece in pieces}
        self._delete(section, present - named)
        return Copied(len(files), transferred)

    def _check(self, section: Section, known: Files, run_directory: Path) -> None:
        """Raises StorageError where the copy is of another run, or is within what is copied."""
        if self._identities.get(section, "") not in ("", _identity(section, run_directory)):
            raise StorageError(
                f"{self.url} holds the {section} of another run than {run_directory}: choose another URL"
            )
        what = "a checkpoint at {} updates" if section == "learner" else "a replay up to event {}"
        remote, local = _progress_of(section, known), local_progress(section, run_directory)
        is_nothing = section == "replay" and not files_of(section, run_directory)  # which does not empty the copy
        if remote is not None and not is_nothing and (local is None or remote > local):
            here = "none" if local is None else f"one at {local}"
            raise StorageError(f"{self.url} holds {what.format(remote)}, {run_directory} {here}: choose another URL")
        if self._is_local and Path(self._root).resolve().is_relative_to(run_directory.resolve()):
            raise StorageError(f"{self.url} lies inside {run_directory}, which it would copy: choose another place")

    def _copy(self, section: str, path: Path, known: list[Piece], present: set[str]) -> tuple[list[Piece], int]:
        """Copies what is new of a file; returns its pieces, and how many bytes were new."""
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            seen_before, pieces = self._copied.get(str(path), (None, []))
            if seen_before == seen and all(piece.digest in present for piece in pieces):
                return pieces, 0
            pieces = _still_there(file, known, status.st_size)
            offset, transferred = sum(piece.size for piece in pieces), 0
            file.seek(offset)
            while offset < status.st_size and (data := file.read(min(PIECE_BYTES, status.st_size - offset))):
                piece = Piece(hashlib.sha256(data).hexdigest(), len(data))
                if piece.digest not in present:
                    self._write(f"{section}/pieces/{piece.digest}", data)
                    present.add(piece.digest)
                    transferred += len(data)
                pieces.append(piece)
                offset += len(data)
        self._copied[str(path)] = (seen, pieces)
        return pieces, transferred

    def _pull(self, section: Section, files: Files, run_directory: Path, is_cancelled: Callable[[], bool]) -> Copied:
        arriving = run_directory / f".fetching-{section}"
        if arriving.is_symlink():  # which rmtree would leave
            arriving.unlink()
        shutil.rmtree(arriving, ignore_errors=True)
        transferred = 0
        for name, pieces in files.items():
            path = arriving / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                for piece in pieces:
                    if is_cancelled():
                        raise Cancelled
                    place = f"{self._root}/{section}/pieces/{piece.digest}"
                    data = self._files.cat_file(place, start=0, end=piece.size + 1)
                    if len(data) != piece.size or hashlib.sha256(data).hexdigest() != piece.digest:
                        raise StorageError(f"{self.url}: a piece of {shown(name)} is damaged; restore it, or remove it")
                    file.write(data)
                    transferred += len(data)
        if identity := self._identities.get(section):  # before there is anything that would be another run's without it
            write_durably(run_directory / IDENTITY.format(section), identity)
        _install(arriving, run_directory)
        return Copied(len(files), transferred)

    def _manifest(self, section: Section) -> Files | None:
        """Returns the checked manifest; None where there is none."""
        try:
            place = f"{self._root}/{section}/manifest.json"
            data = self._files.cat_file(place, start=0, end=MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError as error:
            if _is_about_the_bucket(error):
                raise StorageError(f"{self.url}: there is no such bucket; make it, or correct storage.url") from None
            return None
        try:
            files, self._identities[section] = _parsed_manifest(section, data)
            return files
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise StorageError(f"{self.url}: {section}/manifest.json is damaged; restore it, or remove it") from None

    def _write_manifest(self, section: Section, files: Files, identity: str) -> None:
        text = json.dumps(files)
        manifest = {"format": FORMAT, "identity": identity, "files": text, "crc": zlib.crc32(text.encode())}
        self._write(f"{section}/manifest.json", json.dumps(manifest).encode())
        self._identities[section] = identity

    def _write(self, name: str, data: bytes) -> None:
        """Writes an object whole or not at all."""
        place = f"{self._root}/{name}"
        if not self._is_local:
            self._files.pipe_file(place, data)
            return
        half = f"{place}.half"
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(half).write_bytes(data)
        os.replace(half, place)

    def _delete_unnamed(self, section: Section, known: Files) -> None:
        """Deletes what a copy that was broken off has left."""
        named = {piece.digest for pieces in known.values() for piece in pieces}
        try:
            places = self._files.ls(f"{self._root}/{section}/pieces", detail=False)
        except FileNotFoundError:
            return
        self._delete(section, {place.rpartition("/")[2] for place in places} - named - {""})

    def _delete(self, section: Section, names: set[str]) -> None:
        for name in names:
            self._files.rm_file(f"{self._root}/{section}/pieces/{name}")

    def _error(self, error: Exception) -> StorageError:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        fix = "make room, or choose another place" if is_full else "check the URL, its permissions and the network"
        return StorageError(f"{self.url}: {shown(first_line(error))}; {fix}")


def files_of(section: Section, run_directory: Path) -> list[tuple[str, Path]]:
    """Returns the files of a section by their path in the run directory; logs come after what they complete."""
    top = run_directory / "replay" if section == "replay" else run_directory
    found = []
    for folder, folders, names in os.walk(top):
        relative = Path(folder).relative_to(run_directory)
        depth = len(relative.parts)
        folders[:] = sorted(name for name in folders if _is_copied(section, depth, name))
        for name in names:
            path = Path(folder, name)
            if _is_copied(section, depth, name) and not path.is_symlink() and path.is_file():
                found.append(((relative / name).as_posix(), path))
    return sorted(found, key=lambda item: (item[0].endswith(".log"), item[0]))


def newest_local_checkpoint(run_directory: Path) -> int | None:
    """Returns the updates behind the newest checkpoint of a run directory, the damaged ones included."""
    names = [path.name for path in (run_directory / "checkpoints").glob("*")]
    steps = [int(match[1]) for name in names if (match := re.fullmatch("(?:damaged-)?([0-9]{1,18})(?:-[0-9]+)?", name))]
    return max(steps, default=None)


def local_progress(section: Section, run_directory: Path) -> int | None:
    """Returns how far a section is: updates of the newest checkpoint, or the event at which the newest log begins."""
    if section == "learner":
        return newest_local_checkpoint(run_directory)
    return _progress_of(section, [name for name, _ in files_of(section, run_directory)])


def _identity(section: Section, run_directory: Path) -> str:
    """Returns the name that this directory's copy has; a directory that was never copied gets one. StorageError."""
    path = run_directory / IDENTITY.format(section)
    name = read_regular(path).decode(errors="replace") if os.path.lexists(path) else ""
    if not name:  # also where a power failure left nothing of it
        name = secrets.token_hex(16)
        write_durably(path, name)
    if not re.fullmatch(NAME, name):
        raise StorageError(
            f"{path} is damaged: write into it the identity that {section}/manifest.json of the copy says"
        )
    return name


def _is_copied(section: Section, depth: int, name: str) -> bool:
    is_half = (name.startswith((".", "damaged-")) and depth <= 1) or name.endswith((".tmp", ".half"))
    return not is_half and name not in NEVER_COPIED and not (section == "learner" and depth == 0 and name == "replay")


def _still_there(file: IO[bytes], known: list[Piece], size: int) -> list[Piece]:
    """Returns the leading pieces that a file still consists of, without a small last one behind which it has grown."""
    pieces = []
    for piece in known:
        data = file.read(piece.size)
        if len(data) != piece.size or hashlib.sha256(data).hexdigest() != piece.digest:
            break
        pieces.append(piece)
    if pieces and pieces[-1].size < MERGE_BYTES and sum(piece.size for piece in pieces) < size:
        pieces.pop()
    return pieces


def _install(arriving: Path, run_directory: Path) -> None:
    """Moves what has come to its place, checkpoints and the replay whole and last; what is there already stays.

    StorageError where that is a folder, unless it is a checkpoint's: that which is there is as far.
    """
    units = sorted(_units(arriving), key=lambda unit: (unit.is_dir(), unit))
    for unit in units:
        place = run_directory / unit.relative_to(arriving)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and unit.is_dir() and {path.name for path in place.iterdir()} <= NEVER_COPIED:
            for path in place.iterdir():  # a lock, which somebody may hold
                os.replace(path, unit / path.name)
            place.rmdir()
        if not place.exists():
            os.rename(unit, place)
        elif place.is_dir() and place.parent.name != "checkpoints":
            raise StorageError(f"{place} is in the way of what was fetched; move it away")
    shutil.rmtree(arriving, ignore_errors=True)


def _units(arriving: Path) -> Iterator[Path]:
    """Yields what is moved at once: the replay, each checkpoint, every other file."""
    for path in arriving.glob("*"):
        if path.name == "checkpoints":
            yield from path.glob("*")
        elif path.is_dir() and path.name != "replay":
            yield from (file for file in path.rglob("*") if file.is_file())
        else:
            yield path


def _is_about_the_bucket(error: FileNotFoundError) -> bool:
    """Tells whether S3 misses more than the object: a run must not begin afresh for a misspelt name."""
    response = getattr(error.__cause__, "response", None) or {}
    return bool(response.get("Error", {}).get("Code") == "NoSuchBucket")


def _progress_of(section: Section, names: Iterable[str]) -> int | None:
    pattern = (
        "checkpoints/([0-9]{1,18})/.+" if section == "learner" else "replay/segments-([0-9]{20})(?:-[0-9]{6})?[.]log"
    )
    return max((int(match[1]) for name in names if (match := re.fullmatch(pattern, name))), default=None)


def _parsed_manifest(section: Section, data: bytes) -> tuple[Files, str]:
    """Returns what a manifest names, and the run; raises nearly anything where it is not one of ours."""
    record: Any = json.loads(data)
    if record["format"] != FORMAT or record["crc"] != zlib.crc32(record["files"].encode()):
        raise ValueError("not what was written")
    files = {name: [Piece(*piece) for piece in pieces] for name, pieces in json.loads(record["files"]).items()}
    for name, pieces in files.items():
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name or parts[0].startswith("."):
            raise ValueError("a path that leads elsewhere")
        if (parts[0] == "replay") != (section == "replay"):
            raise ValueError("a path of another section")
        if sum(piece.size for piece in pieces) > MAX_FILE_BYTES:
            raise ValueError("a file that no disk holds")
        for digest, size in pieces:
            if not re.fullmatch("[0-9a-f]{64}", digest) or type(size) is not int or not 0 < size <= PIECE_BYTES:
                raise ValueError("a piece that cannot be")
    identity = record.get("identity", "")  # none in copies of before there were any
    if identity != "" and not re.fullmatch(NAME, identity):
        raise ValueError("a name that was never given")
    return files, identity
