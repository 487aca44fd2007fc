"""The reference scores: complete, named as EnvPool names the games, and true to the published summary."""

from __future__ import annotations

import statistics

import envpool
import pytest

from apex_jax.environments.atari_scores import ATARI_SCORES, human_normalized_score


def test_every_game_is_an_envpool_task() -> None:
    tasks = set(envpool.list_all_envs())
    assert [game for game in ATARI_SCORES if f"{game}-v5" not in tasks] == []


def test_table_reproduces_the_published_median_of_57_games() -> None:
    scores = [human_normalized_score(game, row.ape_x) for game, row in ATARI_SCORES.items()]
    assert len(scores) == 57
    assert statistics.median(score for score in scores if score is not None) == pytest.approx(4.34, abs=0.005)


@pytest.mark.parametrize(("episode_return", "score"), [(-20.7, 0.0), (14.6, 1.0), (20.9, 41.6 / 35.3)])
def test_random_play_is_0_and_the_human_tester_is_1(episode_return: float, score: float) -> None:
    assert human_normalized_score("Pong-v5", episode_return) == pytest.approx(score)
    assert human_normalized_score("Pong", episode_return) == pytest.approx(score)


@pytest.mark.parametrize("task", ["CartPole-v1", "Catch-v0", "Adventure-v5", ""])
def test_task_outside_the_57_games_has_no_normalized_score(task: str) -> None:
    assert human_normalized_score(task, 1.0) is None
