"""`python main.py status --page`: a page of this machine shows what each process of a fleet reports, over time."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.links import free_address
from tests.rigs.pages_served import ask, data_in
from tests.rigs.processes import Programs
from tests.rigs.statuses import Served, served

__all__ = ["served"]


@pytest.mark.ci
def test_page_shows_each_process_its_problems_and_its_metrics_over_time(served: Served, tmp_path: Path) -> None:
    served.content |= {
        "environment_frames": 1_000,
        "records": [["does", "learns", "", ""]],
        "metrics": {"charts/updates_per_second": 10.0},
        "warnings": ["slow"],
    }
    fleet = tmp_path / "fleet"
    fleet.write_text(f"{served.address}\nactor={free_address()}  # nobody listens\n")
    with Programs(tmp_path) as programs:
        program = programs.start("status", "--fleet", str(fleet), "--page")
        [port] = program.wait_until(lambda: re.findall(r"http://127\.0\.0\.1:(\d+)/", program.stdout))
        data = data_in(ask(int(port), "/").body.decode())
        assert {tile["name"]: tile["value"] for tile in data["tiles"]} == {"learner": "learns", "actor": "unreachable"}
        assert data["phase"] == "1 problem"
        assert [text.partition(":")[0] for text in data["warnings"]] == ["actor", "learner"]

        served.content |= {"environment_frames": 2_000, "metrics": {"charts/updates_per_second": 30.0}}

        def chart_of(title: str) -> dict[str, Any]:
            newest: dict[str, Any] = json.loads(ask(int(port), "/data.json").body)
            [chart] = [chart for chart in newest["charts"] if chart["title"] == title]
            curve: dict[str, Any] = chart["series"][0]
            return curve

        def speeds() -> list[float]:
            values: list[float] = chart_of("Speed of the learner")["y"]
            return values

        assert program.wait_until(lambda: len(speeds()) > 1)
        assert speeds() == [10.0, 30.0]

        metrics = {"eval/episodic_return": 5.0, "eval/frames": 1_500, "time": 1e30}
        served.content = {"role": "evaluator", "metrics": metrics}
        program.wait_until(lambda: chart_of("Return over experience")["x"])
        assert chart_of("Return over experience") == {"name": "evaluation", "x": [1_500], "y": [5]}
        program.send(signal.SIGINT)
        assert program.exit_code() == 130
    assert program.stderr == ""


def test_port_that_is_no_port_is_wrong_usage(tmp_path: Path) -> None:
    with Programs(tmp_path) as programs:
        program = programs.start("status", free_address(), "--page", "70000")
        assert program.exit_code() == 2
    assert "70000" in program.stderr
    assert len(program.stderr.splitlines()) == 1
