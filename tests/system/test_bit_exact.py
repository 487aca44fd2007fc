"""The way of a transition from EnvPool to the learner's batch: no bit changes.

EnvPool -> SegmentBuilder -> codec -> wire -> ReplayBuffer -> wire -> codec -> frame store -> gather. What comes out is
compared with the slow twin, which reads it off the list of everything that EnvPool returned. Numbers are equal bit for
bit too: both sides sum from the earliest step to the latest in float64 and round to float32 once, at the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import envpool
import jax
import numpy as np
import pytest

from apex_jax.agent.frame_store import create_store, gather, insert_segments
from apex_jax.agent.segments import SegmentBuilder
from apex_jax.config import ActorConfig, AlgorithmConfig, Config, EnvironmentConfig
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.replay.buffer import ReplayBuffer
from apex_jax.segment_codec import decode_columns, decode_segment, encode_segment
from apex_jax.transport import wire
from apex_jax.transport.messages import StreamedSegments
from apex_jax.types import ActionSpec, Columns, Segment, SegmentRecord, SegmentSpec
from tests.rigs import reference

GATHER_BATCH = 256


class Transition(NamedTuple):
    """One n-step transition; stacks are known by their digests."""

    observation: bytes
    action: int | bytes  # bytes: of an array of floats
    n_step_return: np.float32
    discount: np.float32
    k: int
    bootstrap: bytes
    priority: np.float32


def digest(stack: np.ndarray) -> bytes:
    return hashlib.blake2b(stack.tobytes(), digest_size=16).digest()


def comparable(action: np.ndarray) -> int | bytes:
    """Returns an action so that two are equal only if all their bits are."""
    return action.tobytes() if action.dtype == np.float32 else int(action)


PARTS = {  # of DM control's observations, in its order
    "WalkerWalk-v1": ("orientations", "height", "velocity"),
    "HumanoidRun-v1": ("joint_angles", "head_height", "extremities", "torso_vertical", "com_velocity", "velocity"),
}


def raw_stacks(task: str, observation: Any) -> Iterator[np.ndarray]:
    """Yields each environment's observation, as it is to be stored, from what EnvPool returned."""
    if isinstance(observation, np.ndarray):
        yield from observation if observation.dtype == np.uint8 else observation.astype(np.float32)
        return
    for row in range(len(observation["velocity"])):
        yield np.array([number for part in PARTS[task] for number in observation[part][row].flat], np.float32)


