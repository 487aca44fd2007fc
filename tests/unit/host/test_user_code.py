"""Specification of the import of the user's code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from apex_jax.host.errors import UsageError
from apex_jax.host.user_code import imported_names, look_in


def test_module_is_found_where_its_run_was_started_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "of_a_run.py").write_text("def make(): ...")
    (tmp_path / "not_asked_for.py").write_text("raise SystemExit")
    with pytest.raises(UsageError, match="there is no module of_a_run"):
        imported_names("algorithm.name", "of_a_run:make")
    look_in(str(tmp_path))
    assert importlib.util.find_spec("not_asked_for") is None, "as a library would import it"
    [make] = imported_names("algorithm.name", "of_a_run:make")
    assert make() is None


def test_folder_of_a_run_is_forgotten_when_that_of_another_run_is_given(tmp_path: Path) -> None:
    (tmp_path / "of_a_stranger.py").write_text("raise SystemExit")
    look_in(str(tmp_path))
    look_in()
    with pytest.raises(UsageError, match="there is no module of_a_stranger"):
        imported_names("algorithm.name", "of_a_stranger:make")
