"""Files and arguments of a user, and the one-line answer to a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.config.command_line import parse
from apex_jax.host.errors import UsageError


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def message(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    text = str(caught.value)
    assert text.isprintable(), "an error is one line"
    assert len(text) < 500
    return text
