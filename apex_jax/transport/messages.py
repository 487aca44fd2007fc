"""The messages of the three links.

Each field is marked with `Integer`, `Real`, `Flag`, `Text`, `Array` or `Buffer`. `apex_jax.transport.wire` reads the
marks, and refuses what does not fit them; an axis letter that stands in several fields of a message must have one size
in all of them. `apex_jax.types` has the legend of the axes.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from apex_jax.types import MAX_COUNT, MAX_ENVIRONMENT_STEPS, MAX_SEGMENT_BYTES, MAX_STREAMED_SEGMENTS, MAX_WEIGHTS_BYTES


class Integer(NamedTuple):
    """A whole number in [low, high]."""

    low: int = 0
    high: int = 2**63 - 1


class Real(NamedTuple):
    """A finite number in [low, high]."""

    low: float
    high: float


class Flag(NamedTuple):
    """True or False."""


class Text(NamedTuple):
    """Unicode text of at most `max_bytes` in UTF-8."""

    max_bytes: int


MAX_ARRAY_SIZE = 2**22  # elements, of at most 4 bytes


class Array(NamedTuple):
    """A little-endian array; `axes` has one letter for each dimension; it has at most `max_size` elements."""

    dtype: str
    axes: str
    max_size: int = MAX_ARRAY_SIZE


class Buffer(NamedTuple):
    """Opaque bytes, at most `max_bytes` of them."""

    max_bytes: int


RunId = Annotated[int, Integer()]
"""Random number drawn by a process at its start: the same peer after a restart is another run."""
RunIdentity = Annotated[str, Text(16)]
"""Which training run a process is part of, see `apex_jax.run_identity`; empty = it does not know yet."""


# Experience link: actor <-> replay server ------------------------------------------------------------------------


NO_LADDER_INDICES = np.zeros(0, np.int32)
NO_LADDER_INDICES.flags.writeable = False


class ActorHello(NamedTuple):
    """First message of an actor, and the answer to `Rejoin`: then with what a server before this one gave it."""

    run_id: RunId
    compatibility_key: Annotated[str, Text(1024)]  # what all roles must have in common, see `Config.compatibility_key`
    num_environments: Annotated[int, Integer(1, 4096)]
    acknowledged: Annotated[int, Integer(0, MAX_COUNT)] = 0  # it keeps each segment after this number, none before
    incarnation: Annotated[int, Integer(0, MAX_COUNT)] = 0  # 0 = has none yet
    ladder_indices: Annotated[np.ndarray, Array("int32", "N", 4096)] = (
        NO_LADDER_INDICES  # none, or one for each environment
    )
    run_identity: RunIdentity = ""


class ActorWelcome(NamedTuple):
    """The actor's places on the ladder of exploration, and its credit."""

    incarnation: Annotated[int, Integer(1, MAX_COUNT)]  # actors welcomed up to this one: seeds its random numbers
    ladder_indices: Annotated[np.ndarray, Array("int32", "E", 4096)]  # in [0, ladder_size)
    ladder_size: Annotated[int, Integer(1, 2**20)]
    max_outstanding_segments: Annotated[int, Integer(1, 4096)]
    run_identity: RunIdentity = ""


class SegmentMessage(NamedTuple):
    """One segment; kept by its sender until a `SegmentAck` covers its sequence number."""

    run_id: RunId
    sequence: Annotated[int, Integer(1, MAX_COUNT)]  # 1, 2, 3 ... within a run id
    environment_steps: Annotated[int, Integer(0, 2**32)]  # real steps of the actor since its previous segment
    crc: Annotated[int, Integer(0, 2**32 - 1)]  # zlib.crc32 of body
    body: Annotated[bytes, Buffer(MAX_SEGMENT_BYTES)]  # see segment_codec.encode_segment
    transitions: Annotated[int, Integer(0, 4096)] = 0  # that start in it: for the ledger, should the body be corrupt
    produced: Annotated[int, Integer(0, MAX_COUNT)] = 0  # as in `ActorStatus`: a killed actor's last word may be this


class SegmentAck(NamedTuple):
    """Every segment of the actor up to `sequence` is stored (or refused and counted): forget it.

    Also the answer to each `ActorStatus`, so that an actor hears from a server that has nothing to store.
    """

    sequence: Annotated[int, Integer(0, MAX_COUNT)]


