"""The ledger: counters of the transitions of all actors of the run, across restarts of the replay server.

Each segment, and each report of an actor, which comes every second, contains the number of transitions that the actor
has produced since it started, so the next one makes up for a lost one. A transition is an environment step: `steps`
counts those of the run. What an actor produced after the last message that arrived is not counted if the actor dies;
what it reported after its last segment is not, either, if the server dies, too. Each actor counts what it drops itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np


class Ledger:
    """The counters of the run, the positions of its actors, and the highest number given to one."""

    def __init__(self) -> None:
        self.stored = 0  # transitions ever stored
        self.refused: Counter[str] = Counter()  # transitions by reason
        self.highest_actor_number = 0  # of the actors welcomed so far
        self.steps = 0  # transitions of all actors, without those that a lost replay has counted
        # By peer id: sequence number of the actor's newest stored or refused segment, and transitions produced.
        self._actors: dict[int, tuple[int, int]] = {}

    def sequence(self, peer_id: int) -> int:
        """Returns the sequence number of an actor's newest stored or refused segment; 0 for an unknown actor."""
        return self._actors.get(peer_id, (0, 0))[0]

    def report(self, peer_id: int, produced: int, is_late: bool) -> None:
        """Counts the transitions that an actor has produced so far; the count never decreases.

        `is_late`: the actor has sent segments before; if it is unknown, a lost replay has counted its transitions.
        """
        if produced:
            sequence, before = self._actors.get(peer_id, (0, produced if is_late else 0))
            self.steps += max(0, produced - before)
            self._actors[peer_id] = sequence, max(before, produced)

    def store(self, peer_id: int, sequence: int, produced: int, transitions: int) -> None:
        """Counts a stored segment. `produced`: transitions that its actor has produced so far."""
        self._answer(peer_id, sequence, produced)
        self.stored += transitions

    def refuse(self, peer_id: int, sequence: int, produced: int, transitions: int, reason: str) -> None:
        """Counts a refused segment; `reason`: bad_checksum, or one of `CorruptSegment.REASONS`."""
        self._answer(peer_id, sequence, produced)
        self.refused[reason] += transitions

    def _answer(self, peer_id: int, sequence: int, produced: int) -> None:
        self.report(peer_id, produced, is_late=sequence > 1)
        newest, produced = self._actors.get(peer_id, (0, 0))
        self._actors[peer_id] = max(newest, sequence), produced

    def totals(self) -> dict[str, int]:
        """Returns the numbers of transitions under their names in the metrics."""
        dropped = {f"dropped_{reason}": transitions for reason, transitions in self.refused.items()}
        return {"produced": self.steps, "stored": self.stored, **dropped}

    def actors(self) -> np.ndarray:
        """Returns int64[N, 3]: peer id, newest sequence number and produced transitions of each actor."""
        return np.array([(peer_id, *numbers) for peer_id, numbers in self._actors.items()], np.int64).reshape(-1, 3)

    def counters(self) -> dict[str, Any]:
        """Returns everything else, for JSON."""
        welcomed = self.highest_actor_number
        return {"stored": self.stored, "refused": dict(self.refused), "steps": self.steps, "welcomed": welcomed}

    @classmethod
    def of(cls, actors: np.ndarray, stored: int, refused: Mapping[str, int], steps: int, welcomed: int) -> Ledger:
        """Returns the ledger of these `actors` and `counters`."""
        ledger = cls()
        ledger.stored, ledger.steps, ledger.highest_actor_number = stored, steps, welcomed
        ledger.refused.update(refused)
        ledger._actors = {peer_id: (sequence, produced) for peer_id, sequence, produced in actors.tolist()}
        return ledger
