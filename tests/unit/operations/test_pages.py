"""The page of a run: one HTML file, escaped and self-contained, served to this machine only and kept as a report."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from apex_jax.config import Config
from apex_jax.host.errors import RunError
from apex_jax.operations.pages import RunPage, document, report_data, write_report
from apex_jax.operations.progress import EvaluationSummary
from tests.rigs.live_views import progress
from tests.rigs.pages_served import ask, data_in
from tests.rigs.ports import free_port
from tests.rigs.processes import wait_until
from tests.rigs.runs import make_run

EVIL = '</script><script>alert("x")</script><!-- <img src=x onerror=alert(1)> & \u2028 {{data}}'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_directory=str(make_run(tmp_path / "run", [-20.0, 3.0])), page_port=free_port())


@pytest.fixture
def page(config: Config) -> Iterator[RunPage]:
    with RunPage(config) as page:
        page.update(progress(warnings=("q-values grow",)))
        yield page


# The document -----------------------------------------------------------------------------------------------------


def test_texts_of_the_run_cannot_end_the_data_of_the_page() -> None:
    html = document({"task": EVIL})
    assert data_in(html) == {"task": EVIL}
    assert html.count("</script>") == document({"task": ""}).count("</script>")
    assert "<img" not in html


def test_page_refers_to_nothing_outside_itself_and_takes_no_text_for_html() -> None:
    html = document({})
    assert not re.findall(r"https?:|[\"'(]//|url\(|@import|\bsrc=|srcset", html)
    assert re.findall(r'href="([^"]*)"', html) == ["data:,"]  # an empty icon, so that browsers ask for none
    assert re.findall(r'fetch\("?([^")]*)', html) == ["video.source", "data.json"]
    assert "default-src 'none'" in html
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", html)


# The report -------------------------------------------------------------------------------------------------------


def test_report_is_the_page_with_the_same_data(config: Config, page: RunPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    Path(config.directory, "video.mp4").write_bytes(b"video")
    page.finish(progress(warnings=("q-values grow",)))
    report = Path(config.directory, "report.html").read_text("utf-8")
    assert "q-values grow" in report
    served = ask(config.page_port, "/").body.decode()
    assert data_in(report) == report_data(data_in(served), config)
    assert report == document(data_in(report))
    assert served == document(data_in(served))


def test_report_of_a_role_without_a_supervisor_holds_the_curves(config: Config) -> None:
    write_report(config)
    data = data_in(Path(config.directory, "report.html").read_text("utf-8"))
    assert data["charts"][0]["series"][0]["y"] == [-20.0, 3.0]


def test_report_is_written_after_each_evaluation_and_at_the_end(config: Config, page: RunPage) -> None:
    report = Path(config.directory, "report.html")
    page.update(progress())  # no new evaluation
    for number in (1.0, 2.0):
        assert not report.exists()
        page.update(progress(latest_evaluation=EvaluationSummary(number, None, 99_000)))
        wait_until(report.exists)
        report.unlink()
    page.finish(progress(reached_limits=("total_updates=9",)))
    data = data_in(report.read_text("utf-8"))
    assert (data["phase"], data["poll_seconds"]) == ("finished", 0)
    assert [path.name for path in report.parent.glob("*report*")] == ["report.html"]


def test_report_that_cannot_be_written_is_one_warning(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    write_report(replace(config, run_directory=config.directory + "/none"))
    [record] = caplog.records
    assert "no report.html: " in record.message
    assert not record.exc_info


# The server -------------------------------------------------------------------------------------------------------


def test_page_its_data_and_the_video_are_served_and_nothing_else(config: Config, page: RunPage) -> None:
    port = config.page_port
    assert page.address == f"http://127.0.0.1:{port}/"
    assert ask(port, "/video").status == 404  # there is none
    Path(config.directory, "video.mp4").write_bytes(b"video")
    for path, kind in (("/", "text/html"), ("/data.json", "application/json"), ("/video?1", "video/mp4")):
        reply = ask(port, path)
        assert (reply.status, reply.headers["Content-Type"].partition(";")[0]) == (200, kind)
        assert not [name for name in reply.headers if name.startswith("Access-Control")]
        assert ask(port, path, method="HEAD").status == 200
        assert ask(port, path, method="POST").status == 405
    for path in ("/status", "/config.yaml", "/../config.yaml", "/video/", "/report.html", "/page.html"):
        assert ask(port, path).status == 404


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1", 200), ("localhost:8000", 200), ("LOCALHOST", 200), ("", 403), ("evil.example", 403),
    ("127.0.0.1.evil.example", 403), ("evil.example:127", 403), ("localhost.evil.example:80", 403), ("0.0.0.0", 403),
])  # fmt: skip
def test_only_names_of_this_machine_are_answered(config: Config, page: RunPage, host: str, status: int) -> None:
    for path in ("/", "/data.json", "/video", "/other"):
        assert ask(config.page_port, path, host=host).status == (
            404 if status == 200 and len(path) in (5, 6) else status
        )


def test_port_0_is_a_free_one_and_minus_1_is_no_page(config: Config) -> None:
    with RunPage(replace(config, page_port=0)) as first, RunPage(replace(config, page_port=0)) as second:
        assert first.address != second.address
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9][0-9]+/", first.address)
    for _ in range(2):  # the end of a run frees its port
        with RunPage(config), pytest.raises(ConnectionRefusedError):  # Linux routes all of 127.0.0.0/8 to this machine
            socket.create_connection(("127.0.0.2", config.page_port))
    with RunPage(replace(config, page_port=-1)) as page:
        page.finish(progress())
    assert page.address == ""
    assert Path(config.directory, "report.html").exists()


def test_port_in_use_is_a_one_line_error_with_the_fix(config: Config) -> None:
    with socket.create_server(("127.0.0.1", config.page_port)), pytest.raises(RunError) as caught, RunPage(config):
        raise AssertionError("bound twice")
    assert f"page_port={config.page_port} " in str(caught.value)