class EpisodeStatistics(NamedTuple):
    """Full games that ended on an actor: raw rewards, whole episodes whatever happened to lives."""

    run_id: RunId
    exploration: Annotated[np.ndarray, Array("float32", "N", 4096)]  # of the environment, see `Algorithm.exploration`
    episode_return: Annotated[np.ndarray, Array("float32", "N", 4096)]
    episode_steps: Annotated[np.ndarray, Array("int32", "N", 4096)]


class ActorStatus(NamedTuple):
    """Sign of life of an actor, about once a second, with its rates and its part of the ledger.

    The counts are of transitions since the actor began. What it has produced and neither had acknowledged nor dropped
    is on its way, also where it waits in a segment that is not full yet.
    """

    run_id: RunId
    steps_per_second: Annotated[float, Real(0, 1e9)]
    weights_version: Annotated[int, Integer(0)]
    produced: Annotated[int, Integer(0, MAX_COUNT)] = 0  # one for each environment step that counts
    acknowledged: Annotated[int, Integer(0, MAX_COUNT)] = 0
    overflow: Annotated[int, Integer(0, MAX_COUNT)] = 0  # dropped: no room, and actor.overflow=drop
    unencodable: Annotated[int, Integer(0, MAX_COUNT)] = 0  # dropped: not finite, say
    unsent: Annotated[int, Integer(0, MAX_COUNT)] = 0  # dropped: the actor left before they could be sent


class Rejoin(NamedTuple):
    """The replay server does not know this run id (it restarted, or held the peer for dead): say hello again."""


class Goodbye(NamedTuple):
    """The sender leaves on purpose; its place is free at once."""

    run_id: RunId


class Refusal(NamedTuple):
    """The peer is not taken, and why; `final` where trying again cannot help. The same in every protocol version."""

    reason: Annotated[str, Text(4096)]
    final: Annotated[bool, Flag()]


class Finish(NamedTuple):
    """The run reached its limit: learner -> replay server (which says it back) -> actors, which then leave."""

    reason: Annotated[str, Text(256)]


# Sampling link: learner <-> replay server ------------------------------------------------------------------------


class LearnerHello(NamedTuple):
    """First message of a learner, and the answer to `Rejoin`. The live segments follow from the oldest on."""

    run_id: RunId
    compatibility_key: Annotated[str, Text(1024)]
    environment_steps: Annotated[int, Integer(0, MAX_ENVIRONMENT_STEPS)]  # of the whole run so far
    batches_at_once: Annotated[int, Integer(1, 256)]  # K of each `IndexBatches` it takes
    batch_size: Annotated[int, Integer(1, 65536)]  # B
    run_identity: RunIdentity = ""
    is_new_run: Annotated[bool, Flag()] = False  # the identity is a proposal: it joins the server's run if that has one


class LearnerWelcome(NamedTuple):
    """Answer to `LearnerHello`: which replay server this is, and how large the frame store must be."""

    replay_run_id: RunId
    capacity_segments: Annotated[int, Integer(1, 2**31 - 1)]
    run_identity: RunIdentity = ""


class Credit(NamedTuple):
    """What the learner has consumed and can take again; an empty one is its sign of life, and comes back as another."""

    run_id: RunId
    groups: Annotated[int, Integer(0, 2**20)]  # `IndexBatches` messages
    segments: Annotated[int, Integer(0, 2**20)]
    environment_steps: Annotated[int, Integer(0, MAX_ENVIRONMENT_STEPS)] = 0  # of the whole run so far


class StreamedSegments(NamedTuple):
    """Segments new to the learner, in the order of their insertion; they hold from the next `IndexBatches` on."""

    slots: Annotated[np.ndarray, Array("int32", "N", MAX_STREAMED_SEGMENTS)]  # in the ring, [0, capacity_segments)
    generations: Annotated[np.ndarray, Array("uint32", "N", MAX_STREAMED_SEGMENTS)]
    body_bytes: Annotated[np.ndarray, Array("int32", "N", MAX_STREAMED_SEGMENTS)]  # length of each body
    bodies: Annotated[bytes, Buffer(MAX_SEGMENT_BYTES)]  # all bodies, one behind the other


