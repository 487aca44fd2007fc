"""The page of a run in a browser: drawn at any width in both colour schemes, from one file and nothing else."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax.config import Config
from apex_jax.operations import pages
from apex_jax.operations.pages import OtherRuns, RunLines, RunPage, page_data, write_report
from apex_jax.plotting.video import video_writer
from tests.rigs.live_views import progress
from tests.rigs.recordings import RATE
from tests.rigs.runs import make_run, write_lines

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian, Ubuntu: apt install chromium)"),
]
SCHEMES = {"dark": 0, "light": 1}  # of Chromium's setting
EVIL = '<img src=x onerror="document.title=1"></script><b>'
WARNING = "a/very/long/path/without/a/single/space/" * 12
MEASURE = """<script>
addEventListener("load", () => {
  const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
  const lengths = () => [...document.querySelectorAll("#charts .card")].map((card) =>
    [...card.querySelectorAll("path")].map((path) => path.getTotalLength()));
  const curves = lengths();
  document.querySelectorAll("#charts .card:first-child .entry")[2].click();
  const hidden = lengths().map((paths) => paths.length);
  const tell = () => parent.postMessage({
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    page: getComputedStyle(document.body).backgroundColor,
    curves, hidden,
    outside: [...document.querySelectorAll("svg text")].filter((text) => {
      const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
      return inner.left < outer.left - 1 || inner.right > outer.right + 1;
    }).map((text) => text.textContent),
    task: document.querySelector("h1").textContent,
    film: document.querySelector(".media")?.naturalWidth,
    pointed: document.querySelector(".at").textContent,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name.slice(0, 5)),
  }, "*");
  const tenth = svg.querySelector(".curve:not(.behind)").getAttribute("d").split(/[ML]/)[10];
  const values = {clientX: box.left + parseFloat(tenth), clientY: box.top + 50, bubbles: true};
  const attempt = (left) => {
    svg.dispatchEvent(new PointerEvent("pointermove", values));
    left && !document.querySelector(".media")?.naturalWidth ? setTimeout(attempt, 100, left - 1) : tell();
  };
  attempt(50);
});
</script>"""


def dumped(page: str, folder: Path, scheme: str = "light") -> str:
    """Returns the elements of a page as Chromium has drawn it; fails if it writes an error to its console."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=10000"]
    command += ["--proxy-server=127.0.0.1:9", "--proxy-bypass-list=127.0.0.1", "--window-size=1600,1200"]
    command += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--dump-dom", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


def measured(report: Path, folder: Path, width: int, scheme: str) -> dict[str, Any]:
    """Returns what a script in a copy of the report measures in a frame of this width; windows have a least width."""
    copy = folder / f"copy-{width}-{scheme}.html"
    copy.write_text(report.read_text("utf-8").replace("</body>", f"{MEASURE}</body>"), "utf-8")
    write = "document.querySelector('pre').textContent = JSON.stringify(event.data)"
    frame = f'<iframe src="{copy.name}" style="border: 0; width: {width}px; height: 900px"></iframe>'
    (folder / "frame.html").write_text(
        f"<body style='margin: 0'>{frame}<pre></pre><script>onmessage = (event) => {{ {write} }}</script>", "utf-8"
    )
    [text] = re.findall("<pre>(.+)</pre>", dumped(f"file://{folder}/frame.html", folder, scheme))
    values: dict[str, Any] = json.loads(html.unescape(text))
    return values


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """The report of a run with curves, warnings and a film."""
    directory = make_run(tmp_path / "run", list(np.linspace(-21.0, 1_234.5, 30)), ("environment.task=Pong-v5",))
    lines = [
        (30.0 * i, i / 2, {"losses/td_loss": 3.0 / i, "charts/updates_per_second": 42.0 + i % 3, "learner/updates": i,
                           "replay/size_transitions": 5_000.0 + i, "charts/episodic_return": -21.0 + i,
                           "losses/q_values": i, "losses/gradient_norm": 1 / i, "charts/episodic_length": 2 * i,
                           "charts/info_level": i, "own/entropy": -i})
        for i in range(1, 61)
    ]  # fmt: skip
    write_lines(directory / "metrics" / "learner.jsonl", lines)
    with video_writer(directory / "video.gif", RATE) as add:
        for i in range(3):
            add(np.full((210, 160, 3), 60 * i, np.uint8))
    make_run(tmp_path / "other", list(np.linspace(-21.0, 800.0, 20)))
    (tmp_path / "other" / "evaluations.jsonl").touch()
    config = Config(run_directory=str(directory))
    shown = progress(share=0.4, warnings=(WARNING, EVIL))
    data = page_data(config, RunLines(config.directory).read(), shown, OtherRuns(config).read())
    write_report(config, lambda: {**data, "task": EVIL})
    return directory / "report.html"


@pytest.mark.parametrize("width", [400, 1400])
def test_report_opened_from_disk_shows_every_curve_and_fits_the_width(report: Path, tmp_path: Path, width: int) -> None:
    pages = {}
    for scheme in SCHEMES:
        seen = measured(report, tmp_path, width, scheme)
        assert (seen["width"], seen["overflow"], seen["outside"]) == (width, 0, [])
        assert [len(curves) for curves in seen["curves"]] == [3, 3, 1, 1, 1, 1, 1, 1, 1, 1]
        assert seen["hidden"] == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1], "a click on its name hides a run"
        assert min(length for curves in seen["curves"] for length in curves) > width / 8
        assert seen["task"] == EVIL
        assert seen["film"] > 100
        assert seen["pointed"] == "at 10 minutes"
        assert set(seen["requests"]) <= {"data:", "blob:"}
        pages[scheme] = sum(map(int, re.findall(r"\d+", seen["page"])[:3]))
    assert pages["dark"] < 100 < 600 < pages["light"]


def test_served_page_asks_for_new_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = iter(range(1_000))

    def with_new_phase(*arguments: Any) -> dict[str, Any]:
        return {**page_data(*arguments), "phase": f"phase {next(phases)}"}

    monkeypatch.setattr(pages, "page_data", with_new_phase)
    with RunPage(Config(run_directory=str(make_run(tmp_path / "run", [1.0, 2.0])))) as page:
        page.update(progress())
        shown = dumped(page.address, tmp_path)
    [number] = re.findall(r'<span id="phase">phase (\d+)</span>', shown)
    assert int(number) >= 2
    assert "nothing measured yet" in shown  # of the loss