class Replay:
    """The replay server's buffer and the learner's frame store, joined by messages only."""

    def __init__(self, spec: SegmentSpec, capacity_segments: int) -> None:
        self.spec = spec
        capacity = capacity_segments * spec.max_transitions
        self.buffer = ReplayBuffer(spec, capacity, 0.6, np.random.default_rng(0))
        self.store = create_store(spec, self.buffer.capacity_segments)
        self.live: dict[int, Columns] = {}  # what the learner was last sent for each slot
        self.cursor = 0
        self.generation = 0  # of the newest segment that the learner has

    def insert(self, segment: Segment) -> None:
        """Actor -> replay server."""
        body = encode_segment(segment, self.spec)
        message = SegmentRecord(1, 1, produced=0, transitions=0, body=body, crc=zlib.crc32(body))
        received = wire.decode([bytes(frame) for frame in wire.encode(message)])
        assert isinstance(received, SegmentRecord)
        self.buffer.insert(received.body, decode_columns(received.body, self.spec), now_seconds=0.0)

    def stream(self, max_segments: int = 3) -> None:
        """Sends the segments that the learner lacks, a few per message."""
        while self.cursor < self.buffer.inserted_segments:
            run = self.buffer.segments_since(self.cursor, max_segments)
            self.cursor = run.cursor
            lengths = np.array([len(body) for body in run.bodies], np.int32)
            message = StreamedSegments(run.ring_slots, run.generations, lengths, b"".join(run.bodies))
            received = wire.decode([bytes(frame) for frame in wire.encode(message)])
            assert isinstance(received, StreamedSegments)
            assert (
                np.diff(received.generations, prepend=np.uint32(self.generation)).view(np.int32) > 0
            ).all()  # once each
            self.generation = int(received.generations[-1])
            ends = np.cumsum(received.body_bytes)
            bodies = [received.bodies[end - size : end] for end, size in zip(ends, received.body_bytes, strict=True)]
            segments = [decode_segment(body, self.spec) for body in bodies]
            columns = {name: np.stack([s.columns[name] for s in segments]) for name in segments[0].columns}
            self.store = insert_segments(
                self.store, received.ring_slots, np.stack([s.frames for s in segments]), columns
            )
            self.live |= {int(slot): s.columns for slot, s in zip(received.ring_slots, segments, strict=True)}

    def transitions(self) -> Counter[Transition]:
        """Returns all that can be drawn, as the update would gather it."""
        found: Counter[Transition] = Counter()
        slots = self.spec.slots
        columns = {
            slot * slots + f: (c, f) for slot, c in self.live.items() for f in c["priority"].nonzero()[0].tolist()
        }
        indices = np.array(list(columns), np.int32)
        assert len(indices) == self.buffer.size_transitions
        for start in range(0, len(indices), GATHER_BATCH):
            part = indices[start : start + GATHER_BATCH]
            padded = np.resize(part, GATHER_BATCH)  # one shape for all
            batch = jitted_gather(self.store, padded, self.spec.frame_stack)
            names = ("action", "n_step_return", "discount")
            arrays = [batch.observation_t, batch.observation_tpk, *(batch.columns[name] for name in names)]
            for index, s_t, s_tpk, action, n_step_return, discount in zip(part, *map(np.asarray, arrays), strict=False):
                column, f = columns[int(index)]
                k, priority = int(column["bootstrap_offset"][f]), column["priority"][f]
                numbers = (comparable(action), n_step_return, discount, k)
                found[Transition(digest(s_t), *numbers, digest(s_tpk), priority)] += 1
        return found


jitted_gather = jax.jit(gather, static_argnums=2)


