"""The messages of the three links.

Each field is annotated with a mark: `Integer`, `Real`, `Flag`, `Text`, `Array` or `Buffer`. `apex_jax.transport.wire`
rejects values that do not fit their marks. An axis letter has the same size in all fields of a message; see
`apex_jax.types` for the legend of the axes, the marks, and the message that carries a segment, `SegmentRecord`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from apex_jax.config.keys import MAX_COMPATIBILITY_KEY_BYTES
from apex_jax.types import (
    MAX_COUNT,
    MAX_ENVIRONMENT_STEPS,
    MAX_SAMPLES_PER_INSERT,
    MAX_SEGMENT_BYTES,
    MAX_STREAMED_SEGMENTS,
    MAX_WEIGHTS_BYTES,
    Array,
    Buffer,
    Flag,
    Integer,
    PeerId,
    Real,
    Text,
)

RunIdentity = Annotated[str, Text(16)]
"""Training run that a process is part of, see `apex_jax.run.identity`; empty = not known yet."""


# Experience link: actor <-> replay server ------------------------------------------------------------------------


NO_LADDER_INDICES = np.zeros(0, np.int32)
NO_LADDER_INDICES.flags.writeable = False


class ActorHello(NamedTuple):
    """First message of an actor, and its answer to `Rejoin`: then with the actor number and indices it already has."""

    peer_id: PeerId
    compatibility_key: Annotated[str, Text(MAX_COMPATIBILITY_KEY_BYTES)]  # see `Config.compatibility_key`
    num_environments: Annotated[int, Integer(1, 4096)]
    acknowledged: Annotated[int, Integer(0, MAX_COUNT)] = 0  # sequence number; the actor still has all later segments
    actor_number: Annotated[int, Integer(0, MAX_COUNT)] = 0  # 0 = none yet
    ladder_indices: Annotated[np.ndarray, Array("int32", "N", 4096)] = (
        NO_LADDER_INDICES  # empty, or one per environment
    )
    run_identity: RunIdentity = ""


class ActorWelcome(NamedTuple):
    """The actor's ladder indices for exploration, and its credit."""

    actor_number: Annotated[int, Integer(1, MAX_COUNT)]  # number of this actor in the run; seeds its random numbers
    ladder_indices: Annotated[np.ndarray, Array("int32", "E", 4096)]  # in [0, ladder_size)
    ladder_size: Annotated[int, Integer(1, 2**20)]
    max_outstanding_segments: Annotated[int, Integer(1, 4096)]
    run_identity: RunIdentity = ""


class SegmentAck(NamedTuple):
    """Every segment of the actor up to `sequence` is stored (or refused and counted); the actor may delete it.

    Also the answer to each `ActorStatus`, as a heartbeat when there is nothing to store.
    """

    sequence: Annotated[int, Integer(0, MAX_COUNT)]


class EpisodeStatistics(NamedTuple):
    """Full games that ended on an actor, with raw rewards; a lost life does not end a game."""

    exploration: Annotated[np.ndarray, Array("float32", "N", 4096)]  # per environment, see `Algorithm.exploration`
    episode_return: Annotated[np.ndarray, Array("float32", "N", 4096)]
    episode_steps: Annotated[np.ndarray, Array("int32", "N", 4096)]
    info_names: Annotated[str, Text(4096)]  # the names in `metrics.info` of the actor, separated by spaces
    info: Annotated[np.ndarray, Array("float32", "NK", 16 * 4096)]  # these numbers; NaN: missing


class ActorStatus(NamedTuple):
    """Heartbeat of an actor, about once a second, with its rates and its transitions since it started."""

    steps_per_second: Annotated[float, Real(0, 1e9)]
    weights_version: Annotated[int, Integer(0)]
    produced: Annotated[int, Integer(0, MAX_COUNT)] = 0  # one for each environment step that is recorded
    acknowledged: Annotated[int, Integer(0, MAX_COUNT)] = 0


class Rejoin(NamedTuple):
    """The server has no record of the peer (it restarted, or evicted the peer); the peer must send a hello again."""


class Goodbye(NamedTuple):
    """The sender disconnects on purpose; the server removes it at once."""


class Refusal(NamedTuple):
    """The peer is refused; `final` if retrying cannot help. Encoded the same way in every protocol version."""

    reason: Annotated[str, Text(4096)]
    final: Annotated[bool, Flag()]


class Finish(NamedTuple):
    """The run reached its limit: learner -> replay server (which echoes it) -> actors, which then stop."""

    reason: Annotated[str, Text(256)]


# Sampling link: learner <-> replay server ------------------------------------------------------------------------


class LearnerHello(NamedTuple):
    """First message of a learner, and its answer to `Rejoin`. The live segments follow, oldest first."""

    peer_id: PeerId
    compatibility_key: Annotated[str, Text(MAX_COMPATIBILITY_KEY_BYTES)]
    environment_steps: Annotated[int, Integer(0, MAX_ENVIRONMENT_STEPS)]  # of the whole run so far
    batches_at_once: Annotated[int, Integer(1, 256)]  # K of each `IndexBatches`
    batch_size: Annotated[int, Integer(1, 65536)]  # B
    run_identity: RunIdentity = ""
    is_new_run: Annotated[bool, Flag()] = False  # the identity is a proposal; the server's run identity, if any, wins


