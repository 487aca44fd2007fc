"""Updates on several devices: each holds its own segments, a part of every batch, and a copy of the state.

Device d of D gets the indices [:, d B/D : (d + 1) B/D] of a batch int32[K, B], which must belong to its own segments,
those in the replay slots from d C/D on. No frame leaves its device; gradients are averaged over the devices. For one
device, the same algorithm is compiled without these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from apex_jax.agent.algorithm import UpdateOutput
from apex_jax.agent.frame_store import FrameStore, create_store, insert_segments
from apex_jax.types import Columns, SegmentSpec

AXIS = "devices"

T = TypeVar("T")
Update = Callable[..., tuple[Any, UpdateOutput]]  # as `Algorithm.update`, not jitted


@cache
def mesh_of(count: int) -> Mesh:
    """Returns the first `count` devices of JAX as a mesh of one axis."""
    return Mesh(np.array(jax.devices()[:count]), (AXIS,))


def mean_over_devices(values: T, count: int) -> T:
    """Returns the mean of each array over the devices. Called inside a function of `jit_update`."""
    return values if count == 1 else jax.lax.pmean(values, AXIS)


def jit_update(update: Update, count: int) -> Update:
    """Returns `update`, jitted for `count` devices; its first argument, the state, is donated.

    With several devices, `update` runs on each with the segments and the part of the batch there, and must average
    gradients and metrics, but not priorities, with `mean_over_devices`.
    """
    if count == 1:
        return jax.jit(update, donate_argnums=0)

    def on_each(
        state: Any, store: FrameStore, indices: jax.Array, weights: jax.Array, share: jax.Array
    ) -> tuple[Any, UpdateOutput]:
        segments, slots = store.frames.shape[:2]  # of this device
        return update(state, store, indices - jax.lax.axis_index(AXIS) * (segments * slots), weights, share)

    @cache  # deferred to the first update, because actors lack these devices
    def jitted() -> Update:
        everywhere, of_a_batch = PartitionSpec(), PartitionSpec(None, AXIS)
        each = jax.shard_map(
            on_each,
            mesh=mesh_of(count),
            in_specs=(everywhere, PartitionSpec(AXIS), of_a_batch, of_a_batch, everywhere),
            out_specs=(everywhere, UpdateOutput(of_a_batch, everywhere)),  # type: ignore[arg-type]
            check_vma=False,  # with it, gradients would already be sums over the devices
        )
        return jax.jit(each, donate_argnums=0)

    return lambda *arguments: jitted()(*arguments)


def replicated(state: T, count: int) -> T:
    """Returns the state on each of `count` devices."""
    return state if count == 1 else jax.device_put(state, NamedSharding(mesh_of(count), PartitionSpec()))


class DeviceStores:
    """The frame store of a learner with `count` devices: a part on each."""

    def __init__(
        self,
        spec: SegmentSpec,
        capacity_segments: int,
        count: int,
        memory_bytes: int | None = None,
        block_size: int = 1,
    ):
        """`capacity_segments`: of all parts together; `memory_bytes`: of one device; `block_size`: see `create_store`.

        Raises ValueError if a part needs more memory.
        """
        self._count = count
        self._part_segments, rest = divmod(capacity_segments, count)
        assert not rest, (capacity_segments, count)
        part = spec, self._part_segments, memory_bytes
        self.parts = [create_store(*part, device, block_size) for device in _places(count)]

    def insert(self, slots: np.ndarray, frames: np.ndarray, columns: Columns) -> None:
        """Writes segments in place, see `insert_segments`; all slots int32[N] are of one device."""
        device = int(slots[0]) // self._part_segments if len(slots) else 0
        local = slots - np.int32(device * self._part_segments)
        self.parts[device] = insert_segments(self.parts[device], local, frames, columns)

    @property
    def whole(self) -> FrameStore:
        """The store as `jit_update` takes it; not copied, and valid until the next insertion."""
        if self._count == 1:
            return self.parts[0]
        sharding = NamedSharding(mesh_of(self._count), PartitionSpec(AXIS))

        def joined(*parts: jax.Array) -> jax.Array:
            shape = (self._count * self._part_segments, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, parts)

        return jax.tree.map(joined, *self.parts)


def _places(count: int) -> Sequence[jax.Device | None]:
    """Returns the device of each part; with one, JAX's default."""
    return [None] if count == 1 else list(mesh_of(count).devices.flat)