class Recorder:
    """An EnvPool that records its last raw result."""

    def __init__(self, pool: Any, task: str) -> None:
        self._pool, self._task = pool, task
        self.returned: list[tuple[int, bytes, float, bool, bool, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def recv(self) -> Any:
        observation, reward, terminated, truncated, info = returned = self._pool.recv()
        lives = info.get("lives", np.zeros(len(reward), int))
        stacks = raw_stacks(self._task, observation)
        columns = (info["env_id"].tolist(), map(digest, stacks), reward.tolist(), terminated.tolist())
        self.returned = list(zip(*columns, truncated.tolist(), lives.tolist(), strict=True))
        return returned


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """One recorder for each pool that the test makes, the newest last."""
    made: list[Recorder] = []
    make = envpool.make

    def make_recorded(task: str, **options: Any) -> Recorder:
        made.append(Recorder(make(task, **options), task))
        return made[-1]

    monkeypatch.setattr(envpool, "make", make_recorded)
    return made


def random_actions(spec: ActionSpec, rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns discrete actions, or vectors many elements of which are at a bound."""
    if spec.dtype == "int32":
        return rng.integers(0, spec.num_actions, count, dtype=np.int32)
    return np.clip(rng.normal(size=(count, *spec.shape)), -1, 1).astype(np.float32)


def play(
    config: Config, spec: SegmentSpec, replay: Replay, recorders: list[Recorder], real_steps: int
) -> list[list[reference.Step]]:
    """Fills the replay with random actions, and returns each environment's history."""
    rng = np.random.default_rng(config.seed)
    count, environment = config.actor.environments, config.environment
    per_step = config.actor.environments_per_step
    pool = VectorEnvironment(
        config, describe(config), config.seed + np.arange(count), environment.max_episode_frames, per_step=per_step
    )
    rules = (config.algorithm.discount, environment.reward_clip, environment.life_loss_terminates)
    builder = SegmentBuilder(spec, count, *rules)
    histories: list[list[reference.Step]] = [[] for _ in range(count)]
    while real_steps > 0:
        step = pool.receive()
        action = random_actions(spec.action, rng, len(step.env_id))
        q_taken, q_max = rng.normal(size=(2, len(action))).astype(np.float32)
        answers = zip(map(comparable, action), q_taken.tolist(), q_max.tolist(), strict=True)
        for returned, answer in zip(recorders[-1].returned, answers, strict=True):
            env_id, *outcome = returned
            histories[env_id].append(reference.Step._make([*outcome, *answer]))
        for segment in builder.add(step, action, q_taken, q_max):
            replay.insert(segment)
        if rng.random() < 0.03:
            replay.stream()  # the learner follows in bursts
        real_steps -= int(np.count_nonzero(~step.first))
        pool.send(action, step.env_id)
    replay.stream()
    pool.close()
    return histories


def expected_transitions(
    config: Config, spec: SegmentSpec, histories: list[list[reference.Step]]
) -> Counter[Transition]:
    """Returns all transitions that the twin knows, except those whose segment is not full at the end of the run."""
    environment, n = config.environment, spec.n_step
    rules = (n, config.algorithm.discount, environment.reward_clip, environment.life_loss_terminates)
    expected: Counter[Transition] = Counter()
    for history in histories:
        records = reference.slow_transitions(history, *rules)
        stored = reference.records_in_full_segments(history, records, spec.frame_stack, n, spec.slots)
        assert len(records) - len(stored) < spec.slots
        for record in stored:
            numbers = (record.action, np.float32(record.n_step_return), np.float32(record.discount), record.k)
            priority = np.float32(max(record.priority, 1e-6))  # 0 would say that no transition starts there
            expected[Transition(record.observation, *numbers, record.bootstrap, priority)] += 1
    return expected


def stored_bit_for_bit(
    config: Config, recorders: list[Recorder], capacity_segments: int, real_steps: int
) -> tuple[Counter[Transition], list[list[reference.Step]]]:
    """Plays; returns all that can be drawn, which must be what the twin knows, and each environment's history."""
    spec = describe(config).spec
    replay = Replay(spec, capacity_segments)
    histories = play(config, spec, replay, recorders, real_steps)
    found = replay.transitions()
    assert found == expected_transitions(config, spec, histories)
    return found, histories


def count_ends(histories: list[list[reference.Step]]) -> Counter[str]:
    """Returns how many episodes ended how; a life is lost where the game goes on with fewer."""
    ends: Counter[str] = Counter()
    for history in histories:
        for before, now in itertools.pairwise(history):
            ends["game over"] += now.terminated
            ends["time limit"] += now.truncated
            running = not (before.terminated or before.truncated or now.terminated)
            ends["lost life"] += running and now.lives < before.lives
    return ends


def make_config(task: str, slots: int = 64, n: int = 3, **environment: Any) -> Config:
    return Config(
        environment=EnvironmentConfig(task=task, **environment),
        algorithm=AlgorithmConfig(n_step=n),
        actor=ActorConfig(environments=8, segment_slots=slots),
    )


@pytest.mark.parametrize(
    ("task", "lives"),
    [
        pytest.param("Pong-v5", False, marks=pytest.mark.ci),
        pytest.param("Breakout-v5", True, marks=pytest.mark.long),
        pytest.param("Seaquest-v5", True, marks=pytest.mark.slow),
    ],
)
def test_ten_thousand_steps_of_a_game_are_stored_bit_for_bit_and_once(
    task: str, lives: bool, recorders: list[Recorder]
) -> None:
    ends: Counter[str] = Counter()
    for real_steps, max_episode_frames in ((8_500, 50_000), (1_500, 500)):  # full games, then games cut short
        config = make_config(task, max_episode_frames=max_episode_frames)
        found, histories = stored_bit_for_bit(config, recorders, 240, real_steps)
        assert found.total() > 0.9 * real_steps - 8 * config.actor.segment_slots
        ends += count_ends(histories)
    assert ends["game over"] >= 3
    assert ends["time limit"] >= 3
    assert (ends["lost life"] >= 3) == lives


@pytest.mark.parametrize(("n", "slots"), [
    (3, 16),
    *(pytest.param(n, slots, marks=pytest.mark.long) for n, slots in ((1, 16), (1, 64), (3, 64), (5, 16), (5, 64))),
])  # fmt: skip
def test_environments_in_any_order_and_any_n_are_stored_bit_for_bit(
    slots: int, n: int, recorders: list[Recorder]
) -> None:
    config = make_config("Breakout-v5", slots, n, frame_size=42, max_episode_frames=400)
    actor = dataclasses.replace(config.actor, environments_per_step=3)
    config = config.replace(actor=actor, seed=10 * n)
    _, histories = stored_bit_for_bit(config, recorders, 300, real_steps=1_200)
    assert len({len(history) for history in histories}) > 1  # they did not run in step
    ends = count_ends(histories)
    assert ends["time limit"] >= 3
    assert ends["lost life"] >= 3


@pytest.mark.long
@pytest.mark.parametrize("life_loss_terminates", [True, False])
def test_overwritten_ring_has_the_newest_segments_bit_for_bit(
    life_loss_terminates: bool, recorders: list[Recorder]
) -> None:
    config = make_config(
        "Breakout-v5", slots=16, frame_size=42, life_loss_terminates=life_loss_terminates, reward_clip=0.0
    )
    spec = describe(config).spec
    replay = Replay(spec, capacity_segments=13)
    histories = play(config, spec, replay, recorders, real_steps=2_000)
    assert replay.buffer.inserted_segments > 10 * 13
    found, expected = replay.transitions(), expected_transitions(config, spec, histories)
    assert found <= expected  # and as many as the 13 segments hold, which `transitions` checks
    assert found.total() > 13
    newest = Counter(transition.observation for transition in found)
    recent = {step.observation for history in histories for step in history[-13 * 16 :]}
    assert set(newest) <= recent


def make_continuous(task: str, environments: int, n: int = 3, **environment: Any) -> Config:
    config = make_config(task, 64, n, frame_stack=1, frame_skip=1, reward_clip=0.0, **environment)
    return config.replace(actor=dataclasses.replace(config.actor, environments=environments))


@pytest.mark.parametrize("task", [
    "Pendulum-v1",
    pytest.param("WalkerWalk-v1", marks=pytest.mark.ci),
    pytest.param("HumanoidRun-v1", marks=pytest.mark.long),
])  # fmt: skip
@pytest.mark.parametrize("n", [3, pytest.param(5, marks=pytest.mark.long)])
def test_five_thousand_steps_of_a_continuous_task_are_stored_bit_for_bit_and_once(
    task: str, n: int, recorders: list[Recorder]
) -> None:
    config = make_continuous(task, environments=4, n=n)
    found, histories = stored_bit_for_bit(config, recorders, 120, real_steps=5_000)
    assert found.total() > 5_000 - 4 * config.actor.segment_slots
    length = 200 if task == "Pendulum-v1" else 1_000  # the task's own time limit
    assert count_ends(histories) == {"time limit": 4 * (1_250 // length), "game over": 0, "lost life": 0}


@pytest.mark.parametrize("task", ["Hopper-v4", "CartPole-v1"])
def test_falls_and_time_limits_in_any_order_of_environments_are_stored_bit_for_bit(
    task: str, recorders: list[Recorder]
) -> None:
    config = make_continuous(task, environments=8, max_episode_frames=25)
    config = config.replace(actor=dataclasses.replace(config.actor, environments_per_step=3, segment_slots=16))
    _, histories = stored_bit_for_bit(config, recorders, 120, real_steps=1_000)
    ends = count_ends(histories)
    assert ends["game over"] >= 3
    assert ends["time limit"] >= 3
