"""Values that tests of films share."""

from __future__ import annotations

from fractions import Fraction

RATE = Fraction(15)  # frames a second
SMALL = ("network.channels=[4,4,4]", "network.hidden_units=8")
PONG = (*SMALL, "environment.task=Pong-v5", "evaluator.max_episode_frames=160", "evaluator.episodes=2")
