"""The commands `storage push RUN URL` and `storage pull URL RUN`: copy a run to object storage and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apex_jax.config.rules import requirement_of_storage_url
from apex_jax.host.argument_parser import Parser
from apex_jax.host.errors import RunError, UsageError, short_repr
from apex_jax.host.program import NAME
from apex_jax.run.storage import SECTIONS, Storage, local_progress

MEANINGS = {"run": "run directory, such as runs/Pong-v5-1", "url": "place of the copy: s3://bucket/prefix, or a folder"}


def run(arguments: Sequence[str]) -> int:
    """Runs the command; `arguments`: after "storage". Returns the exit code. Raises UsageError, RunError."""
    options = _parser().parse_args(arguments)
    if requirement := requirement_of_storage_url(options.url):
        raise UsageError(f"storage: URL {short_repr(options.url) or repr('')}: {requirement}")
    directory, storage = Path(options.run), Storage(options.url)
    held = [section for section in SECTIONS if local_progress(section, directory) is not None]
    if options.action == "push" and "learner" not in held:
        raise UsageError(f"{short_repr(directory)}: holds no checkpoint; give the directory of a run")
    if options.action == "pull" and held:
        raise UsageError(f"{short_repr(directory)}: holds a run already; give another directory")
    copy = storage.push if options.action == "push" else storage.pull
    found = False
    for section in SECTIONS:
        if (num_bytes := copy(section, directory)) is not None:
            print(f"{section}: {num_bytes / 1e6:,.1f} MB transferred")
            found = True
    if not found:
        raise RunError(f"{storage.url}: there is no copy of a run; check the URL")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "storage",
        description="Copies a run to object storage, or back. Only what is new is transferred. Credentials and"
        " endpoint come from boto's usual places (AWS_PROFILE, AWS_ENDPOINT_URL, the machine's role).",
        epilog=f"example: {NAME} storage push runs/Pong-v5-1 s3://bucket/pong",
    )
    actions = parser.add_subparsers(dest="action", required=True, parser_class=Parser, metavar="push | pull")
    for action, order in (("push", ("run", "url")), ("pull", ("url", "run"))):
        sub = actions.add_parser(action, help=f"{action} {' '.join(order).upper()}")
        for name in order:
            sub.add_argument(name, metavar=name.upper(), help=MEANINGS[name])
    return parser
