"""`python main.py storage push RUN URL` and `storage pull URL RUN`: a run to object storage and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apex_jax.config_rules import STORAGE_URL, is_storage_url
from apex_jax.errors import Parser, RunError, UsageError, shown
from apex_jax.storage import SECTIONS, Copied, Storage, files_of, newest_local_checkpoint

MEANINGS = {"run": "run directory, such as runs/Pong-v5-1", "url": "place of the copy: s3://bucket/prefix, or a folder"}


def run(arguments: Sequence[str]) -> int:
    """Copies what `arguments` (after "storage") say; returns the exit code. UsageError, StorageError."""
    options = _parser().parse_args(arguments)
    if not is_storage_url(options.url):
        raise UsageError(f"storage: URL {shown(options.url) or repr('')}: {STORAGE_URL}")
    if options.action == "push":
        push(Path(options.run), Storage(options.url))
    else:
        pull(Storage(options.url), Path(options.run))
    return 0


def push(run_directory: Path, storage: Storage) -> None:
    """Brings the copy of a run up to date."""
    if newest_local_checkpoint(run_directory) is None:
        raise UsageError(f"{shown(run_directory)}: holds no checkpoint; give the directory of a run")
    for section in SECTIONS:
        if files_of(section, run_directory):
            _say(section, storage.push(section, run_directory))


def pull(storage: Storage, run_directory: Path) -> None:
    """Fetches a run into a directory that holds none."""
    if newest_local_checkpoint(run_directory) is not None or files_of("replay", run_directory):
        raise UsageError(f"{shown(run_directory)}: holds a run already; give another directory")
    fetched = False
    for section in SECTIONS:
        copied = storage.pull(section, run_directory)
        if copied is not None:
            fetched = True
            _say(section, copied)
    if not fetched:
        raise RunError(f"{storage.url}: there is no copy of a run; check the URL")


def _say(section: str, copied: Copied) -> None:
    print(f"{section}: {copied.files} files, {copied.transferred_bytes / 1e6:,.1f} MB transferred")


def _parser() -> Parser:
    parser = Parser(
        prog="python main.py storage",
        description="Copies a run to object storage, or back. Only what is new is transferred. Credentials and"
        " endpoint come from boto's usual places (AWS_PROFILE, AWS_ENDPOINT_URL, the machine's role).",
        epilog="example: python main.py storage push runs/Pong-v5-1 s3://bucket/pong",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, parser_class=Parser, metavar="push | pull")
    for action, order in (("push", ("run", "url")), ("pull", ("url", "run"))):
        sub = actions.add_parser(action, allow_abbrev=False, help=f"{action} {' '.join(order).upper()}")
        for name in order:
            sub.add_argument(name, metavar=name.upper(), help=MEANINGS[name])
    return parser
