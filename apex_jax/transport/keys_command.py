"""`python main.py keys`: the key pairs of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apex_jax.host.argument_parser import Parser
from apex_jax.host.errors import RunError, short_repr
from apex_jax.host.program import NAME
from apex_jax.transport.keys import ROLES, create


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
