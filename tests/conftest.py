"""Runs every test on the CPU, even if there is a GPU, with a cache of its own for compiled programs."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is imported, which is after this file

# Compiled programs are shared by all workers, by the processes that tests start, and by the next run of the tests.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "programs")

from apex_jax.device import keep_compiled_programs

keep_compiled_programs()  # for this process too, because many tests compile the same programs

# The same examples in each run, so that a change turns red by what it changes; HYPOTHESIS_PROFILE=random for others.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("random", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mixes files that start processes with files that compute, so that neither kind has the cores for itself."""
    if not getattr(config.option, "numprocesses", None):
        return
    files = Counter(item.path for item in items)
    rank: dict[Path, float] = {}
    for is_unit in (False, True):
        group = sorted((path for path in files if ("unit" in path.parts) == is_unit), key=lambda path: -files[path])
        rank |= {path: (place + 0.5) / len(group) for place, path in enumerate(group)}
    items.sort(key=lambda item: rank[item.path])  # stable: the order within a file stays


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Any]:
    """Real processes of this test, which end with it; see tests.rigs.processes."""
    from tests.rigs.processes import Programs  # not before: it imports what few tests need

    with Programs(tmp_path) as programs:
        yield programs


@pytest.fixture
def experience(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Both ends of an experience link, whose heartbeats come soon; see tests.rigs.experience_link."""
    from apex_jax.links import connection
    from tests.rigs import experience_link  # not before: it imports what most tests need not

    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.05)
    link = experience_link.Link()
    yield link
    link.close()


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Both ends of a sampling link, whose learners ask anew soon; see tests.rigs.sampling_link."""
    from apex_jax.links import connection
    from tests.rigs import sampling_link

    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.05)
    link = sampling_link.Link()
    yield link
    link.close()


@pytest.fixture
def false_server(sampling: Any) -> Iterator[Any]:
    """A server of that link that the test controls and that breaks the protocol."""
    from tests.rigs.sampling_link import FalseReplay

    server = FalseReplay(sampling.address)
    yield server
    server.close()
