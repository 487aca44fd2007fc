"""What a plot of runs shows, the statistics in it, and the end of a game as a .gif."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from apex_jax.host.errors import UsageError
from apex_jax.plotting.curves import Group, bootstrap_interval, grouped, interquartile_mean, read_run
from apex_jax.plotting.plot import draw_groups, draw_run, running_mean, table
from apex_jax.plotting.video import GIF_SECONDS, video_paths, video_writer
from tests.rigs.recordings import RATE
from tests.rigs.runs import make_run, plain_run


def drawn(groups: Sequence[Group], folder: Path) -> Figure:
    """Returns the figure behind the picture."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        patch.setattr("apex_jax.plotting.curves.RESAMPLES", 20)
        draw_groups(groups, folder / "x.svg")
    [figure] = figures
    return figure


def test_picture_of_a_run_and_of_groups_is_written_whole(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [-20.0, 3.0])
    make_run(tmp_path / "b", [-20.0, 5.0], ("seed=2",))
    runs = [read_run(tmp_path / name) for name in "ab"]
    draw_run(runs[0], tmp_path / "curves.png")
    draw_groups(grouped(runs), tmp_path / "both.png")
    draw_groups([Group("x", [plain_run([1.0, 2.0]), plain_run([300.0], "Seaquest-v5")])], tmp_path / "games.png")
    draw_run(plain_run([], "Catch-v0"), tmp_path / "empty.png")
    for name in ("curves.png", "both.png", "games.png", "empty.png"):
        with Image.open(tmp_path / name) as image:
            assert image.size == (1100, 420)
            assert len(image.convert("RGB").getcolors(2**20) or ()) > 50, "something is drawn"
    assert not list(tmp_path.glob(".*"))


def test_running_mean_looks_back_only() -> None:
    returns = np.arange(60.0)
    smooth = running_mean(plain_run(list(returns)).evaluation).returns
    np.testing.assert_allclose(smooth, [0.0, 0.5, *(returns[2:] - 1)])
    np.testing.assert_array_equal(running_mean(plain_run([3.0, 1.0]).evaluation).returns, [3.0, 1.0])
    assert running_mean(plain_run([]).evaluation).returns.size == 0


def test_table_has_a_row_for_each_group_with_raw_and_normalised_scores() -> None:
    several_games = Group("c", [plain_run([14.6]), plain_run([42054.7], "Seaquest-v5")])
    groups = [Group("a", [plain_run([0.0, r]) for r in (14.6, 14.6, 14.6)]), Group("b", [plain_run([-20.7])])]
    text = table([*groups, several_games])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[0][:5] == ["runs", "n", "frames (median)", "minutes (median)", "last return: each"]
    assert rows[2] == ["a", "3", "2.00 M", "2.0", "14.6, 14.6, 14.6", "14.6", "14.6 [14.6, 14.6]", "100%"]
    assert rows[3] == ["b", "1", "1.00 M", "1.0", "-20.7", "-20.7", "-20.7", "0%"]
    assert rows[4][4:] == ["14.6, 42054.7", "", "", "100%"]


def test_tasks_without_a_human_score_are_drawn_and_listed_each_on_its_own(tmp_path: Path) -> None:
    runs = [plain_run([1.0, 2.0]), plain_run([400.0, 450.0], "CartPole-v1"), plain_run([0.5, 0.955], "Catch-v0")]
    groups = [Group("a", runs), Group("b", runs[1:2])]
    panels = drawn(groups, tmp_path).axes
    assert [panel.get_ylabel() for panel in panels[::2]] == ["return"] * 3
    shown = [[list(map(float, np.asarray(line.get_ydata()))) for line in panel.get_lines()] for panel in panels[::2]]
    assert shown == [[[400.0, 450.0]] * 2, [[0.5, 0.955]], [[1.0, 2.0]]]
    rows = [line.split("|")[1].strip() + line.split("|")[5] for line in table(groups).splitlines()[2:]]
    assert rows == ["a, CartPole-v1 450.0 ", "b, CartPole-v1 450.0 ", "a, Catch-v0 0.955 ", "a, Pong-v5 2.0 "]


# Statistics over runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scores", "mean"), [
    ([5.0], 5.0),
    ([1.0, 3.0], 2.0),
    ([0.0, 6.0, 60.0], 0 / 6 + 6 * 4 / 6 + 60 / 6),
    ([100.0, 1.0, 2.0, -50.0], 1.5),
    ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 700.0], 3.5),
])  # fmt: skip
def test_interquartile_mean_is_that_of_the_middle_half(scores: list[float], mean: float) -> None:
    assert interquartile_mean(np.array(scores)) == pytest.approx(mean)


def test_interval_contains_the_statistic_and_narrows_with_more_runs() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for size in (5, 50):
        scores = rng.normal(size=(size, 1))
        low, high = bootstrap_interval([scores], interquartile_mean, np.random.default_rng(2))
        assert low[0] < interquartile_mean(scores)[0] < high[0]
        widths.append(high[0] - low[0])
    assert widths[1] < widths[0] / 2


def test_bootstrap_resamples_runs_within_their_game() -> None:
    strata = [np.zeros(4), np.full(4, 10.0)]
    low, high = bootstrap_interval(strata, interquartile_mean, np.random.default_rng(0))
    assert (float(low), float(high)) == (5.0, 5.0)


# Videos -----------------------------------------------------------------------------------------------------------


def test_gif_shows_the_end_of_a_long_game(tmp_path: Path) -> None:
    with video_writer(tmp_path / "game.gif", RATE) as add:
        for i in range(int(GIF_SECONDS * RATE) + 200):
            add(np.full((8, 8, 3), i % 256, np.uint8))
    with Image.open(tmp_path / "game.gif") as image:
        frames = getattr(image, "n_frames", 1)
        image.seek(frames - 1)
        last = np.asarray(image.convert("RGB"))[0, 0]
    assert frames == GIF_SECONDS * RATE / 2
    assert abs(int(last[0]) - (int(GIF_SECONDS * RATE) + 199) % 256) <= 4


@pytest.mark.parametrize("sides", [(401, 601), (300, 601), (35, 7)])
def test_pictures_with_odd_sides_are_written_in_both_formats(sides: tuple[int, int], tmp_path: Path) -> None:
    with video_writer(tmp_path / "game", RATE) as add:
        for level in (0, 200):
            add(np.full((*sides, 3), level, np.uint8))
    with av.open(str(tmp_path / "game.mp4")) as film:
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    factor = 2 if sides[0] < 300 else 1
    assert [frame.shape for frame in frames] == [(*(-(-factor * side // 2) * 2 for side in sides), 3)] * 2
    assert (tmp_path / "game.gif").stat().st_size > 0


@pytest.mark.parametrize(("name", "message"), [
    ("nowhere/game.mp4", "nowhere"),
    ("game.avi", ".mp4 and .gif"),
])  # fmt: skip
def test_unwritable_video_is_reported_before_a_game_is_played(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        video_paths(tmp_path / name)
