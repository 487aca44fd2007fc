"""Creates a fleet's CURVE keys and writes them to Parameter Store, from which its hosts fetch them at boot.

    python -m deploy.push_keys FLEET              creates them; fails if some exist
    python -m deploy.push_keys FLEET --rotate     replaces them by new ones (deploy/terraform/README.md)
    python -m deploy.push_keys FLEET --delete     removes them

The keys pass through a temporary folder that only this user can read, and are never in Terraform's state.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("actor", "replay", "learner", "evaluator")
FILES = tuple(f"{role}.{kind}" for role in ROLES for kind in ("secret", "public"))


def main() -> int:
    """Returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    arguments = _parse()
    if not re.fullmatch(r"[a-z][a-z0-9-]{1,19}", arguments.fleet):
        return _fail(f"FLEET is {arguments.fleet!r}: give the fleet's `name`, 2 to 20 of a-z, 0-9 and '-'", 2)
    path = f"/apex-jax/{arguments.fleet}/keys"
    try:
        from deploy.host.aws import client

        store = client("ssm", arguments.region)
        there = _names(store, path)
        if arguments.delete:
            return _delete(store, path, there)
        if there and not arguments.rotate:
            return _fail(f"{path} has keys already: the fleet may be using them; --rotate replaces them", 1)
        return _push(store, path)
    except ImportError:
        return _fail("botocore is missing: make fleet-tools, then . .venv/bin/activate", 1)
    except Exception as error:  # a network or AWS error, such as missing credentials or permissions
        return _fail(str(error), 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.push_keys", description="Makes a fleet's CURVE keys and puts them into Parameter Store."
    )
    parser.add_argument("fleet", metavar="FLEET", help="the fleet's `name` in Terraform, such as apex-jax")
    parser.add_argument("--region", help="AWS region; without it, that of the AWS configuration")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--rotate", action="store_true", help="replace the keys that are there")
    action.add_argument("--delete", action="store_true", help="remove the keys")
    return parser.parse_args()


def _names(store: Any, path: str) -> list[str]:
    pages = store.get_paginator("get_parameters_by_path").paginate(Path=path)
    return [parameter["Name"] for page in pages for parameter in page["Parameters"]]


def _delete(store: Any, path: str, names: list[str]) -> int:
    for start in range(0, len(names), 10):  # the maximum per call
        store.delete_parameters(Names=names[start : start + 10])
    print(f"{path}: {len(names)} keys removed")
    return 0


def _push(store: Any, path: str) -> int:
    memory = "/dev/shm"  # keeps the keys off the disk, if it exists
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        keys = Path(folder, "keys")
        command = [sys.executable, str(ROOT / "main.py"), "keys", "create", str(keys)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            return _fail(made.stderr.strip().removeprefix("error: ") or f"{' '.join(command)} failed", 1)
        for file in FILES:
            kind = "SecureString" if file.endswith(".secret") else "String"
            store.put_parameter(Name=f"{path}/{file}", Value=(keys / file).read_text(), Type=kind, Overwrite=True)
    print(f"{path}: {len(FILES)} keys")
    return 0


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
