"""The data of a page: every number of the live view, the curves, and what else the run directory holds."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import Config, EvaluatorConfig
from apex_jax.config.load import load
from apex_jax.operations import pages as module
from apex_jax.operations.live_view import rows
from apex_jax.operations.pages import MOST_POINTS, OtherRuns, RunLines, page_data, report_data
from apex_jax.operations.records import Record
from apex_jax.plotting.curves import read_run
from tests.rigs.live_views import progress
from tests.rigs.runs import START, make_run, write_lines


def data_of(directory: Path, **changes: object) -> dict[str, Any]:
    config = Config(run_directory=str(directory))
    return page_data(config, RunLines(config.directory).read(), progress(**changes))


def charts(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {chart["title"]: chart for chart in data["charts"]}


def test_curves_are_those_of_the_run_over_minutes_and_frames(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", [-20.0, -3.5, 4.25])
    expected, over = read_run(directory).evaluation, charts(data_of(directory))
    for title, x in (("Return over time", expected.minutes), ("Return over experience", expected.frames)):
        evaluation = over[title]["series"][0]
        assert (evaluation["x"], evaluation["y"]) == (x.tolist(), [-20.0, -3.5, 4.25])


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
    assert (data["video"], data["share"], data["tiles"], data["warnings"]) == (None, None, [], [])


def test_curve_of_many_points_keeps_its_ends(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", list(np.arange(3.0 * MOST_POINTS)))
    series = charts(data_of(directory))["Return over time"]["series"][0]
    assert len(series["x"]) == len(series["y"]) == MOST_POINTS
    assert (series["y"][0], series["y"][-1]) == (0.0, 3.0 * MOST_POINTS - 1)


def test_tiles_and_processes_hold_every_row_of_the_live_view(tmp_path: Path) -> None:
    data = data_of(tmp_path, training_return=None)
    shown = [Record(**tile) for tile in data["tiles"]]
    assert Record("frames", "12,345,678", "", "5,120 per second") in shown
    assert Record("training return", "none yet", "(exploring)") in shown
    for record in rows(Config(), progress(training_return=None)):
        assert record in shown or [record.name, record.value] in data["facts"]


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


def test_newest_runs_beside_it_with_its_task_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OTHERS", 2)
    runs = {"oldest": [1.0], "older": [2.0], "other-task": [3.0], "new": [4.0, 5.0], "run": [6.0]}
    for name, returns in runs.items():
        directory = make_run(tmp_path / name, returns)
        (directory / "evaluations.jsonl").touch()
    (tmp_path / "other-task" / "starts.jsonl").write_text(json.dumps({"time": START, "task": "Breakout-v5"}) + "\n")
    config = Config(run_directory=str(tmp_path / "run"))
    others = OtherRuns(config)
    data = page_data(config, RunLines(config.directory).read(), None, others.read())
    for title in ("Return over time", "Return over experience"):
        series = charts(data)[title]["series"]
        assert [each["name"] for each in series] == ["evaluation", "training, exploring", "new", "older"]
        assert series[2]["y"] == [4.0, 5.0]
    write_lines(tmp_path / "older" / "metrics" / "evaluator.jsonl", [(60.0, 1.0, {"eval/episodic_return": 7.0})])
    (tmp_path / "older" / "evaluations.jsonl").touch()
    compared = {name: curve.returns.tolist() for name, curve in others.read().items()}
    assert compared == {"older": [7.0], "new": [4.0, 5.0]}


def test_speed_of_the_actors_is_the_growth_of_the_frames(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    lines = [(s, 100 * s / 1e6, {"replay/size_transitions": 1.0}) for s in range(0, 600, 5)]  # in millions of frames
    write_lines(tmp_path / "metrics" / "replay.jsonl", lines)
    [series] = charts(data_of(tmp_path))["Speed of the actors"]["series"]
    assert len(series["y"]) > 100
    assert series["y"] == pytest.approx([100.0] * len(series["y"]))


def test_lines_of_a_long_run_are_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LINES", 10)
    (tmp_path / "metrics").mkdir()
    followed, lines = RunLines(str(tmp_path)), []
    for last in range(60):
        lines.append((float(last), last, {"losses/td_loss": last, "system/resident_memory_bytes": 1}))
        write_lines(tmp_path / "metrics" / "learner.jsonl", lines)
        seen = followed.read()
        assert len(seen) <= 10
        assert "system/resident_memory_bytes" not in seen[-1]
    assert [line["losses/td_loss"] for line in seen] == list(range(0, 60, 8))


@pytest.mark.parametrize(("video", "files", "chosen"), [
    ("", ["video.mp4", "video.gif"], "video.mp4"),
    ("", ["video.gif"], "video.gif"),
    ("game.gif", ["video.mp4", "game.gif"], "game.gif"),
])  # fmt: skip
def test_report_holds_the_newest_video_unless_it_is_large_or_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, video: str, files: list[str], chosen: str
) -> None:
    config = Config(run_directory=str(tmp_path), evaluator=EvaluatorConfig(video=video))
    assert page_data(config, [], progress())["video"] is None
    for name in files:
        (tmp_path / name).write_bytes(name.encode())
    data = page_data(config, [], progress())
    assert data["video"]["source"].startswith("video?")
    inlined = report_data(data, config)["video"]
    kind = "video/mp4" if chosen.endswith("mp4") else "image/gif"
    assert inlined["source"] == f"data:{kind};base64,{base64.b64encode(chosen.encode()).decode()}"
    assert inlined["caption"].startswith(f"{chosen}, written ")
    monkeypatch.setattr(module, "MOST_INLINED_BYTES", len(chosen) - 1)
    assert report_data(data, config)["video"] is None
    for name in files:
        (tmp_path / name).rename(tmp_path / f"{name}.elsewhere")
        (tmp_path / name).symlink_to(tmp_path / f"{name}.elsewhere")
    assert page_data(config, [], progress())["video"] is None
