"""The copy of a run while it goes on, by command, on S3 (moto's, on this machine), and by real processes."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from apex_jax import storage as module
from apex_jax.config import Config, StorageConfig
from apex_jax.errors import RunError, UsageError
from apex_jax.operations import storage_command, storage_copy
from apex_jax.operations.storage_copy import StorageCopy, fetch_missing
from apex_jax.process import FETCHED, StopSignal
from apex_jax.storage import SECTIONS, Storage, StorageError, local_progress, progress_of
from tests.links import wait_until
from tests.processes import Programs, catch, checkpoints, free_tcp_addresses
from tests.test_storage import content, copied, failing, pull, push, run_in, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_in(tmp_path)


def newest_checkpoint(storage: Storage) -> int | None:
    """Returns the updates behind the newest checkpoint of the copy."""
    return progress_of("learner", storage.manifest("learner").files)


# While a run goes on ----------------------------------------------------------------------------------------------


def config_of(directory: Path, url: Path, interval: float = 0.05) -> Config:
    return Config(run_directory=str(directory), storage=StorageConfig(url=str(url), interval_seconds=interval))


def test_run_is_copied_again_and_again_and_once_more_at_the_end(tmp_path: Path, run: Path) -> None:
    with StorageCopy(config_of(run, tmp_path / "copy"), "learner", StopSignal()) as copy:
        wait_until(lambda: (tmp_path / "copy" / "learner" / "manifest.json").exists())
        assert copy.metrics()["storage/failed_copies"] == 0
        copy._closing.set()  # no more at an interval
        copy._thread.join()
        write(run, "metrics/learner.jsonl", b"the last word")
        copy._closing.clear()
        copy._thread = threading.Thread(target=copy._run, daemon=True)
        copy._thread.start()
    assert pull(tmp_path / "copy", tmp_path / "back")["metrics/learner.jsonl"] == b"the last word"


def test_failure_is_said_once_counted_and_made_good(
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


def test_copy_that_hangs_at_the_end_is_not_waited_for(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage_copy, "LAST_COPY_SECONDS", 0.1)
    released = threading.Event()
    monkeypatch.setattr(Storage, "_write", lambda *_: released.wait(20))
    copy = StorageCopy(config_of(run, tmp_path / "copy"), "learner", StopSignal())
    with copy:
        pass
    assert "took too long" in caplog.text
    released.set()
    copy._thread.join()


def test_new_machine_fetches_the_run_and_says_so(tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "apex_jax")
    push(tmp_path / "copy", run)
    fetch_missing(config_of(tmp_path / "back", tmp_path / "copy"), SECTIONS, StopSignal())
    assert content(tmp_path / "back") == copied(run)
    assert caplog.text.count("fetched the") == 2
    fetch_missing(config_of(tmp_path / "back", tmp_path / "copy"), SECTIONS, StopSignal())
    assert caplog.text.count("fetched the") == 2, "what is there is not fetched"


def test_fetch_that_takes_long_is_no_standstill_and_ends_with_the_process(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    stop = StopSignal()
    stop._beat_seconds -= 1000.0
    fetch_missing(config_of(tmp_path / "back", tmp_path / "copy"), ["learner"], stop)
    assert stop.idle_seconds < 500.0
    stop.set()
    fetch_missing(config_of(tmp_path / "other", tmp_path / "copy"), ["learner"], stop)
    assert local_progress("learner", tmp_path / "other") is None


def test_start_behind_the_copy_or_without_an_answer_is_one_line(tmp_path: Path, run: Path) -> None:
    push(tmp_path / "copy", run)
    write(tmp_path / "back", "checkpoints/199/x", b"")
    with pytest.raises(StorageError, match=r"holds a checkpoint at 200 updates, .* only one at 199: fetch it"):
        fetch_missing(config_of(tmp_path / "back", tmp_path / "copy"), ["learner"], StopSignal())
    (tmp_path / "copy" / "learner" / "manifest.json").write_text("{}")
    with pytest.raises(StorageError, match=r"manifest\.json is damaged; restore it, or remove it"):
        fetch_missing(config_of(tmp_path / "new", tmp_path / "copy"), ["learner"], StopSignal())


def test_start_behind_the_copy_of_the_same_run_goes_on_from_the_copy(
    tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    push(tmp_path / "copy", run)
    config = config_of(tmp_path / "replacement", tmp_path / "copy")
    fetch_missing(config, SECTIONS, StopSignal())
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


def test_role_that_its_supervisor_starts_again_depends_on_no_storage(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(tmp_path / "copy", run)
    (tmp_path / "copy" / "learner" / "manifest.json").write_text("{}")
    config = config_of(run, tmp_path / "copy", interval=1000.0)
    write(run, "checkpoints/250/x", b"")
    with pytest.raises(StorageError), StorageCopy(config, "learner", StopSignal()):
        pass
    monkeypatch.setenv(FETCHED, "1")
    with StorageCopy(config, "learner", StopSignal()) as copy:
        pass
    assert copy.failed == 1, "the last copy, and nothing before"


def test_directory_that_was_fetched_is_known_for_it_even_if_that_was_cut_short(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(tmp_path / "copy", run)
    back = tmp_path / "back"

    def install_and_die(arriving: Path, run_directory: Path) -> None:
        install(arriving, run_directory)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    install = module._install
    with monkeypatch.context() as patch:
        patch.setattr(module, "_install", install_and_die)
        with pytest.raises(StorageError):
            fetch_missing(config_of(back, tmp_path / "copy"), ["learner"], StopSignal())
    write(back, "checkpoints/250/x", b"of the replacement")
    Storage(str(tmp_path / "copy")).push("learner", back)
    assert (back / "run_identity").read_text() == (run / "run_identity").read_text()


def test_without_a_url_nothing_happens_and_nothing_is_imported(tmp_path: Path) -> None:
    with StorageCopy(Config(run_directory=str(tmp_path)), "learner", StopSignal()) as copy:
        assert copy.metrics() == {}
    assert not list(tmp_path.iterdir())


# The commands, and real processes ---------------------------------------------------------------------------------


def test_commands_take_a_run_there_and_back(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path / 'copy'}"
    assert storage_command.run(["push", str(run), url]) == 0
    assert storage_command.run(["pull", url, str(tmp_path / "back")]) == 0
    assert content(tmp_path / "back") == copied(run)
    assert capsys.readouterr().out.count("MB transferred") == 4
    with pytest.raises(UsageError, match="holds a run already"):
        storage_command.run(["pull", url, str(tmp_path / "back")])
    with pytest.raises(UsageError, match="holds no checkpoint"):
        storage_command.run(["push", str(tmp_path / "nothing"), url])
    with pytest.raises(RunError, match="there is no copy of a run"):
        storage_command.run(["pull", f"file://{tmp_path / 'nowhere'}", str(tmp_path / "new")])
    with pytest.raises(UsageError, match=r"storage push: .*; see python main\.py storage push --help"):
        storage_command.run(["push", str(run)])


@pytest.mark.parametrize("url", ["", "::", "s3:/bucket/run", "file://", "memory://x", "/"])
def test_url_that_is_no_place_for_a_copy_is_wrong_usage(run: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    before = content(run)
    with pytest.raises(UsageError, match="must be SCHEME://PLACE such as s3://bucket/prefix, or the path of a folder"):
        storage_command.run(["push", str(run), url])
    assert content(run) == before


@pytest.mark.slow  # three starts of a learner
@pytest.mark.timeout(240)
def test_replaced_learner_goes_on_from_the_copy(tmp_path: Path) -> None:
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


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket on this machine."""
    moto_server = pytest.importorskip("moto.server")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "nobody"),
        ("AWS_SECRET_ACCESS_KEY", "nothing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    import fsspec

    bucket = f"bucket-{secrets.token_hex(8)}"  # moto's servers of one process share their buckets
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # those of the server of the test before
    fsspec.filesystem("s3", skip_instance_cache=True).mkdirs(bucket)
    yield f"s3://{bucket}/runs/one"
    server.stop()


def test_s3_is_served_like_a_folder(tmp_path: Path, run: Path, s3: str) -> None:
    assert push(s3, run) > 0
    assert push(s3, run) == 0
    assert pull(s3, tmp_path / "back") == copied(run)
    shutil.rmtree(run / "checkpoints" / "100")
    write(run, "checkpoints/300/x", b"new")
    write(run, "metrics/learner.jsonl", b"longer than before")
    push(s3, run)
    assert pull(s3, tmp_path / "again") == copied(run)
    assert newest_checkpoint(Storage(s3)) == 300
    assert newest_checkpoint(Storage(f"{s3}/empty")) is None


def test_file_of_several_parts_reaches_s3_and_comes_back(
    tmp_path: Path, run: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 5 * 2**20)  # S3 takes no smaller part
    write(run, "checkpoints/300/x", os.urandom(11 * 2**20))
    push(s3, run)
    assert pull(s3, tmp_path / "back") == copied(run)


def test_bucket_that_does_not_exist_is_an_error_and_no_empty_copy(s3: str) -> None:
    with pytest.raises(StorageError, match="no-such-bucket"):
        newest_checkpoint(Storage("s3://no-such-bucket-at-all/x"))
