"""A copy of a run on S3 or in a folder, from which another machine can continue the run.

    <url>/<section>/files/<name>     one file of the run, whole; its name is random, and never reused
    <url>/<section>/manifest.json    the file of each path in the run directory; written last, so a copy is complete

The learner and each replay server write their own section; two processes may safely write the same one. Each push
reads the manifest, checks run and progress, and replaces the manifest only if no other process has replaced it since
(S3: If-Match; a folder: a lock and a rename); otherwise it starts again. The new manifest names only files that the
old one named or that this push uploaded. The push then deletes files that neither of the two names, so that a process
may be fetching those of the old one; and only files that it listed before it replaced the manifest: a process that
uploaded one of them, but has not named it yet, will fail to replace the manifest.

A changed file is uploaded whole: sending only its new end would save too few bytes to justify the code. Checkpoints,
snapshots and all replay logs except the newest never change. A log is closed at 32 MiB; a learner's metrics and
TensorBoard files grow by about 25 MB a day, so it takes days until they are larger than the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from apex_jax.host.disk import open_regular, read_regular, set_damaged_aside, synchronize, write_durably
from apex_jax.host.errors import RunError, first_line, short_repr
from apex_jax.run.checkpoint_files import is_sound, sound_steps
from apex_jax.run.identity import RunIdentity, is_identity

FORMAT = 3
BLOCK_BYTES = 2**24  # read from a file at once
MAX_MANIFEST_BYTES = 2**26  # about 400,000 files
MAX_FILE_BYTES = 2**42
ATTEMPTS = 3  # of a push or pull, if other processes change files or manifest meanwhile
TIMEOUTS = {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 2}}  # of boto

Section: TypeAlias = str  # "learner", or the name of a replay server, which is also that of its folder in the run
SERVERS = ("replay",)
SECTIONS: tuple[Section, ...] = ("learner", *SERVERS)
FOLDERS = {"checkpoints", "metrics", "tensorboard", "logs", "replay", "best"}  # and the folder with the section's name
COPIED = {  # patterns of paths; files with other names, such as keys and locks, are not copied
    "learner": r"run_identity|config[.]yaml|interface[.]json|(changes|starts|evaluations)[.]jsonl|(curves|plot)[.]png"
    r"|video[.](mp4|gif)|best/(config[.]yaml|interface[.]json|evaluation[.]json|params-[0-9]+)"
    r"|checkpoints/[0-9]{1,18}/.+|metrics/\w[\w.-]*[.]jsonl|tensorboard/\w[\w.-]*/\w[\w.-]*|logs/\w[\w.-]*[.]log",
    **{server: server + r"/(segments-[0-9]{20}-[0-9]{6}[.]log|snapshot-[0-9]+)" for server in SERVERS},
}
PROGRESS = {  # progress in paths: updates of a checkpoint; first event of a replay log, also of one set aside
    "learner": r"checkpoints/([0-9]{1,18})/.+",
    **{server: server + r"/(?:(?:damaged-)?segments-([0-9]{20})-.+|snapshot-[0-9]+)" for server in SERVERS},
}


class Stored(NamedTuple):
    """A stored file of the run."""

    name: str  # 32 hexadecimal digits
    size: int  # bytes
    sha256: str  # in hexadecimal


Files: TypeAlias = dict[str, Stored]  # by their path in the run directory
State: TypeAlias = tuple[str, int, int, int]  # of a local file: path, inode, bytes, time of change in nanoseconds


class Manifest(NamedTuple):
    """The content of the copy of a section."""

    identity: str  # of the run, see `apex_jax.run.identity`; empty = not known at the time
    files: Files
    version: str | bytes  # of the manifest: its ETag on S3, its bytes in a folder; empty = no copy


class StorageError(RunError):
    """The copy of a run cannot be written or read; the message names the place and the reason."""


class _Conflict(Exception):
    """Another process has replaced the manifest since this one read it."""


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
        self._uploaded: dict[State, Stored] = {}  # the files of this run that the copy has

    def manifest(self, section: Section) -> Manifest:
        """Returns the checked manifest of a section, an empty one if there is none. Raises StorageError."""
        place = f"{self._root}/{section}/manifest.json"
        with self._errors():
            try:
                version = self._files.info(place).get("ETag")  # before the content, so that it is never the newer one
                data = self._files.cat_file(place, start=0, end=MAX_MANIFEST_BYTES + 1)
            except FileNotFoundError as error:
                if _s3_code(error) == "NoSuchBucket":  # a misspelt name must not start a new run
                    what = f"{self.url}: there is no such bucket"
                    raise StorageError(f"{what}; make it, or correct storage.url") from None
                return Manifest("", {}, "")
        try:
            record = json.loads(data)
            if record["format"] != FORMAT:
                found = f"{section}/manifest.json has format {short_repr(str(record['format']))}"
                what = f"{found}, this release reads {FORMAT}"
                raise StorageError(f"{self.url}: {what}; use the release that wrote it, or choose another URL")
            return Manifest(*_checked(section, record), version or data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise StorageError(f"{self.url}: {section}/manifest.json is damaged; restore it, or remove it") from None

    def push(self, section: Section, run_directory: Path) -> int | None:
        """Updates the copy of a section; returns the bytes that were added, None if there is nothing to copy.

        Raises RunError; the previous copy then stays valid.
        """
        with self._errors():
            for _ in range(ATTEMPTS):
                # FileNotFoundError: the learner or replay server has deleted an old file meanwhile.
                with contextlib.suppress(_Conflict, FileNotFoundError):
                    return self._push(section, run_directory)
            what = f"the {section} of {run_directory}, or its copy, changes faster than it can be copied"
            raise StorageError(f"{self.url}: {what}; end other processes that write there")

    def _push(self, section: Section, run_directory: Path) -> int | None:
        if not (paths := files_of(section, run_directory)):  # an existing copy is kept
            return None
        known = self.manifest(section)
        identity = RunIdentity(str(run_directory)).name
        self._check(section, known, identity, run_directory)
        listed = self._listed(section)
        self._uploaded = {state: stored for state, stored in self._uploaded.items() if stored.name in listed}
        present = {path: file for path, file in known.files.items() if file.name in listed}
        files = {name: self._copy(section, path, present.get(name)) for name, path in paths}
        if (identity, files) != (known.identity, known.files):
            self.write_manifest(section, Manifest(identity, files, known.version))
            named = {file.name for file in (*files.values(), *known.files.values())}
            for name in listed.keys() - named:
                with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                    self._files.rm_file(listed[name])
        return sum(file.size for name, file in files.items() if file != present.get(name))

    def _check(self, section: Section, known: Manifest, identity: str, run_directory: Path) -> None:
        """Raises StorageError if the copy belongs to another run, or is ahead of this one."""
        if known.identity not in ("", identity):
            what = f"the {section} of another run than {run_directory}"
            raise StorageError(f"{self.url} holds {what}: choose another URL")
        remote, local = progress_of(section, known.files), local_progress(section, run_directory)
        if remote is not None and (local is None or remote > local):
            what = f"a checkpoint at {remote} updates" if section == "learner" else f"a replay up to event {remote}"
            here = "none" if local is None else f"one at {local}"
            raise StorageError(f"{self.url} holds {what}, {run_directory} {here}: choose another URL")

    def _copy(self, section: Section, path: Path, present: Stored | None) -> Stored:
        """Returns the stored file; uploads it unless the copy has it already."""
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            status = os.fstat(file.fileno())
            state = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
            if state not in self._uploaded:
                is_present = present is not None and hashlib.file_digest(file, "sha256").hexdigest() == present.sha256
                file.seek(0)
                stored = present if present is not None and is_present else self._write(section, file, status.st_size)
                self._uploaded[state] = stored
            return self._uploaded[state]

    def _write(self, section: Section, file: IO[bytes], size: int) -> Stored:
        """Uploads `size` bytes of a file under a new name; the next push uploads bytes that are appended meanwhile."""
        name, digest, left = secrets.token_hex(16), hashlib.sha256(), size
        with self._files.open(self._place(section, name), "wb", block_size=BLOCK_BYTES) as copy:
            while data := file.read(min(BLOCK_BYTES, left)):
                copy.write(data)
                digest.update(data)
                left -= len(data)
        if not self._is_s3:
            synchronize(Path(self._place(section, name)))
        return Stored(name, size - left, digest.hexdigest())

    def write_manifest(self, section: Section, manifest: Manifest) -> None:
        """Replaces the manifest. Raises _Conflict if its version is no longer `manifest.version`."""
        text = json.dumps({"format": FORMAT, "identity": manifest.identity, "files": manifest.files})
        place = f"{self._root}/{section}/manifest.json"
        if not self._is_s3:
            _replace(Path(place), text, manifest.version)
            return
        condition = {"IfMatch": manifest.version} if manifest.version else {"IfNoneMatch": "*"}
        try:
            self._files.pipe_file(place, text.encode(), **condition)
        except OSError as error:
            if _s3_code(error) not in ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"):
                raise
            raise _Conflict from None

    def _listed(self, section: Section) -> dict[str, str]:
        """Returns the place of each stored file by its name, even if no manifest names the file."""
        try:
            places = self._files.ls(self._place(section), detail=False)
        except FileNotFoundError:
            return {}
        return {place.rpartition("/")[2]: place for place in places}

    def pull(
        self, section: Section, run_directory: Path, is_cancelled: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Fetches a section into a run directory that lacks it; returns its size in bytes.

        Returns None if there is no copy, or if cancelled. Files are moved to their places only after all of them have
        been fetched and verified. Raises RunError.
        """
        with self._errors():
            arriving = run_directory / f".fetching-{section}"
            for attempt in range(1, ATTEMPTS + 1):
                manifest = self.manifest(section)
                try:
                    if not manifest.files or not self._fetch(section, manifest.files, arriving, is_cancelled):
                        return None
                    break
                except FileNotFoundError:  # a run that goes on has replaced the file
                    if attempt == ATTEMPTS:
                        raise
            # The identity comes before the files: without it, they could be taken for those of another run.
            RunIdentity(str(run_directory)).adopt(manifest.identity, f"the copy on {self.url}")
            _install(arriving, run_directory)
            return sum(file.size for file in manifest.files.values())

    def _fetch(self, section: Section, files: Files, arriving: Path, is_cancelled: Callable[[], bool]) -> bool:
        """Fetches files into the folder `arriving`; returns False if cancelled."""
        shutil.rmtree(arriving, ignore_errors=True)
        for name, stored in files.items():
            (arriving / name).parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with open(arriving / name, "xb") as file:
                for start in range(0, stored.size, BLOCK_BYTES):
                    if is_cancelled():
                        return False
                    end = min(start + BLOCK_BYTES, stored.size)
                    data = self._files.cat_file(self._place(section, stored.name), start=start, end=end)
                    if not data:  # the file is shorter than `stored`
                        break
                    digest.update(data)
                    file.write(data)
                if (file.tell(), digest.hexdigest()) != (stored.size, stored.sha256):
                    raise StorageError(
                        f"{self.url}: the copy of {short_repr(name)} is damaged; restore it, or remove it"
                    )
        return True

    def _place(self, section: Section, name: str = "") -> str:
        return f"{self._root}/{section}/files/{name}"

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors of the network, the disk and libraries into StorageErrors of one line."""
        try:
            yield
        except (RunError, _Conflict):
            raise
        except Exception as error:
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
            fix = "make room, or choose another place" if is_full else "check the URL, its permissions and the network"
            raise StorageError(f"{self.url}: {short_repr(first_line(error))}; {fix}") from error


def files_of(section: Section, run_directory: Path) -> list[tuple[str, Path]]:
    """Returns (relative path, path) of a section's files, logs after the snapshots that need them. Raises StorageError.

    Damaged checkpoints after the newest sound one are left out: they must not replace a sound copy.
    """
    found = []
    for folder, folders, names in os.walk(run_directory):  # it does not follow links
        if folder == str(run_directory):
            folders[:] = {*FOLDERS, section}.intersection(folders)
            if links := [name for name in folders if Path(folder, name).is_symlink()]:
                raise StorageError(f"{folder}/{links[0]} is a link, which no copy follows: link {folder} instead")
        elif section == "learner" and folder == str(run_directory / "checkpoints"):
            folders[:] = map(str, sound_steps(Path(folder)))
        for path in (Path(folder, name) for name in names):
            relative = path.relative_to(run_directory).as_posix()
            if re.fullmatch(COPIED[section], relative) and path.is_file() and not path.is_symlink():
                found.append((relative, path))
    return sorted(found, key=lambda item: (item[0].endswith(".log"), item[0]))


def progress_of(section: Section, names: Iterable[str]) -> int | None:
    """Returns the progress that file names show: updates of the newest checkpoint, or first event of the newest log."""
    return max((int(match[1] or 0) for name in names if (match := re.fullmatch(PROGRESS[section], name))), default=None)


def local_progress(section: Section, run_directory: Path) -> int | None:
    """Returns the progress of a run directory, up to its newest sound checkpoint; None if it lacks the section."""
    if section == "learner":
        return max(sound_steps(run_directory / "checkpoints"), default=None)
    return progress_of(section, (path.relative_to(run_directory).as_posix() for path in run_directory.glob("*/*")))


def _replace(path: Path, text: str, version: str | bytes) -> None:
    """Writes a manifest into a folder. Raises _Conflict if the current one is not `version`."""
    synchronize(path.with_name("files"))  # the names of its files
    with open(open_regular(path.with_name("lock"), os.O_WRONLY | os.O_CREAT), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held only for the lines below
        if (read_regular(path) if path.exists() else "") != version:
            raise _Conflict
        write_durably(path, text)


def _install(arriving: Path, run_directory: Path) -> None:
    """Moves fetched files to their places, checkpoints and the replay last and as whole folders; existing files stay.

    A damaged checkpoint of the same name is set aside; a sound one stays, because it has the same progress. Raises
    StorageError if another folder is in the way.
    """
    folders = {*arriving.glob("checkpoints/*"), *arriving.glob("replay*")}
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


def _checked(section: Section, record: dict[str, Any]) -> tuple[str, Files]:
    """Returns identity and files of a manifest. Raises various exceptions if it is invalid."""
    if record["identity"] != "" and not is_identity(record["identity"]):
        raise ValueError("no identity of a run")
    files = {path: Stored(*file) for path, file in record["files"].items()}
    for path, (name, size, sha256) in files.items():
        if not re.fullmatch(COPIED[section], path) or ".." in path.split("/") or "\0" in path:
            raise ValueError("a path that no copy has")
        if not re.fullmatch("[0-9a-f]{32}", name) or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError("a name or a checksum that was never given")
        if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
            raise ValueError("a file that no disk holds")
    return record["identity"], files


def _s3_code(error: OSError) -> str:
    """Returns the code of the S3 response that caused an error; empty if there is none."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