class LearnerWelcome(NamedTuple):
    """Answer to `LearnerHello`: the size that the frame store must have."""

    capacity_segments: Annotated[int, Integer(1, 2**31 - 1)]
    run_identity: RunIdentity = ""


class Credit(NamedTuple):
    """Additional messages that the learner can take. Without any, a heartbeat, which the server echoes."""

    segments: Annotated[int, Integer(0, 2**20)] = 0
    draws: Annotated[int, Integer(0, 2**13)] = 0  # `IndexBatches`
    environment_steps: Annotated[int, Integer(0, MAX_ENVIRONMENT_STEPS)] = 0  # of the whole run so far


class StreamedSegments(NamedTuple):
    """Segments new to the learner, in insertion order, on which the next `IndexBatches` may depend."""

    ring_slots: Annotated[np.ndarray, Array("int32", "N", MAX_STREAMED_SEGMENTS)]  # [0, capacity_segments)
    generations: Annotated[np.ndarray, Array("uint32", "N", MAX_STREAMED_SEGMENTS)]
    body_bytes: Annotated[np.ndarray, Array("int32", "N", MAX_STREAMED_SEGMENTS)]  # length of each body
    bodies: Annotated[bytes, Buffer(MAX_SEGMENT_BYTES)]  # all bodies, concatenated


class IndexBatches(NamedTuple):
    """K batches of B transitions, one after another, drawn from one state of the replay buffer: one of `Credit.draws`.

    The statistics are those of the same moment.
    """

    indices: Annotated[np.ndarray, Array("int32", "N")]  # ring slot x L + frame slot
    generations: Annotated[np.ndarray, Array("uint32", "N")]  # of the segments; returned with priorities
    probabilities: Annotated[np.ndarray, Array("float64", "N")]  # P(i)
    replay_id: Annotated[str, Text(16)]  # of the replay buffer; survives a restart that restores it
    environment_steps: Annotated[int, Integer(0, MAX_ENVIRONMENT_STEPS)]  # received by this replay buffer
    samples_per_insert: Annotated[float, Real(0, MAX_SAMPLES_PER_INSERT)]
    age_seconds: Annotated[float, Real(0, 1e9)]  # mean age of the drawn transitions


class PriorityUpdate(NamedTuple):
    """New priorities of drawn transitions; if an index occurs twice, its last priority counts."""

    indices: Annotated[np.ndarray, Array("int32", "N")]
    generations: Annotated[np.ndarray, Array("uint32", "N")]
    priorities: Annotated[np.ndarray, Array("float32", "N")]  # before the priority exponent is applied


class CorruptSegments(NamedTuple):
    """Streamed segments that the learner cannot decode; the server must stop drawing from them."""

    ring_slots: Annotated[np.ndarray, Array("int32", "N", MAX_STREAMED_SEGMENTS)]
    generations: Annotated[np.ndarray, Array("uint32", "N", MAX_STREAMED_SEGMENTS)]


# Weights link: actors, evaluator <-> learner ---------------------------------------------------------------------

NO_RETURN = -1e300  # of an evaluator before its first evaluation


class WeightsHello(NamedTuple):
    """First message of a weights client, and its answer to `Rejoin`; answered with `WeightsOffer`."""

    compatibility_key: Annotated[str, Text(MAX_COMPATIBILITY_KEY_BYTES)]  # see `Config.weights_compatibility_key`
    architecture: Annotated[str, Text(128)]  # digest of the names and shapes of the network's leaves
    run_identity: RunIdentity = ""


class WeightsHeartbeat(NamedTuple):
    """Heartbeat, sent every 2 s and after weights have arrived; answered with `WeightsOffer`."""

    learner_peer_id: PeerId  # of the weights that the client has
    version: Annotated[int, Integer(0)]  # of these weights; 0 = none
    best_return: Annotated[float, Real(NO_RETURN, -NO_RETURN)] = NO_RETURN  # mean of an evaluator's best evaluation


class WeightsOffer(NamedTuple):
    """The newest version that the learner has published; also sent to every client when a newer one is published."""

    learner_peer_id: PeerId
    version: Annotated[int, Integer(0)]  # increases over the whole run, across restarts of the learner; 0 = none yet
    final: Annotated[bool, Flag()]  # the run is over: there will be no newer weights
    run_identity: RunIdentity = ""


class WeightsRequest(NamedTuple):
    """Requests the newest version; answered with `WeightsBody`, once there is one."""


class WeightsBody(NamedTuple):
    """The online network's params."""

    learner_peer_id: PeerId
    version: Annotated[int, Integer(1)]
    updates: Annotated[int, Integer(0)]
    environment_steps: Annotated[int, Integer(0, MAX_ENVIRONMENT_STEPS)]
    final: Annotated[bool, Flag()]
    age_seconds: Annotated[float, Real(0, 1e9)]  # since the version was published
    crc: Annotated[int, Integer(0, 2**32 - 1)]  # zlib.crc32 of the body
    body: Annotated[bytes, Buffer(MAX_WEIGHTS_BYTES)]  # float32 leaves in tree order
