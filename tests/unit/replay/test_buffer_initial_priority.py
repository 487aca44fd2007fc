"""What a new transition's priority is: the actor's error, or, as before Ape-X, the largest so far."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zmq

from apex_jax.replay.buffer import ReplayBuffer
from apex_jax.settings import load
from apex_jax.types import ActionSpec, Columns, SegmentSpec
from apex_jax.workers.replay_server import ReplayServer
from apex_jax.workers.role import RoleContext
from tests.rigs.buffers import L, leaf, priorities_at, update

SPEC = SegmentSpec(
    frame_shape=(3,), frame_dtype="float32", frame_stack=2, slots=L, n_step=2, action=ActionSpec.discrete(2)
)


def inserted(buffer: ReplayBuffer, columns: Columns) -> list[float]:
    """Returns the leaves of a segment after its insertion."""
    slot = buffer.insert(b"", columns, 0.0)
    return [leaf(buffer, slot * L + i) for i in range(4)]


def test_initial_priorities_are_the_actors_unless_maximum_is_configured() -> None:
    columns = priorities_at(f1=70.0, f3=0.5)
    of_actors = ReplayBuffer(SPEC, 18, 1.0, np.random.default_rng(0))
    assert inserted(of_actors, columns) == [0.0, 70.0, 0.0, 0.5]
    maximum = ReplayBuffer(SPEC, 18, 1.0, np.random.default_rng(0), from_actors=False)
    assert inserted(maximum, columns) == [0.0, 1.0, 0.0, 1.0]
    update(maximum, (1, 1, 5.0), (3, 1, 0.5))
    assert inserted(maximum, columns) == [0.0, 5.0, 0.0, 5.0]
    assert [leaf(maximum, 1), leaf(maximum, 3)] == [5.0, 0.5]
    maximum.check_valid()


def test_initial_priority_setting_selects_actor_or_maximum(tmp_path: Path) -> None:
    for choice, leaves in (("actor", [0.0, 70.0, 0.0, 0.5]), ("maximum", [0.0, 1.0, 0.0, 1.0])):
        sizes = "capacity_transitions: 64, min_size_to_sample: 1"
        settings = [
            f"run_directory={tmp_path}/{choice}",
            f"replay={{initial_priority: {choice}, priority_exponent: 1, {sizes}}}",
            *(f"addresses.{link}=ipc://{tmp_path}/{choice}-{link}" for link in ("experience", "sampling")),
        ]
        context = zmq.Context()
        server = ReplayServer(RoleContext(load(None, settings), context, "replay"), SPEC)
        assert inserted(server.replay.buffer, priorities_at(f1=70.0, f3=0.5)) == leaves
        server.close()
        context.term()
