"""A replay server and producers of segments as processes that tests stop, kill and restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from apex_jax.config.load import load
from apex_jax.environments.environment import segment_spec
from apex_jax.replay.experience_log import SEGMENT, ExperienceLog
from apex_jax.replay.snapshots import FileHeader
from apex_jax.run.metric_files import read_metrics
from tests.rigs.processes import ROOT, Program, Programs, catch, free_tcp_addresses, wait_until

CATCH = ROOT / "configs" / "catch.yaml"


class Producer:
    """A process of `tests.rigs.producer`."""

    def __init__(self, folder: Path, address: str, rate: float, overflow: str) -> None:
        self._output, self._errors = folder.with_suffix(".out"), folder.with_suffix(".err")
        command = [sys.executable, "-m", "tests.rigs.producer", str(CATCH), address, str(rate), overflow]
        with open(self._output, "wb") as out, open(self._errors, "wb") as err:
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=environment)

    @property
    def reports(self) -> list[dict[str, Any]]:
        lines = self._output.read_text().splitlines()[1:]
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def peer_id(self) -> int:
        return int(json.loads(self._output.read_text().splitlines()[0])["peer_id"])

    def get(self, name: str) -> Any:
        """Returns the newest value that it has told."""
        reports = self.reports
        return reports[-1][name] if reports else 0

    def wait_for_more(self, name: str, by: int = 1) -> None:
        before = self.get(name)
        wait_until(lambda: self.get(name) >= before + by)

    def wait_for_reports(self, count: int) -> None:
        enough = len(self.reports) + count
        wait_until(lambda: len(self.reports) >= enough)

    def settle(self) -> int:
        """Waits until the producer is blocked; returns its number of segments."""
        before = -1
        while (segments := self.get("segments")) > before:
            before = segments
            self.wait_for_reports(10)
        return int(segments)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(20)


class Site:
    """A run directory, its addresses, and the processes that work there."""

    def __init__(self, folder: Path, programs: Programs) -> None:
        self.folder, self.directory = folder, folder / "run"
        self._addresses = free_tcp_addresses()
        self._programs = programs
        self._producers: list[Producer] = []

    def address(self, link: int) -> str:
        """Of the experience link, the sampling link, the weights link."""
        return self._addresses[link].partition("=")[2]

    def settings(self, *settings: str) -> tuple[str, ...]:
        return catch(self.directory, *self._addresses, *settings)

    def server(self, *settings: str) -> Program:
        """Starts the replay server without a ratio, because without a learner a ratio would block inserts."""
        if not any(setting.startswith("replay.samples_per_insert") for setting in settings):
            settings = (*settings, "replay.samples_per_insert=0")
        return self._programs.start("--role", "replay", "--name", "replay", *self.settings(*settings))

    def producer(self, rate: float = 100.0, overflow: str = "wait") -> Producer:
        path = self.folder / f"producer-{len(self._producers)}"
        self._producers.append(Producer(path, self.address(0), rate, overflow))
        return self._producers[-1]

    def produced(self) -> int:
        """Returns how many transitions the producers have made, as they count themselves; they must have left."""
        assert all(producer.process.poll() == 0 for producer in self._producers)
        return sum(producer.get("produced") for producer in self._producers)

    def value(self, tag: str) -> float:
        """Returns the newest value of the server under a tag."""
        path = self.directory / "metrics" / "replay.jsonl"
        lines = read_metrics(path) if path.exists() else []
        return next((line[tag] for line in reversed(lines) if line.get(tag) is not None), 0.0)

    def ledger(self) -> dict[str, float]:
        line = read_metrics(self.directory / "metrics" / "replay.jsonl")[-1]
        return {tag.removeprefix("ledger/"): number for tag, number in line.items() if tag.startswith("ledger/")}

    def journal(self) -> dict[int, list[int]]:
        """Returns the sequence numbers of all segments on the disk by their actors' peer id; no server may run."""
        log_directory = self.directory / "replay"
        log = ExperienceLog(log_directory, self._header(), 1)
        sequences: dict[int, list[int]] = {}
        for record in log.read():
            if record.kind == SEGMENT:
                sequences.setdefault(record.peer_id, []).append(record.sequence)
        log.close()
        assert not list(log_directory.glob("damaged-*"))
        return sequences

    def _header(self) -> FileHeader:
        config = load(CATCH)
        return FileHeader(config.compatibility_key, segment_spec(config))

    def close(self) -> None:
        for producer in self._producers:
            producer.process.kill()
            producer.process.wait()


def end(program: Program, number: signal.Signals) -> None:
    """Ends a server by a signal, and checks its exit code."""
    program.send(number)
    assert program.exit_code() == (143 if number == signal.SIGTERM else -number)
    assert "Traceback" not in program.stderr
