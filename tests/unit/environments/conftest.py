"""EnvPool's pools, with a record of what is exchanged with them."""

from __future__ import annotations

from typing import Any

import envpool
import numpy as np
import pytest


class Recorder:
    """A pool of EnvPool that keeps the actions that it is sent and the results that it returns."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.sent: list[np.ndarray] = []
        self.received: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def send(self, action: np.ndarray, env_id: np.ndarray) -> None:
        self.sent.append(action.copy())
        self.pool.send(action, env_id)

    def recv(self) -> Any:
        self.received.append(self.pool.recv())
        return self.received[-1]


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """One recorder for each pool that the test makes."""
    made: list[Recorder] = []
    make = envpool.make

    def make_recorded(*args: Any, **options: Any) -> Recorder:
        made.append(Recorder(make(*args, **options)))
        return made[-1]

    monkeypatch.setattr(envpool, "make", make_recorded)
    return made
