"""The replay alone as a process of its own: killed while programs insert and draw, and used as its page does."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from apex_jax.run.metrics import read_metrics
from tests.rigs.items import Served, items_of, sample_all
from tests.rigs.processes import ROOT, Programs, free_tcp_addresses, wait_until


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


@pytest.mark.ci
@pytest.mark.timeout(400)
def test_nothing_acknowledged_is_lost_when_the_server_is_killed(served: Served, programs: Programs) -> None:
    """Two writers and a reader go on through kills of a server process; every item is stored exactly once."""
    command = ("--role", "replay", "--config", str(served.file), *served.settings, "metrics_interval_seconds=0.1")
    large = "replay.capacity_transitions=100000"
    server = programs.start(*command, large)
    writers, reader = [served.client(large) for _ in range(2)], served.client(large)
    count, stop, failures = [0, 5_000], threading.Event(), list[BaseException]()

    def write(index: int) -> None:
        try:
            while not stop.is_set():
                writers[index].insert(items_of(range(count[index], count[index] + 10)))
                count[index] += 10
                writers[index].flush()
                stop.wait(0.02)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        enough = count[0] + 50, count[1] + 50
        wait_until(lambda enough=enough: failures or (count[0] >= enough[0] and count[1] >= enough[1]))  # type: ignore[misc]
        reader.sample()
        server.process.kill()
        server.process.wait()
        server = programs.start(*command, large)
    stop.set()
    for thread in threads:
        thread.join(120)
    assert not failures
    for writer in writers:
        writer.close()  # from here on, only the journal has what they wrote
    server.process.kill()
    server.process.wait()
    programs.start(*command, large)
    written = {*range(count[0]), *range(5_000, count[1])}
    sample_all(reader, written, draws=20_000)
    metrics = Path(served.file.parent, "run", "metrics", "replay.jsonl")
    wait_until(lambda: read_metrics(metrics)[-1]["replay/size_transitions"] == len(written))


@pytest.mark.long
def test_twenty_lines_of_the_page_run_with_its_settings_and_its_command(tmp_path: Path, programs: Programs) -> None:
    page = (ROOT / "docs" / "replay.md").read_text()
    settings, program = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("yaml", "python"))
    assert len(settings) == len(program) == 1
    links = [text.removeprefix("addresses.").replace("=", ": ") for text in free_tcp_addresses()]
    addresses = "".join(f"  {text}\n" for text in links)
    path = tmp_path / "replay.yaml"
    path.write_text(settings[0].replace("runs/replay", f"{tmp_path}/run") + f"addresses:\n{addresses}")
    programs.start("--role", "replay", "--config", str(path))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program[0]}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
