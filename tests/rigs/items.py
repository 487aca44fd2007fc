"""A replay server for items, on a thread of the test, its clients, and items whose bits follow from their numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from apex_jax import ReplayClient
from apex_jax.config.load import load
from apex_jax.item_codec import item_spec
from apex_jax.transport.security import LinkContext, security_of
from apex_jax.workers.replay_server import ReplayServer
from apex_jax.workers.role import RoleContext
from tests.rigs.ports import free_port

ALPHA, BETA, BATCH = 0.6, 0.4, 64
NUMBERS = 10_000  # of items that differ
FILE = f"""
replay:
  columns: number:int64, tokens:int32[3], mask:bool[2,2], value:float32
  capacity_transitions: 700
  min_size_to_sample: 1
  priority_exponent: {ALPHA}
  importance_sampling_exponent: {BETA}
actor:
  segment_slots: 8
  max_outstanding_segments: 4
learner:
  batch_size: {BATCH}
"""


class Served:
    """A replay server on a thread, and clients of it that end with the test."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "replay.yaml"
        self.file.write_text(FILE)
        self.settings = [f"addresses.{link}=tcp://127.0.0.1:{free_port()}" for link in ("experience", "sampling")]
        self.settings.append(f"run_directory={folder}/run")
        self._clients: list[ReplayClient] = []
        self._thread: threading.Thread | None = None

    def start(self, *settings: str) -> None:
        config = load(self.file, [*self.settings, *settings])
        self._role = RoleContext(config, LinkContext.of(security_of(config, "replay")), "replay")
        self.server = ReplayServer(self._role, item_spec(config))
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def stop(self) -> None:
        assert self._thread is not None
        self._role.stop.set()
        self._thread.join()
        self.server.close()
        self._role.sockets.term()
        self._thread = None

    def client(self, *settings: str, **options: Any) -> ReplayClient:
        self._clients.append(ReplayClient(self.file, *self.settings, *settings, **options))
        return self._clients[-1]

    @property
    def size(self) -> int:
        return self.server.replay.buffer.size_transitions

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self._thread is not None:
            self.stop()


def items_of(numbers: range) -> dict[str, np.ndarray]:
    """Returns items whose bits follow from their numbers; `value` has every kind of NaN among them."""
    rng = np.random.default_rng(7)
    bits = rng.integers(2**32, size=(NUMBERS, 4), dtype=np.uint32)[numbers.start : numbers.stop]
    return {
        "number": np.array(numbers, np.int64),
        "tokens": bits[:, :3].view(np.int32),
        "mask": bits.view(np.uint8)[:, :4].reshape(-1, 2, 2) > 127,
        "value": bits[:, 3].view(np.float32),
    }


def sample_all(client: ReplayClient, numbers: Iterable[int], draws: int = 2000) -> None:
    """Draws until every item was drawn, and no other one; checks each bit of them."""
    expected, missing = items_of(range(NUMBERS)), set(numbers)
    allowed = set(missing)
    for _ in range(draws):
        items = client.sample(timeout_seconds=100).items
        drawn = items["number"]
        assert allowed >= set(drawn.tolist())
        for name, column in items.items():
            assert column.dtype == expected[name].dtype
            assert column.tobytes() == expected[name][drawn].tobytes()
        missing -= set(drawn.tolist())
        if not missing:
            return
    raise AssertionError(f"{len(missing)} items were never drawn")
