"""CURVE keys of the roles: created once, kept in files or environment variables, checked before any connection.

The command `keys create` writes a directory of keys, with two files of Z85 text for each role:

    <role>.secret   one key, readable by its owner only; only the hosts of that role need it
    <role>.public   one key per line: servers accept all of them, clients expect the first one of a server

The environment variables APEX_JAX_<ROLE>_SECRET and APEX_JAX_<ROLE>_PUBLIC take precedence over the files.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import zmq
from zmq.utils import z85

from apex_jax.host.disk import write_durably
from apex_jax.host.errors import RunError, UsageError, short_repr
from apex_jax.host.program import NAME, Parser

ROLES = ("replay", "learner", "actor", "evaluator")
KEY_CHARACTERS = 40  # 32 bytes in Z85


def create(directory: Path) -> None:
    """Writes a key pair for each role to a new directory. Raises UsageError, OSError."""
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        fix = "nothing is overwritten: give a new folder in one that exists"
        raise UsageError(f"{short_repr(directory)}: {error.strerror}; {fix}") from None
    for role in ROLES:
        public, secret = zmq.curve_keypair()
        _write(directory / f"{role}.secret", secret, 0o600)
        _write(directory / f"{role}.public", public, 0o644)


def read_secret(directory: str, role: str) -> bytes:
    """Returns the role's secret key as Z85. Raises UsageError."""
    where, text = _read(directory, role, "secret")
    keys = text.split()
    if len(keys) != 1 or not _is_key(keys[0]):  # the error must not contain a secret with a typo
        raise UsageError(f"{where}: holds no secret key; it must be one line of {KEY_CHARACTERS} Z85 characters")
    return keys[0]


def read_publics(directory: str, role: str) -> tuple[bytes, ...]:
    """Returns the role's public keys as Z85, at least one; clients expect the first. Raises UsageError."""
    keys = read_allowed(directory, role)
    if not keys:
        where = _place(directory, role, "public")
        raise UsageError(f"{where}: holds no public key; each line must be {KEY_CHARACTERS} Z85 characters")
    return keys


def read_allowed(directory: str, role: str) -> tuple[bytes, ...]:
    """Returns the role's public keys as Z85, maybe none. Raises UsageError if the list is unreadable or malformed."""
    where, text = _read(directory, role, "public")
    keys = text.split()
    if wrong := [key for key in keys if not _is_key(key)]:
        found = f"{short_repr(wrong[0].decode(errors='replace'))} is no public key"
        raise UsageError(f"{where}: {found}; each line must be {KEY_CHARACTERS} Z85 characters")
    return tuple(keys)


def are_given(directory: str) -> bool:
    """Returns whether a directory of keys, or any key in the environment, is given."""
    return directory != "" or any(
        _variable(role, kind) in os.environ for role in ROLES for kind in ("secret", "public")
    )


def _variable(role: str, kind: str) -> str:
    return f"APEX_JAX_{role}_{kind}".upper()


def _place(directory: str, role: str, kind: str) -> str:
    """Returns the variable or path at which a key is read."""
    variable = _variable(role, kind)
    path = str(Path(directory, f"{role}.{kind}"))  # not shortened: error messages contain it in a command to copy
    return variable if variable in os.environ or not directory else path if path.isprintable() else repr(path)


def _read(directory: str, role: str, kind: str) -> tuple[str, bytes]:
    """Returns the source of a key (variable or path) and its text."""
    where, variable = _place(directory, role, kind), _variable(role, kind)
    if variable in os.environ:
        return where, os.environ[variable].encode(errors="replace")
    if not directory:
        raise UsageError(f"{variable} is not set, but other keys are: set it, or give all keys with security.keys=DIR")
    try:
        with open(Path(directory, f"{role}.{kind}"), "rb") as file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            if kind == "secret" and mode & 0o077 and not _is_of_a_volume(status):
                fix = f"run: chmod 600 {where}, or set {variable} instead"
                raise UsageError(f"{where}: mode {mode:04o} lets others read this secret; {fix}")
            return where, file.read()
    except OSError as error:
        fix = f"{NAME} keys create makes one, or set {variable}"
        raise UsageError(f"security.keys={short_repr(directory)}: {role}.{kind}: {error.strerror}; {fix}") from None


def _is_of_a_volume(status: os.stat_result) -> bool:
    """Returns whether root owns the file and only a group of this process can read it: `fsGroup` of Kubernetes."""
    is_ours = status.st_uid == 0 and status.st_gid in {os.getegid(), *os.getgroups()} - {0}
    return is_ours and not status.st_mode & 0o037


def _is_key(text: bytes) -> bool:
    if len(text) != KEY_CHARACTERS:
        return False
    try:
        z85.decode(text)
    except (KeyError, struct.error):  # not a Z85 character, or five characters that exceed 32 bits
        return False
    return True


def _write(path: Path, key: bytes, mode: int) -> None:
    write_durably(path, key, b"\n")
    path.chmod(mode)  # until then, only the owner can enter the folder


# `python main.py keys`: the key pairs of a fleet ---------------------------------------------------------------------


def run(arguments: Sequence[str]) -> int:
    """Runs the command `arguments` (those after "keys") and returns the exit code. Raises UsageError, RunError."""
    directory = Path(_parser().parse_args(arguments).directory)
    try:
        create(directory)
    except OSError as error:
        raise RunError(f"{error.filename or directory}: {error.strerror or error}; choose another folder") from None
    print(f"{short_repr(directory)}: a key pair for each of {', '.join(ROLES)}.")
    print("Copy every *.public to every host, but each <role>.secret only to the hosts of that role (scp -p).")
    print("Start each role with security.keys=DIR; whoever holds a secret is that role, so keep the rest to yourself.")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "keys",
        description="Makes the CURVE keys with which a fleet's roles encrypt their links and authenticate each other.",
        epilog=f"example: {NAME} keys create keys",
    )
    parser.add_argument("action", choices=("create",), help="makes a key pair for each role; overwrites nothing")
    parser.add_argument("directory", metavar="DIR", help="new folder for <role>.secret (0600) and <role>.public")
    return parser
