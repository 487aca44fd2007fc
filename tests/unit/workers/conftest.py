"""Fixtures that several files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from apex_jax.config import AddressConfig, Config
from apex_jax.config.load import load
from apex_jax.transport.sockets import LocalLinks
from tests.rigs.processes import ROOT


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    links = LocalLinks()
    addresses = AddressConfig(links.experience, links.sampling, links.weights)
    yield load(ROOT / "configs" / "catch.yaml").replace(addresses=addresses, run_directory=str(tmp_path))
    links.close()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.term()
