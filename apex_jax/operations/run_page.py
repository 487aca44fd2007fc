"""The page of a local run at an address of this machine, and the same page as a file, `report.html`."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from apex_jax.config import Config
from apex_jax.host.disk import atomic_write, open_regular
from apex_jax.host.errors import RunError
from apex_jax.operations.page_data import MEDIA, OtherRuns, RunLines, page_data, report_data, video_of
from apex_jax.operations.progress import RunProgress
from apex_jax.transport.http_link import BACKLOG, Answer, HttpServer

_log = logging.getLogger(__name__)

REPORT_NAME = "report.html"  # in the run directory
HOST = "127.0.0.1"


def document(data: Mapping[str, Any]) -> str:
    """Returns the page as one HTML file with its data; the page shows texts of the data as text, not as HTML."""
    text = json.dumps(data, allow_nan=False).replace("<", r"\u003c")  # so that no text ends the script element
    return Path(__file__).with_name("page.html").read_text("utf-8").replace("{{data}}", text)


def write_report(config: Config, data: Callable[[], Mapping[str, Any]] | None = None) -> None:
    """Writes `report.html` to the run directory. Logs errors instead of raising them.

    `data`: returns the data of the page; None = only data from the files of the run.
    """
    try:
        lines, others = RunLines(config.directory), OtherRuns(config)
        content = data() if data is not None else page_data(config, lines.read(), None, others.read())
        with atomic_write(Path(config.directory, REPORT_NAME)) as half:
            half.write_text(document(report_data(content, config)), "utf-8")
    except Exception as error:  # the run goes on without it
        _log.warning("no %s: %s", REPORT_NAME, error)


class RunPage:
    """A context that serves the page of a run, and writes its report after each evaluation and at the end."""

    def __init__(self, config: Config):
        self.address = ""  # of the page, empty = there is none
        self._config = config
        self._lines, self._others = RunLines(config.directory), OtherRuns(config)
        self._lock = threading.Lock()  # of both
        self._progress: RunProgress | None = None
        self._server: HttpServer | None = None

    def __enter__(self) -> RunPage:
        """Binds the port. Raises RunError if that fails."""
        if self._config.page_port >= 0:
            fix = "choose another one, 0 for any that is free, or -1 for no page"
            self._server, self.address = serve_page(self._config.page_port, "page_port=", fix, self._answer)
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    def update(self, progress: RunProgress) -> None:
        """Shows `progress` from now on."""
        before, self._progress = self._progress, progress
        if before is not None and progress.latest_evaluation != before.latest_evaluation:
            write_report(self._config, self._data)

    def finish(self, progress: RunProgress) -> None:
        """Shows the last progress of the run, and writes the report."""
        warnings = self._progress.warnings if self._progress is not None else ()
        phase = "finished" if progress.reached_limits else "stopped"
        self._progress = replace(progress, phase=phase, roles={}, seconds_left=None, warnings=warnings)
        write_report(self._config, self._data)

    def _data(self) -> dict[str, Any]:
        with self._lock:
            return page_data(self._config, self._lines.read(), self._progress, self._others.read())

    def _answer(self, path: str) -> Answer | None:
        video = video_of(self._config) if path == "/video" else None
        if video is not None:
            return Answer(200, MEDIA[video.suffix], open(open_regular(video, os.O_RDONLY), "rb"))
        return answer_of_page(path, self._data)


def answer_of_page(path: str, data: Callable[[], Mapping[str, Any]]) -> Answer | None:
    """Answers a request for a page, or for its data."""
    if path == "/":
        return Answer(200, "text/html; charset=utf-8", document(data()).encode())
    is_data = path == "/data.json"
    return Answer(200, "application/json", json.dumps(data(), allow_nan=False).encode()) if is_data else None


def serve_page(port: int, key: str, fix: str, answer: Callable[[str], Answer | None]) -> tuple[HttpServer, str]:
    """Returns the server of a page on this machine, and its address. `key`, `fix`: for the RunError if it fails."""
    try:
        listener = socket.create_server((HOST, port), backlog=BACKLOG)
    except OSError as error:
        raise RunError(f"{key}{port} cannot be served: {os.strerror(error.errno or 0)}; {fix}") from None
    listener.setblocking(False)
    server = HttpServer(listener, answer, "page", is_loopback=True)
    return server, f"http://{HOST}:{listener.getsockname()[1]}/"
