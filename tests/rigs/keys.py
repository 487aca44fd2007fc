"""A directory of keys, as the command `keys create` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.transport import keys


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A new pair of keys for each role."""
    keys.create(tmp_path / "keys")
    return tmp_path / "keys"
