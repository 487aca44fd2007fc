"""Returns and lengths of games become means, over all games and by band of epsilon; an impossible message adds none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex_jax.links.episode_means import EpisodeMeans
from apex_jax.run.metrics import EPSILON_BANDS, NOISE_BANDS
from apex_jax.transport.messages import EpisodeStatistics
from tests.rigs.experience_link import Link, link

__all__ = ["link"]


def test_returns_are_averaged_over_all_games_and_by_band_of_epsilon(link: Link) -> None:
    server = link.server()
    stream = link.stream()
    epsilon, returns = np.array([0.4, 0.001, 0.3], np.float32), np.array([1, 20, 3], np.float32)
    stream.put_episodes(epsilon, returns, np.array([10, 20, 60], np.int32))
    server.until(lambda: server.service.episodes.length.count == 3)
    episodes = server.service.episodes
    assert (episodes.episode_return.result(), episodes.length.result()) == (8.0, 30.0)
    assert {band: mean.result() for band, mean in episodes.by_band.items()} == {
        "epsilon_above_0.2": 2.0,
        "epsilon_below_0.01": 20.0,
    }


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_return_that_is_no_number_is_counted_and_not_averaged(link: Link, value: float) -> None:
    server = link.server()
    peer = link.peer(server, peer_id=1)
    for numbers in ([value], [4.0]):
        peer.send(
            EpisodeStatistics(1, np.full(1, 0.4, np.float32), np.array(numbers, np.float32), np.ones(1, np.int32))
        )
    server.until(lambda: server.service.episodes.length.count == 1)
    assert server.service.episodes.episode_return.result() == 4.0
    assert +server.dropped == {"bad_statistics": 1}


GAME = st.tuples(st.sampled_from([0.0, 0.005, 0.03, 0.1, 0.9, 1.0]), st.integers(-100, 1000), st.integers(0, 10**6))


def message_of(games: list[tuple[float, int, int]]) -> EpisodeStatistics:
    epsilon, returns, steps = zip(*games, strict=True) if games else ((), (), ())
    return EpisodeStatistics(1, np.array(epsilon, np.float32), np.array(returns, np.float32), np.array(steps, np.int32))


def band_of(epsilon: float) -> str:
    """The slow twin: the name of the band of an epsilon that is no edge of a band."""
    if epsilon < 0.01:
        return "epsilon_below_0.01"
    if epsilon < 0.05:
        return "epsilon_0.01_to_0.05"
    return "epsilon_0.05_to_0.2" if epsilon < 0.2 else "epsilon_above_0.2"


@given(messages=st.lists(st.lists(GAME, max_size=5), max_size=5))
def test_means_are_of_all_games_however_they_are_spread_over_messages(messages: list[list[Any]]) -> None:
    means, games = EpisodeMeans(EPSILON_BANDS), [game for message in messages for game in message]
    assert all(means.add(message_of(message)) for message in messages)
    assert means.episode_return.count == means.length.count == len(games)
    if games:
        assert means.episode_return.result() == pytest.approx(np.mean([returned for _, returned, _ in games]))
        assert means.length.result() == pytest.approx(np.mean([steps for *_, steps in games]))
    by_band: dict[str, list[int]] = {}
    for epsilon, returned, _ in games:
        by_band.setdefault(band_of(epsilon), []).append(returned)
    assert {band: mean.count for band, mean in means.by_band.items()} == {b: len(of) for b, of in by_band.items()}
    for band, returns in by_band.items():
        assert means.by_band[band].result() == pytest.approx(np.mean(returns))


def test_games_with_noise_above_1_are_averaged_like_the_others() -> None:
    means = EpisodeMeans(NOISE_BANDS)
    assert means.add(message_of([(0.05, 900, 1_000), (1.5, 30, 1_000), (10.0, 10, 500), (0.3, 500, 100)]))
    assert (means.episode_return.result(), means.length.result()) == (360.0, 650.0)
    assert {band: mean.result() for band, mean in means.by_band.items()} == {
        "noise_below_0.1": 900.0,
        "noise_0.2_to_0.4": 500.0,
        "noise_above_0.4": 20.0,
    }


@pytest.mark.parametrize(("field", "value"), [
    ("exploration", -0.1), ("exploration", np.inf), ("exploration", np.nan),
    ("episode_return", -np.inf), ("episode_return", np.nan), ("episode_steps", -1),
])  # fmt: skip
def test_message_with_one_impossible_value_adds_none_of_its_games(field: str, value: float) -> None:
    means, message = EpisodeMeans(EPSILON_BANDS), message_of([(0.5, 7, 10), (0.5, 9, 20)])
    getattr(message, field)[1] = value
    assert not means.add(message)
    assert (means.episode_return.count, means.length.count, means.by_band) == (0, 0, {})