class IndexBatches(NamedTuple):
    """K batches of B indices drawn from one state of the replay, and what the replay knows at that moment."""

    indices: Annotated[np.ndarray, Array("int32", "KB")]  # segment slot x L + frame slot
    generations: Annotated[np.ndarray, Array("uint32", "KB")]  # of the segment in that slot, to be sent back
    weights: Annotated[np.ndarray, Array("float32", "KB")]  # importance weights, largest of each batch = 1
    replay_id: Annotated[str, Text(16)]  # of the replay, the same after a restart that restores it
    environment_steps: Annotated[int, Integer(0, MAX_ENVIRONMENT_STEPS)]  # that came to this replay
    size_transitions: Annotated[int, Integer(0)]
    samples_per_insert: Annotated[float, Real(0, 1e9)]
    age_seconds: Annotated[float, Real(0, 1e9)]  # mean age of the drawn transitions


class PriorityUpdate(NamedTuple):
    """New priorities of drawn transitions; where an index stands twice the last one holds."""

    run_id: RunId
    indices: Annotated[np.ndarray, Array("int32", "N")]
    generations: Annotated[np.ndarray, Array("uint32", "N")]
    priorities: Annotated[np.ndarray, Array("float32", "N")]  # not yet raised to the priority exponent


class CorruptSegments(NamedTuple):
    """Streamed segments that the learner cannot decode: nothing is to be drawn from them any more."""

    run_id: RunId
    slots: Annotated[np.ndarray, Array("int32", "N", MAX_STREAMED_SEGMENTS)]
    generations: Annotated[np.ndarray, Array("uint32", "N", MAX_STREAMED_SEGMENTS)]


# Weights link: actors, evaluator <-> learner ---------------------------------------------------------------------

WEIGHTS_PIECE_BYTES = 2**18  # 0.3 s of a line of 1 MB/s: heartbeats pass between two pieces


class WeightsHello(NamedTuple):
    """First message of a client of weights, and the answer to `Rejoin`; answered with `WeightsOffer`."""

    compatibility_key: Annotated[str, Text(1024)]  # what it must have in common with the learner, see `Config`
    architecture: Annotated[str, Text(128)]  # digest of the names and shapes of its network's leaves
    run_identity: RunIdentity = ""


class WeightsHeartbeat(NamedTuple):
    """Sent about once a second, and once weights have arrived; answered with `WeightsOffer`."""

    learner_run_id: RunId  # of the weights that the client holds, and ...
    version: Annotated[int, Integer(0)]  # ... their version; 0 = none


class WeightsOffer(NamedTuple):
    """The version that the learner has published last; also sent to every client when there is a newer one."""

    learner_run_id: RunId
    version: Annotated[int, Integer(0)]  # grows over the whole run, across restarts of the learner; 0 = none yet
    final: Annotated[bool, Flag()]  # the run is over: no newer weights will come
    run_identity: RunIdentity = ""


class WeightsRequest(NamedTuple):
    """Asks for the piece of some weights that begins at `offset`; answered with it, or else with `WeightsOffer`."""

    version: Annotated[int, Integer(0)]  # 0 = the newest
    offset: Annotated[int, Integer(0, MAX_WEIGHTS_BYTES)]  # a multiple of WEIGHTS_PIECE_BYTES


class WeightsPiece(NamedTuple):
    """Online network parameters, or a piece of them: WEIGHTS_PIECE_BYTES, or as many as are left."""

    learner_run_id: RunId
    version: Annotated[int, Integer(1)]
    updates: Annotated[int, Integer(0)]
    environment_steps: Annotated[int, Integer(0, MAX_ENVIRONMENT_STEPS)]
    final: Annotated[bool, Flag()]
    age_seconds: Annotated[float, Real(0, 1e9)]  # since they were published
    crc: Annotated[int, Integer(0, 2**32 - 1)]  # zlib.crc32 of the whole body
    body_bytes: Annotated[int, Integer(1, MAX_WEIGHTS_BYTES)]  # of the whole body: float32 leaves in tree order
    offset: Annotated[int, Integer(0, MAX_WEIGHTS_BYTES)]
    piece: Annotated[bytes, Buffer(WEIGHTS_PIECE_BYTES)]
