"""The data of a page: every number of the live view, the curves, and what else the run directory holds."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import Config
from apex_jax.operations import page_data as module
from apex_jax.operations.live_view import rows
from apex_jax.operations.page_data import MOST_POINTS, RunLines, page_data, report_data
from apex_jax.plotting.curves import read_run
from apex_jax.settings import load
from apex_jax.workers.evaluation import Evaluation
from tests.rigs.live_views import progress
from tests.rigs.runs import START, make_run, write_lines


def data_of(directory: Path, **changes: object) -> dict[str, Any]:
    config = Config(run_directory=str(directory))
    return page_data(config, RunLines(config.directory).read(), progress(**changes))


def charts(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {chart["title"]: chart for chart in data["charts"]}


def test_tiles_and_processes_hold_every_row_of_the_live_view(tmp_path: Path) -> None:
    data = data_of(tmp_path, training_return=None)
    tiles = {tile["name"]: (tile["value"], tile["detail"]) for tile in data["tiles"]}
    assert tiles["frames"] == ("12,345,678", "of 40,000,000, 5,120 per second")
    assert tiles["time"] == ("1:02:03", "about 1:30:00 left")
    assert tiles["training return"] == ("none yet", "(exploring)")
    shown = {name: f"{value} {detail}".strip() for name, (value, detail) in tiles.items()} | dict(data["facts"])
    for name, text in rows(progress(training_return=None)):
        assert shown[name].replace(",", "") == text.replace(",", "")


def test_curves_are_those_of_the_run_over_minutes_and_frames(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", [-20.0, -3.5, 4.25])
    expected, over = read_run(directory).evaluation, charts(data_of(directory))
    for title, x in (("Return over time", expected.minutes), ("Return over experience", expected.frames)):
        evaluation = over[title]["series"][0]
        assert (evaluation["x"], evaluation["y"]) == (x.tolist(), [-20.0, -3.5, 4.25])


def test_loss_and_speed_are_curves_and_values_without_a_logarithm_are_left_out(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", [1.0])
    lines = [
        (60.0 * i, float(i), {"losses/td_loss": loss, "charts/updates_per_second": 10.0 * i, "learner/updates": i})
        for i, loss in enumerate([0.5, 0.0, None, 0.25], 1)
    ]
    write_lines(directory / "metrics" / "learner.jsonl", lines)
    over = charts(data_of(directory))
    assert over["Loss of the learner"]["series"][0] == {"name": "", "x": [1.0, 4.0], "y": [0.5, 0.25]}
    assert over["Speed of the learner"]["series"][0]["y"] == [10.0, 20.0, 30.0, 40.0]
    assert over["Speed of the actors"]["series"][0] == {"name": "", "x": [], "y": []}


def test_speed_of_the_actors_is_the_sum_over_the_replay_servers(tmp_path: Path) -> None:
    rates = {
        "replay": [(60, 100.0), (62, 110.0), (64, 120.0), (66, 130.0), (68, 140.0)],
        "spare": [(61, 30.0)],  # lost after this one
        "replay-2": [],
    }
    (tmp_path / "metrics").mkdir()
    for name, values in rates.items():
        lines = [(seconds, 1.0, {"charts/environment_frames_per_second": rate}) for seconds, rate in values]
        write_lines(tmp_path / "metrics" / f"{name}.jsonl", lines)
    config = Config(run_directory=str(tmp_path), metrics_interval_seconds=2.0)
    data = page_data(config, RunLines(config.directory).read(), progress())
    assert charts(data)["Speed of the actors"]["series"][0]["y"] == [100.0, 130.0, 140.0, 150.0, 160.0, 140.0]


@pytest.mark.parametrize("minutes", [9, 10, 12, 17, 40])
def test_speed_of_the_actors_includes_all_replay_servers_on_long_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    monkeypatch.setattr(module, "MOST_LINES", 100)
    (tmp_path / "metrics").mkdir()
    for name, rate, first in (("replay", 100.0, 0), ("replay-1", 30.0, 3)):
        times = range(first, 60 * minutes, 5)
        lines = [(float(i), i, {"charts/environment_frames_per_second": rate}) for i in times]
        write_lines(tmp_path / "metrics" / f"{name}.jsonl", lines)
    [series] = charts(data_of(tmp_path))["Speed of the actors"]["series"]
    assert set(series["y"][2:]) == {130.0}


def test_page_names_the_machine_and_the_spread_of_the_newest_evaluation(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", [])
    start = {"time": START, "cores": 16, "processor": "AMD EPYC", "accelerator": "NVIDIA H100"}
    (directory / "starts.jsonl").write_text(json.dumps(start) + "\n")
    evaluations = [
        Evaluation(np.array(returns), i, 100 * i, 2.5 * i)
        for i, returns in enumerate([[0.0, 0.0], [-1.0, 1.0, 1.0, 0.0]], 1)
    ]
    write_lines(
        directory / "metrics" / "evaluator.jsonl",
        [(60.0 * each.updates, each.updates, each.values("Catch-v0")) for each in evaluations],
    )
    facts = dict(data_of(directory)["facts"])
    assert facts["machine"] == "16 cores of AMD EPYC, NVIDIA H100"
    spread = "4 games in 5.0 s, returns from -1.0 to 1.0, standard deviation 0.8292"
    assert facts["newest evaluation"] == spread


def test_page_holds_nothing_of_the_machine_that_a_reader_need_not_know(tmp_path: Path) -> None:
    settings = ("storage.url=s3://hidden/x", "security.keys=/hidden/keys", "seed=3")
    start = {"time": START, "command": f"apex-jax {' '.join(settings)} run_directory=/hidden/run"}
    (tmp_path / "hidden" / "run").mkdir(parents=True)
    (tmp_path / "hidden" / "run" / "starts.jsonl").write_text(json.dumps(start) + "\n")
    config = load(None, [*settings, f"run_directory={tmp_path / 'hidden' / 'run'}"])
    data = page_data(config, [], progress())
    assert "hidden" not in json.dumps(data)
    assert ["command", "apex-jax seed=3"] in data["facts"]
    assert ["seed", "3", "1"] in data["settings"]


def test_page_of_a_run_without_files_is_complete_json(tmp_path: Path) -> None:
    config = Config(run_directory=str(tmp_path / "none"))
    data = page_data(config, RunLines(config.directory).read(), None)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["film"], data["share"], data["tiles"], data["warnings"]) == (None, None, [], [])


def test_lines_of_a_long_run_are_thinned_and_the_newest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LINES", 10)
    (tmp_path / "metrics").mkdir()
    path = tmp_path / "metrics" / "learner.jsonl"
    followed, seen = RunLines(str(tmp_path)), []
    for last in range(1, 60):
        write_lines(
            path, [(float(i), i, {"losses/td_loss": i, "system/resident_memory_bytes": 1}) for i in range(last)]
        )
        seen = followed.read()
        assert len(seen) <= 10
        assert seen[-1]["losses/td_loss"] == last - 1
    assert not any("system/resident_memory_bytes" in line for line in seen)
    steps = np.array([line["step"] for line in seen])
    assert (np.diff(steps) > 0).all()


def test_curve_of_many_points_keeps_its_ends(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", list(np.arange(3.0 * MOST_POINTS)))
    [series, _] = charts(data_of(directory))["Return over time"]["series"]
    assert len(series["x"]) == len(series["y"]) == MOST_POINTS
    assert (series["y"][0], series["y"][-1]) == (0.0, 3.0 * MOST_POINTS - 1)


@pytest.mark.parametrize(("video", "files", "chosen"), [
    ("", ["video.mp4", "video.gif"], "video.mp4"),
    ("", ["video.gif"], "video.gif"),
    ("game.gif", ["video.mp4", "game.gif"], "game.gif"),
    ("", [], None),
])  # fmt: skip
def test_report_holds_the_newest_film(tmp_path: Path, video: str, files: list[str], chosen: str | None) -> None:
    for name in files:
        (tmp_path / name).write_bytes(name.encode())
    config = Config(run_directory=str(tmp_path))
    config = config.replace(evaluator=type(config.evaluator)(video=video))
    data = page_data(config, [], progress())
    film = report_data(data, config)["film"]
    assert (film is None) == (chosen is None) == (data["film"] is None)
    if film and chosen:
        kind = "video/mp4" if chosen.endswith("mp4") else "image/gif"
        assert film["source"] == f"data:{kind};base64,{base64.b64encode(chosen.encode()).decode()}"
        assert data["film"]["source"].startswith("film?")
        assert film["caption"].startswith(f"{chosen}, written ")


def test_large_film_and_a_link_are_left_out_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_INLINED_BYTES", 10)
    config, film = Config(run_directory=str(tmp_path)), tmp_path / "video.mp4"
    film.write_bytes(bytes(11))
    data = page_data(config, [], progress())
    assert data["film"] is not None
    assert report_data(data, config)["film"] is None
    film.rename(tmp_path / "elsewhere")
    film.symlink_to(tmp_path / "elsewhere")
    assert page_data(config, [], progress())["film"] is None
