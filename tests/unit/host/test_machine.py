"""Packages of versions that were not tried are named with the version found and those needed."""

from __future__ import annotations

from apex_jax.host import machine


def test_packages_of_this_environment_were_tried() -> None:
    assert machine.untried_packages() == []
