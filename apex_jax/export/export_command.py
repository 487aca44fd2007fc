"""The command export: a trained policy as a folder for the Hugging Face hub, for JAX and ONNX without this package."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from apex_jax.config.load import parse_overrides
from apex_jax.host.errors import RunError, UsageError, short_repr
from apex_jax.host.program import NAME, Parser

CODE = ("algorithm.name", "network.name")  # keys whose values may name code


def run(arguments: Sequence[str]) -> int:
    """Runs the command; `arguments`: after "export". Returns the exit code. Raises UsageError, RunError."""
    options = _parser().parse_args(arguments)
    folder = Path(options.folder)
    _check_folder(folder)
    os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU rounds more coarsely than the check allows
    from apex_jax.export.folder import write_files  # imported here: JAX, after its device has been chosen

    half = folder.with_name(f".{folder.name}.half")
    shutil.rmtree(half, ignore_errors=True)  # left by a killed process
    try:
        half.mkdir()
        notes = write_files(half, options.run, options.updates, _code_of(options.code))
        os.rename(half, folder)  # replaces an empty folder
    except OSError as error:
        raise RunError(f"{error.filename or folder}: {error.strerror or error}; give another folder") from None
    finally:
        shutil.rmtree(half, ignore_errors=True)
    print("\n".join([f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}", *notes]))
    return 0


def _code_of(texts: Sequence[str]) -> dict[str, str]:
    """Returns the settings by key. Raises UsageError for one that names no code."""
    given = parse_overrides(texts, "")
    if others := given.keys() - set(CODE):
        raise UsageError(f"export: {min(others)} is given; only {', '.join(CODE)} can be; see {NAME} export --help")
    return given


def _check_folder(folder: Path) -> None:
    """Raises UsageError if the folder cannot be made, or is not empty."""
    if not folder.name:
        raise UsageError(f"export: {short_repr(folder)} has no name; give a new folder, such as hub/pong")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"export: {short_repr(folder)} is not empty; give a new folder")
    if not folder.is_dir() and os.path.lexists(folder):
        raise UsageError(f"export: {short_repr(folder)} is no folder; give a new one")
    if not folder.parent.is_dir():
        raise UsageError(f"export: there is no folder {short_repr(folder.parent)}; make it, or give another one")


def _parser() -> Parser:
    parser = Parser(
        "export",
        description="Writes the trained policy of a run as a folder for the Hugging Face hub: model card, safetensors,"
        " StableHLO and ONNX, each checked against the policy.",
        epilog=f"example: {NAME} export runs/Pong-v5-1 pong; then: hf upload USER/pong pong",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, such as runs/Pong-v5-1, or its best/")
    parser.add_argument("folder", metavar="FOLDER", help="folder to write, new or empty")
    what = "number of updates of a checkpoint in RUN/checkpoints (default: the newest undamaged one)"
    parser.add_argument("--updates", type=int, metavar="N", help=what)
    what = f"{', '.join(CODE)} of the run, if it is code of your own, which is then imported"
    parser.add_argument("code", metavar="KEY=VALUE", nargs="*", help=what)
    return parser
