"""Packages of versions that were not tried are named with the version found and those needed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from apex_jax.host import machine


def test_packages_of_this_environment_were_tried() -> None:
    assert machine.untried_packages() == []


@pytest.mark.parametrize(("line", "found", "is_tried"), [
    ("numpy>=2.4,<2.6               # everything on the host", "2.4.1", True),
    ("numpy>=2.4,<2.6", "2.6.0", False),
    ("numpy>=2.4,<2.6", "1.26.4", False),
    ("jax>=0.10.2,<0.13", "0.12.0.1", True),
    ("jax<0.13,>=0.10.2", "0.10.2.dev3+local", True),
    ("mujoco==3.6.0", "3.6.1", False),
    ("jax[cuda13]", "0.1", True),  # without a version
    ('numpy>=9; extra == "dev"', "2.4.1", True),
    ("-r requirements.txt", "", True),
])  # fmt: skip
def test_another_version_is_a_warning(
    line: str, found: str, is_tried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements.txt").write_text(line)
    monkeypatch.setattr(machine, "CHECKOUT", tmp_path)
    monkeypatch.setattr(metadata, "version", lambda name: found)
    warnings = machine.untried_packages()
    assert len(warnings) == (not is_tried)
    assert all(found in warning and line.split("#")[0].strip().lstrip("mujconpy") in warning for warning in warnings)


def test_package_that_is_missing_is_left_to_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "requirements.txt").write_text("no-such-package>=1,<2")
    monkeypatch.setattr(machine, "CHECKOUT", tmp_path)
    assert machine.untried_packages() == []
