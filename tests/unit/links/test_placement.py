"""Actors fill the replay servers evenly, leave those that are gone, and move no more than needed."""

from __future__ import annotations

import numpy as np
import pytest

from apex_jax.links.placement import NOWHERE, Placement


def placed(placement: Placement, actors: dict[int, int], environments: int = 16) -> dict[int, int]:
    """Places each actor, whose shard `actors` holds, once more."""
    return {actor: placement.place(environments, shard) for actor, shard in actors.items()}


@pytest.mark.parametrize(("shards", "actors", "counts"), [(1, 5, [5]), (2, 5, [2, 3]), (3, 9, [3, 3, 3])])
def test_new_actors_fill_the_shards_evenly(shards: int, actors: int, counts: list[int]) -> None:
    where = placed(Placement(shards), dict.fromkeys(range(actors), NOWHERE))
    assert sorted(np.bincount(list(where.values()), minlength=shards)) == counts


def test_actors_of_many_environments_count_as_many() -> None:
    placement = Placement(2)
    assert placement.place(64, NOWHERE) == 0
    assert [placement.place(16, NOWHERE) for _ in range(4)] == [1, 1, 1, 1]


def test_actors_stay_where_they_are_while_the_shards_are_even() -> None:
    placement = Placement(2)
    where = placed(placement, dict.fromkeys(range(5), NOWHERE))
    for _ in range(3):
        assert placed(placement, where) == where


def test_actors_leave_a_closed_shard_evenly_and_come_back_once_it_is_open() -> None:
    placement = Placement(3)
    first = placed(placement, dict.fromkeys(range(12), NOWHERE))
    placement.closed = frozenset({1})
    away = placed(placement, first)
    assert np.bincount(list(away.values()), minlength=3).tolist() == [6, 0, 6]
    assert all(away[actor] == shard for actor, shard in first.items() if shard != 1)
    placement.closed = frozenset()
    back = placed(placement, placed(placement, away))
    assert np.bincount(list(back.values()), minlength=3).tolist() == [4, 4, 4]


def test_nobody_moves_if_all_shards_are_closed() -> None:
    placement = Placement(2)
    where = placed(placement, dict.fromkeys(range(4), NOWHERE))
    placement.closed = frozenset({0, 1})
    assert placed(placement, where) == where


def test_learner_that_restarts_learns_where_actors_are_and_moves_none_of_an_even_fleet() -> None:
    placement = Placement(2)
    where = {actor: placement.add(16, actor % 2) for actor in range(6)}
    assert placed(placement, where) == where
    assert placement.add(16, 2) == placement.add(16, NOWHERE) == NOWHERE


def test_actor_that_left_counts_no_more() -> None:
    placement = Placement(2)
    placed(placement, dict.fromkeys(range(4), NOWHERE))
    placement.remove(16, 1)
    placement.remove(16, NOWHERE)
    assert placement.place(16, NOWHERE) == 1


def test_nobody_moves_to_make_it_even_before_all_have_joined() -> None:
    placement = Placement(2)
    assert [placement.place(16, placement.add(16, 0), may_balance=False) for _ in range(3)] == [0, 0, 0]
    assert placement.place(16, NOWHERE, may_balance=False) == 1
    assert placement.place(16, 0) == 1
