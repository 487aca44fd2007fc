"""Messages of any version, and the numbers of their kinds."""

from __future__ import annotations

from typing import Any

import msgpack

from apex_jax.transport import wire

KIND_NUMBERS = {
    "ActorHello": 0, "ActorWelcome": 1, "SegmentRecord": 2, "SegmentAck": 3, "EpisodeStatistics": 4, "ActorStatus": 5,
    "Rejoin": 6, "Goodbye": 7, "Refusal": 8, "Finish": 9, "LearnerHello": 10, "LearnerWelcome": 11, "Credit": 12,
    "StreamedSegments": 13, "IndexBatches": 14, "PriorityUpdate": 15, "CorruptSegments": 16, "WeightsHello": 17,
    "WeightsHeartbeat": 18, "WeightsOffer": 19, "WeightsRequest": 20, "WeightsBody": 21,
}  # fmt: skip


def speaking(version: int, message: Any) -> list[bytes]:
    """Returns the frames of a message as a peer of another version would send them."""
    header, *frames = (bytes(frame) for frame in wire.encode(message))
    items = msgpack.unpackb(header)
    items[1] = version
    return [msgpack.packb(items), *frames]
