"""An actor's outbox against a slow twin: order, sequence numbers, credit, and the steps that segments carry."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import pytest

from apex_jax.links.outbox import Outbox, transitions_of
from apex_jax.segment_codec import CorruptSegment, encode_segment
from tests.rigs.links import SPEC, TRANSITIONS, segment_of

MAX_STEPS = 100


class Kept(NamedTuple):
    """What the twin knows of a segment that is not acknowledged."""

    sequence: int
    number: int
    steps: int


class Twin:
    """A list of segments, the number of them that were sent, and the steps that no segment carries yet."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self.sequence = self.num_sent = self.highest_sent = self.uncarried = 0

    def add(self, number: int, steps: int) -> None:
        self.sequence += 1
        carried = min(MAX_STEPS, self.uncarried + steps)
        self.uncarried += steps - carried
        self.kept.append(Kept(self.sequence, number, carried))

    def acknowledge(self, sequence: int) -> int | None:
        if sequence > self.highest_sent:
            return None
        gone = [segment for segment in self.kept if segment.sequence <= sequence]
        self.kept = self.kept[len(gone) :]
        self.num_sent = max(0, self.num_sent - len(gone))
        return len(gone) * TRANSITIONS


@pytest.mark.parametrize("seed", range(10))
def test_random_operations_equal_the_twin(seed: int) -> None:
    rng, twin, outbox, made = np.random.default_rng(seed), Twin(), Outbox(7, SPEC, MAX_STEPS), 0
    for number in range(300):
        operation = rng.choice(["add", "send", "acknowledge", "reconnect"], p=[0.4, 0.4, 0.17, 0.03])
        if operation == "add":
            steps = int(rng.integers(0, 3 * MAX_STEPS, endpoint=True))
            made += steps
            outbox.add(segment_of(number % 200), made, produced=number)
            twin.add(number % 200, steps)
        elif operation == "send":
            credit = int(rng.integers(0, 6))
            message = outbox.next_to_send(credit)
            assert (message is None) == (twin.num_sent >= min(len(twin.kept), credit))
            if message is not None:
                expected = twin.kept[twin.num_sent]
                body = encode_segment(segment_of(expected.number), SPEC)
                assert message[:5] == (7, expected.sequence, expected.steps, zlib.crc32(body), body)
                outbox.on_sent()
                twin.highest_sent = max(twin.highest_sent, expected.sequence)
                twin.num_sent += 1
        elif operation == "acknowledge":
            sequence = int(rng.integers(0, twin.sequence + 3))
            assert outbox.acknowledge(sequence) == twin.acknowledge(sequence)
        else:
            outbox.on_new_connection()
            twin.num_sent = 0
        assert len(outbox) == len(twin.kept)
        assert outbox.acknowledged_sequence == (twin.kept[0].sequence - 1 if twin.kept else twin.sequence)
        held = [segment for segment in twin.kept if segment.sequence <= twin.highest_sent]  # by some server, perhaps
        assert outbox.transitions_sent == len(held) * TRANSITIONS


def test_segment_that_cannot_be_encoded_leaves_its_steps_to_the_next() -> None:
    outbox = Outbox(7, SPEC, MAX_STEPS)
    bad = segment_of(1)
    bad.columns["priority"][SPEC.frame_stack - 1] = np.nan
    with pytest.raises(CorruptSegment):
        outbox.add(bad, 30, produced=1)
    assert len(outbox) == 0
    outbox.add(segment_of(2), 50, produced=2)
    message = outbox.next_to_send(1)
    assert message is not None
    assert (message.sequence, message.environment_steps) == (1, 50)


def test_transitions_of_a_segment_are_those_with_a_priority() -> None:
    assert transitions_of(segment_of(0)) == TRANSITIONS
