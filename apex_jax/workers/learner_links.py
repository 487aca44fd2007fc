"""The learner's links to a fleet."""

from __future__ import annotations

import jax

from apex_jax.links.sampling_client import SamplingClient
from apex_jax.links.weights_server import WeightsServer
from apex_jax.run.identity import new_identity
from apex_jax.segment_codec import value_limits
from apex_jax.transport.messages import LearnerHello
from apex_jax.types import SegmentSpec
from apex_jax.workers.role import RoleContext

CALLS_IN_FLIGHT = 2  # update calls dispatched to the device whose priorities have not been fetched


def serve_weights(role: RoleContext, peer_id: int, first_version: int, architecture: str) -> WeightsServer:
    """Binds the weights link."""
    config = role.config
    return WeightsServer(
        role.sockets,
        config.addresses.weights,
        peer_id,
        first_version,
        config.weights_compatibility_key,
        architecture,
        role.run_identity,
    )


def join_replay(role: RoleContext, spec: SegmentSpec, peer_id: int, environment_steps: int) -> SamplingClient:
    """Starts joining the replay server."""
    config, run = role.config, role.run_identity
    updates_per_call = config.learner.updates_of_a_call(jax.default_backend() == "cpu")
    hello = LearnerHello(
        peer_id=peer_id,
        compatibility_key=config.compatibility_key,
        environment_steps=environment_steps,
        batches_at_once=updates_per_call,
        batch_size=config.learner.batch_size,
        run_identity=run.name or new_identity(),
        is_new_run=not run.name,
    )
    return SamplingClient(
        role.sockets,
        config.addresses.sampling,
        spec,
        hello,
        spec.ring_segments(config.replay.capacity_transitions),
        CALLS_IN_FLIGHT + max(1, config.learner.prefetch_batches // updates_per_call),
        config.replay.importance_sampling_exponent,
        config.away_limit_seconds,
        run,
        value_limits(config),
    )
