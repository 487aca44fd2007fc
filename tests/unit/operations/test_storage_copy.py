"""A run is copied while it goes on, a new machine fetches it before its role starts, and a command does both."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from apex_jax.config import Config, StorageConfig
from apex_jax.host.errors import RunError, UsageError
from apex_jax.operations import storage_copy
from apex_jax.operations.storage_copy import StorageCopy, fetch_missing
from apex_jax.process import FETCHED, StopSignal
from apex_jax.run.storage import SECTIONS, Storage, StorageError, local_progress
from tests.rigs.links import wait_until
from tests.rigs.processes import Programs, catch, checkpoints, free_tcp_addresses
from tests.rigs.storages import content, copied, failing, newest_checkpoint, pull, push, run, write

__all__ = ["run"]


def config_of(directory: Path, url: Path, interval: float = 0.05) -> Config:
    return Config(run_directory=str(directory), storage=StorageConfig(url=str(url), interval_seconds=interval))


def test_run_is_copied_at_each_interval_and_at_the_end(tmp_path: Path, run: Path) -> None:
    with StorageCopy(config_of(run, tmp_path / "copy"), "learner", StopSignal()) as copy:
        wait_until(lambda: (tmp_path / "copy" / "learner" / "config.yaml").exists())
        assert copy.metrics()["storage/failed_copies"] == 0
    with StorageCopy(config_of(run, tmp_path / "copy", interval=1000.0), "learner", StopSignal()):
        write(run, "metrics/learner.jsonl", b"the last word")
    assert pull(tmp_path / "copy", tmp_path / "back")["metrics/learner.jsonl"] == b"the last word"


def test_failure_is_logged_once_counted_and_repaired_by_the_next_copy(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "apex_jax")
    with ExitStack() as stack:
        with monkeypatch.context() as patch:
            failing(patch, 0)
            copy = stack.enter_context(StorageCopy(config_of(run, tmp_path / "copy", 0.01), "learner", StopSignal()))
            wait_until(lambda: copy.failed >= 3)
        wait_until(lambda: "copying the run works again" in caplog.text)
    assert caplog.text.count("cannot copy the run") == 1
    assert pull(tmp_path / "copy", tmp_path / "back").keys() >= {"config.yaml"}


def test_hanging_last_copy_does_not_block_the_end(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage_copy, "LAST_COPY_SECONDS", 0.1)
    released = threading.Event()
    monkeypatch.setattr(Storage, "push", lambda *_: released.wait(20))
    with StorageCopy(config_of(run, tmp_path / "copy"), "learner", StopSignal()):
        pass
    assert "took too long" in caplog.text
    released.set()


def test_long_fetch_sends_heartbeats_and_ends_with_the_process(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    stop = mock.Mock(spec=StopSignal, is_set=lambda: False)
    fetch_missing(config_of(tmp_path / "back", tmp_path / "copy"), ["learner"], stop)
    assert stop.beat.call_count > 1
    stop.is_set = lambda: True
    fetch_missing(config_of(tmp_path / "other", tmp_path / "copy"), ["learner"], stop)
    assert local_progress("learner", tmp_path / "other") is None


def test_start_behind_the_copy_of_another_run_is_a_one_line_error(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    write(tmp_path / "back", "checkpoints/199/x", b"")
    with pytest.raises(StorageError, match=r"200 updates, .* only one at 199"):
        fetch_missing(config_of(tmp_path / "back", tmp_path / "copy"), ["learner"], StopSignal())


def test_start_behind_the_copy_of_the_same_run_continues_from_the_copy(
    tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "apex_jax")
    push(tmp_path / "copy", run)
    config = config_of(tmp_path / "replacement", tmp_path / "copy")
    for _ in range(2):
        fetch_missing(config, SECTIONS, StopSignal())
        assert caplog.text.count("fetched the") == 2, "what is there is not fetched"
    assert content(tmp_path / "replacement") == copied(run)
    write(tmp_path / "replacement", "checkpoints/210/x", b"of the replacement")
    write(run, "checkpoints/250/x", b"what the machine before saved last")
    push(tmp_path / "copy", run)
    fetch_missing(config, SECTIONS, StopSignal())
    assert caplog.text.count("is at 210 updates, its copy at 250: the run goes on from the copy") == 1
    there = content(tmp_path / "replacement")
    assert there["checkpoints/250/x"] == b"what the machine before saved last"
    assert there["checkpoints/210/x"] == b"of the replacement", "what is there is never overwritten"
    push(tmp_path / "copy", tmp_path / "replacement")
    fetch_missing(config, SECTIONS, StopSignal())
    assert caplog.text.count("goes on from the copy") == 1


@pytest.mark.parametrize("damaged", [("200",), ("100", "200")])
def test_start_with_a_damaged_newest_checkpoint_continues_from_its_sound_copy(
    tmp_path: Path, run: Path, damaged: tuple[str, ...]
) -> None:
    sound = copied(run)
    push(tmp_path / "copy", run)
    for updates in damaged:
        (run / "checkpoints" / updates / "state" / "d" / "x").write_bytes(b"torn")
    fetch_missing(config_of(run, tmp_path / "copy"), SECTIONS, StopSignal())
    assert copied(run) == sound
    for updates in damaged:
        [aside] = (run / "checkpoints").glob(f"damaged-{updates}-*")
        assert (aside / "state" / "d" / "x").read_bytes() == b"torn"
    push(tmp_path / "copy", run)
    assert pull(tmp_path / "copy", tmp_path / "back") == sound


def test_role_restarted_by_its_supervisor_does_not_need_the_storage(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(tmp_path / "copy", run)
    monkeypatch.setattr(Storage, "copy", mock.Mock(side_effect=StorageError("no answer")))
    config = config_of(run, tmp_path / "copy", interval=1000.0)
    write(run, "checkpoints/250/x", b"")
    with pytest.raises(StorageError), StorageCopy(config, "learner", StopSignal()):
        pass
    monkeypatch.setenv(FETCHED, "1")
    with StorageCopy(config, "learner", StopSignal()) as copy:
        pass
    assert copy.failed == 1, "the last copy, and nothing before"


# The command storage ----------------------------------------------------------------------------------------------


def test_push_and_pull_commands_copy_a_run_both_ways(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path / 'copy'}"
    assert storage_copy.run(["push", str(run), url]) == 0
    assert storage_copy.run(["pull", url, str(tmp_path / "back")]) == 0
    assert content(tmp_path / "back") == copied(run)
    assert capsys.readouterr().out.count("MB transferred") == 4
    with pytest.raises(UsageError, match="holds a run already"):
        storage_copy.run(["pull", url, str(tmp_path / "back")])
    with pytest.raises(UsageError, match="holds no checkpoint"):
        storage_copy.run(["push", str(tmp_path / "nothing"), url])
    with pytest.raises(RunError, match="there is no copy of a run"):
        storage_copy.run(["pull", f"file://{tmp_path / 'nowhere'}", str(tmp_path / "new")])
    with pytest.raises(UsageError, match="storage push --help"):
        storage_copy.run(["push", str(run)])


# Real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # three starts of a learner
@pytest.mark.timeout(480)
def test_replacement_of_a_learner_continues_from_the_copy(tmp_path: Path) -> None:
    """A learner's machine is lost; another one, with an empty disk, goes on with the run."""
    addresses, endless = free_tcp_addresses(), "total_updates=100000000"
    stored = (f"storage.url=file://{tmp_path / 'copy'}", "storage.interval_seconds=1")
    often = "learner.checkpoint_interval_seconds=1"

    with Programs(tmp_path) as programs:

        def start(role: str, directory: Path, *arguments: str) -> Any:
            return programs.start("--role", role, *catch(directory, *addresses, endless, often, *arguments))

        start("replay", tmp_path / "replay")
        start("actor", tmp_path / "actor")
        first = start("learner", tmp_path / "first", *stored)
        storage = Storage(str(tmp_path / "copy"))
        first.wait_until(lambda: (newest_checkpoint(storage) or 0) > 0)
        first.send(signal.SIGKILL)
        first.exit_code()
        held = newest_checkpoint(storage)
        assert held is not None
        second = start("learner", tmp_path / "second", *stored)
        second.wait_until(lambda: max(checkpoints(tmp_path / "second"), default=0) > held)
        assert f"fetched the learner of the run from file://{tmp_path / 'copy'}" in second.stderr
        assert f"resuming from the checkpoint at {held} updates" in second.stderr
        second.send(signal.SIGTERM)
        assert second.exit_code() == 143
        assert newest_checkpoint(storage) == checkpoints(tmp_path / "second")[-1], "the last copy has the last one"
    assert os.listdir(tmp_path / "copy") == ["learner"]
