"""Runs every test on the CPU, also where there is a GPU, and without the user's cache: results depend on neither."""

import atexit
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is imported, which is after this file

_cache = tempfile.TemporaryDirectory(prefix="apex-jax-tests-")
atexit.register(_cache.cleanup)
os.environ["XDG_CACHE_HOME"] = _cache.name  # of the processes that tests start; they share what is compiled

from apex_jax.device import keep_compiled_programs  # noqa: E402 - which reads that

keep_compiled_programs()  # in this process too: many tests compile the same


@pytest.fixture
def experience() -> Iterator[Any]:
    """Both ends of an experience link; see tests.experience_link."""
    from tests import experience_link  # not before: it imports what most tests need not

    link = experience_link.Link()
    yield link
    link.close()


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Both ends of a sampling link, whose learners ask anew soon; see tests.sampling_link."""
    from apex_jax.links import connection
    from tests import sampling_link

    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.05)
    link = sampling_link.Link()
    yield link
    link.close()


@pytest.fixture
def false_server(sampling: Any) -> Iterator[Any]:
    """A server of that link by hand, which sends what no sound one does."""
    server = sampling.router()
    yield server
    server.close()
