"""Segments against the slow twin, on made-up episodes in which every kind of end comes at every place."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from apex_jax.agent.segments import SegmentBuilder, spread_first_slots
from apex_jax.types import ActionSpec, Segment, SegmentSpec, Step
from tests.rigs import reference

GAMMA = 0.9


def make_spec(frame_stack: int = 3, slots: int = 12, n: int = 3) -> SegmentSpec:
    return SegmentSpec((2,), "float32", frame_stack=frame_stack, slots=slots, n_step=n, action=ActionSpec.discrete(7))


class History:
    """One made-up environment, told step by step; every frame is unlike all others."""

    def __init__(self, frame_stack: int, rng: np.random.Generator) -> None:
        self.steps: list[reference.Step] = []
        self._frame_stack, self._rng = frame_stack, rng
        self._frame = itertools.count(1 + 10_000 * int(rng.integers(1000)))
        self._lives = 3

    def add(self, reward: float = 0.0, end: str = "") -> reference.Step:
        """`end`: terminated, truncated, life_lost, any of them, in one text."""
        if not self.steps or self.steps[-1].terminated or self.steps[-1].truncated:
            self._lives, kept = 3, [self._next() for _ in range(self._frame_stack - 1)]  # a whole new stack
        else:
            self._lives -= "life_lost" in end
            kept = list(self.steps[-1].observation[1:])
        stack = np.array([*kept, self._next()], np.float32)
        q = float(np.float32(self._rng.normal())), float(np.float32(self._rng.normal()))
        outcome = (reward, "terminated" in end, "truncated" in end, self._lives)
        self.steps.append(reference.Step(stack, *outcome, int(self._rng.integers(0, 7)), *q))
        return self.steps[-1]

    def _next(self) -> list[int]:
        return [next(self._frame), 0]


def build(builder: SegmentBuilder, histories: dict[int, list[reference.Step]]) -> list[Segment]:
    """Returns the segments of step i of all these environments, for all i in turn."""
    segments = []
    for i in range(max(map(len, histories.values()))):
        rows = [
            (env_id, history[i], history[i - 1] if i else None)
            for env_id, history in histories.items()
            if i < len(history)
        ]
        now = [row[1] for row in rows]
        step = Step(
            env_id=np.array([row[0] for row in rows], np.int32),
            observation=np.stack([step.observation for step in now]),
            reward=np.array([step.reward for step in now], np.float32),
            first=np.array([before is None or before.terminated or before.truncated for _, _, before in rows]),
            terminated=np.array([step.terminated for step in now]),
            truncated=np.array([step.truncated for step in now]),
            life_lost=np.array([before is not None and step.lives < before.lives for _, step, before in rows]),
            info=np.zeros((len(rows), 0), np.float32),
        )
        action = np.array([step.action for step in now], np.int32)
        q_taken, q_max = np.array([(step.q_taken, step.q_max) for step in now], np.float32).T
        segments += builder.add(step, action, q_taken, q_max)
    return segments


def read(segments: list[Segment], spec: SegmentSpec) -> list[tuple[Any, ...]]:
    """Returns every transition that starts in the segments."""
    found = []
    for frames, columns in segments:
        assert not any(column[columns["priority"] == 0].any() for column in columns.values())  # no transition: zeros
        for f in np.flatnonzero(columns["priority"]):
            k = int(columns["bootstrap_offset"][f])
            windows = [frames[end - spec.frame_stack + 1 : end + 1].tobytes() for end in (f, f + k)]
            numbers = (columns["n_step_return"][f], columns["discount"][f], columns["priority"][f])
            found.append((windows[0], int(columns["action"][f]), k, windows[1], *map(float, numbers)))
    return found


def expect(
    history: list[reference.Step], spec: SegmentSpec, reward_clip: float, life_loss: bool, first_slot: int
) -> list[tuple[Any, ...]]:
    records = reference.slow_transitions(history, spec.n_step, GAMMA, reward_clip, life_loss)
    sizes = spec.frame_stack, spec.n_step, spec.slots
    stored = reference.records_in_full_segments(history, records, *sizes, first_slot)
    return [
        (
            record.observation.tobytes(),
            record.action,
            record.k,
            record.bootstrap.tobytes(),
            float(np.float32(record.n_step_return)),
            float(np.float32(record.discount)),
            float(np.float32(max(record.priority, 1e-6))),
        )
        for record in stored
    ]


@pytest.mark.parametrize("is_spread", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_segments_of_random_episodes_equal_those_of_a_naive_twin(seed: int, is_spread: bool) -> None:
    rng = np.random.default_rng(seed)
    frame_stack, n = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    spec = make_spec(frame_stack, slots=frame_stack - 1 + n + int(rng.integers(1, 20)), n=n)
    reward_clip, life_loss = float(rng.choice([0.0, 1.0, 2.5])), bool(rng.integers(2))
    both = ("life_lost terminated", "life_lost truncated", "truncated terminated")
    ends = ["terminated", "truncated", "life_lost", *both]
    likelihood = rng.choice([0.02, 0.1, 0.5])  # from long episodes to many of two steps
    histories: dict[int, list[reference.Step]] = {}
    for env_id in (3, 0, 2):
        history = History(frame_stack, rng)
        for _ in range(rng.integers(100, 150)):
            fresh = not history.steps or history.steps[-1].terminated or history.steps[-1].truncated
            end = "" if fresh or rng.random() > likelihood else str(rng.choice(ends))
            history.add(0.0 if fresh else float(np.float32(rng.normal() * 3)), end)
        histories[env_id] = history.steps
    first_slot = spread_first_slots(spec, 4) if is_spread else np.zeros(4, int)
    builder = SegmentBuilder(spec, 4, GAMMA, reward_clip, life_loss, first_slot if is_spread else None)
    found = read(build(builder, histories), spec)
    expected = [
        transition
        for env_id, history in histories.items()
        for transition in expect(history, spec, reward_clip, life_loss, first_slot[env_id])
    ]
    assert sorted(found) == sorted(expected)
    assert len(expected) > 20


def test_spread_environments_fill_their_segments_one_after_the_other() -> None:
    spec, num_environments = make_spec(frame_stack=1, slots=24, n=4), 10
    histories = {}
    for env_id in range(num_environments):
        histories[env_id] = History(1, np.random.default_rng(env_id))
        for _ in range(100):
            histories[env_id].add()
    builder = SegmentBuilder(spec, num_environments, GAMMA, 0.0, True, spread_first_slots(spec, num_environments))
    full = [
        len(build(builder, {env_id: history.steps[i : i + 1] for env_id, history in histories.items()}))
        for i in range(100)
    ]
    assert max(full) == 1
    assert sum(full) == 2 * 4 + 8 * 5, "two begin too early for a fifth"


def test_segment_in_which_no_transition_starts_is_not_sent() -> None:
    spec, history = make_spec(frame_stack=4, slots=7, n=3), History(4, np.random.default_rng(0))
    for _ in range(40):  # each episode takes 4 + 1 slots, and of each segment only slot 3 may start a transition
        history.add()
        history.add(1.0, "terminated")
    segments = build(SegmentBuilder(spec, 1, GAMMA, 0.0, True), {0: history.steps})
    assert 0 < len(segments) < 40 * 5 - 7
    assert all(segment.columns["priority"].any() for segment in segments)


@pytest.mark.parametrize("seed", range(8))
def test_game_with_a_number_that_is_too_large_is_left_out_with_its_end_and_counted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec, large = make_spec(frame_stack=int(rng.integers(1, 4)), slots=16, n=3), 1e8
    history = History(spec.frame_stack, rng)
    for _ in range(150):
        fresh = not history.steps or history.steps[-1].terminated
        history.add(0.0 if fresh else 1.0, "terminated" if not fresh and rng.random() < 0.15 else "")
    clean = read(build(SegmentBuilder(spec, 1, GAMMA, 0.0, True), {0: history.steps}), spec)
    damaged, when = list(history.steps), int(rng.integers(30, 100))
    damaged[when] = damaged[when]._replace(observation=np.full_like(damaged[when].observation, 2 * large))
    ends = [i for i, step in enumerate(damaged) if step.terminated]
    games = [range(first + 1, last + 1) for first, last in zip([-1, *ends], ends, strict=False)]
    [game] = [game for game in games if when in game]
    of_game = {history.steps[i].observation.tobytes() for i in game}

    builder = SegmentBuilder(spec, 1, GAMMA, 0.0, True, largest_observation=large)
    segments = build(builder, {0: damaged})
    found = read(segments, spec)
    assert max(np.abs(segment.frames).max() for segment in segments) <= large
    missing = set(clean) - set(found)
    assert set(found) <= set(clean), "what is stored is as if nothing had happened"
    assert {observation for observation, *_ in missing} <= of_game
    last = history.steps[game[-2]].observation.tobytes() if len(game) > 1 else None
    assert last is None or last not in {observation for observation, *_ in found}, "its end, too"
    assert len(missing) == builder.left_out
