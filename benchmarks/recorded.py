"""Records real segments: a policy plays games in EnvPool, and the actor's own code cuts them into segments."""

from __future__ import annotations

import zlib

import jax
import numpy as np

from apex_jax.agent.registry import make_algorithm
from apex_jax.agent.segments import SegmentBuilder
from apex_jax.config import Config
from apex_jax.environments.environment import Environment, segment_spec
from apex_jax.segment_codec import encode_segment
from apex_jax.types import Segment, SegmentRecord

ENVIRONMENTS = 16


def record_segments(config: Config, count: int, exploration: float, seed: int = 1) -> list[Segment]:
    """Plays until `count` segments are full; actions are those of an untrained network, with this epsilon or noise."""
    spec = segment_spec(config)
    algorithm = make_algorithm(config, spec)
    params = algorithm.acting_params(algorithm.init(jax.random.key(seed)))
    key = jax.random.key(seed + 1)
    environment = Environment(
        config, spec, seed + np.arange(ENVIRONMENTS), config.environment.max_episode_frames, threads=0
    )
    builder = SegmentBuilder(
        spec,
        ENVIRONMENTS,
        config.algorithm.discount,
        config.environment.reward_clip,
        config.environment.life_loss_terminates,
    )
    explorations = np.full(ENVIRONMENTS, exploration, np.float32)
    segments: list[Segment] = []
    calls = 0
    while len(segments) < count:
        step = environment.receive()
        output = jax.device_get(algorithm.act(params, step.observation, explorations, key, calls))
        environment.send(output.action, step.env_id)
        segments += builder.add(step, *output)
        calls += 1
    environment.close()
    return segments[:count]


def as_messages(config: Config, segments: list[Segment]) -> list[SegmentRecord]:
    """Returns segments as an actor sends them; the sender sets peer id and sequence."""
    spec = segment_spec(config)
    bodies = [encode_segment(segment, spec) for segment in segments]
    count = spec.max_transitions
    return [SegmentRecord(0, 1, count, count, body, zlib.crc32(body)) for body in bodies]


def num_transitions(segments: list[Segment]) -> int:
    """Returns how many transitions start in these segments."""
    return sum(int(np.count_nonzero(segment.columns["priority"])) for segment in segments)
