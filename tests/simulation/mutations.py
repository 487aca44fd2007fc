"""Mistakes in the protocol, one at a time, that the simulation must find."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

from apex_jax.links.connection import Connection
from apex_jax.links.experience_client import Outbox
from apex_jax.links.experience_server import ExperienceServer, Membership
from apex_jax.links.sampling_client import SamplingClient
from apex_jax.links.sampling_server import SamplingServer
from apex_jax.links.weights_server import WeightsServer
from apex_jax.replay.buffer import ReplayBuffer
from apex_jax.replay.journal import Journal
from apex_jax.replay.replay import Replay
from tests.simulation.__main__ import Outcome, simulate


class Mutation(NamedTuple):
    """A replacement in the source of a method."""

    what: str
    owner: type
    method: str
    old: str
    new: str
    first_seed: int = 1  # a later one, if those before it find nothing for minutes


MUTATIONS = (
    Mutation("segments are acknowledged before they are written", ExperienceServer, "store",
             "self._replay.journal.flush(now_seconds)\n", "pass\n"),
    Mutation("a segment that was sent again is stored twice", ExperienceServer, "_on_segment",
             "message.sequence <= actor.received", "message.sequence < actor.received", first_seed=7),
    Mutation("the actor number of a new actor is not in the journal", ExperienceServer, "_on_hello",
             "self._replay.journal.on_welcome(message.peer_id, actor_number)", "pass"),
    Mutation("indices of the ladder are given to several actors", Membership, "_occupants_seen_since",
             "actor.ladder_indices, 1)", "actor.ladder_indices, 0)"),
    Mutation("priorities are applied without a look at the generation", ReplayBuffer, "update_priorities",
             "generations = np.ascontiguousarray(generations, np.int64)",
             "generations = self.generations[leaves // self._frame_slots].astype(np.int64)"),
    Mutation("a learner that joins again gets no segments that were sent before", SamplingServer, "_on_hello",
             "message.batches_at_once, message.batch_size)",
             "message.batches_at_once, message.batch_size, self.learner.cursor if self.learner else 0)"),
    Mutation("draws are not counted in the rate limiter", Replay, "sample",
             "self.limiter.sampled += sample.indices.size", "pass"),
    Mutation("the learner returns the credit of segments twice", SamplingClient, "consumed",
             "Credit(len(content.ring_slots))", "Credit(2 * len(content.ring_slots))"),
    Mutation("requests of an earlier connection are sent on the next one", SamplingClient, "_flush",
             "epoch == self._epoch and not", "not"),
    Mutation("a Rejoin is not answered with a hello", Connection, "_on_rejoin",
             'self.state == "joined"', 'self.state == "lost"'),
    Mutation("segments in flight are not sent again on a new connection", Outbox, "on_new_connection",
             "self._num_sent = 0", "pass"),
    Mutation("events before the snapshot are counted again by a restart", Journal, "restore",
             "record.event > snapshot_event", "record.event > 0"),
    Mutation("versions of the weights follow a clock that is set back", WeightsServer, "publish",
             "max(self.version + 1, int(time.time() * 1000))", "int(time.time() * 1000)"),
)  # fmt: skip


@contextlib.contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Replaces the method. Fails if the text to be replaced does not occur exactly once: then the product changed."""
    method = getattr(mutation.owner, mutation.method)
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(mutation.old) == 1, f"{mutation.method} holds {source.count(mutation.old)} of {mutation.old!r}"
    namespace: dict[str, object] = {}
    text = "from __future__ import annotations\n" + source.replace(mutation.old, mutation.new)
    exec(compile(text, f"<{mutation.what}>", "exec"), method.__globals__, namespace)
    with mock.patch.object(mutation.owner, mutation.method, namespace[mutation.method]):
        yield


def find(mutation: Mutation, seeds: int, hours: float) -> tuple[Outcome, float] | None:
    """Simulates seed after seed; returns the first violation, and the virtual hours until then."""
    spent = 0.0
    with mutated(mutation):
        for seed in range(mutation.first_seed, mutation.first_seed + seeds):
            outcome = simulate(seed, hours)
            spent += outcome.hours
            if outcome.violation:
                return outcome, spent
    return None
