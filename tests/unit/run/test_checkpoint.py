"""Checkpoints: what comes back is what was saved, bit for bit, or the one before, or one clear line."""

from __future__ import annotations

import logging
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from apex_jax.agent.dpg import make_dpg
from apex_jax.agent.dqn import make_dqn
from apex_jax.run.checkpoint import Checkpointer, Progress
from apex_jax.run.checkpoint_files import CHECKSUMS, CheckpointError, sound_steps, write_checksums
from apex_jax.types import ActionSpec, SegmentSpec
from tests.rigs.agents import assert_equal_bits
from tests.rigs.small_agents import CONTINUOUS_VECTORS, DPG_ALL, config, dpg_config

SPEC = SegmentSpec((3,), "float32", 1, 8, 1, ActionSpec.discrete(2))
COMPATIBILITY_KEY, ARCHITECTURE = "task=Catch-v0 n_step=1", "0123456789abcdef"


def progress_at(updates: int) -> Progress:
    return Progress(updates, 17 * updates, 0.1 * updates, 3 * updates, COMPATIBILITY_KEY, ARCHITECTURE)


def state_of(seed: int, kind: str = "dqn") -> Any:
    """A state of a real algorithm in which no leaf is zero, and no two alike."""
    if kind == "dpg":
        shapes = jax.eval_shape(make_dpg(dpg_config(**DPG_ALL), CONTINUOUS_VECTORS).init, jax.random.key(0))
    else:
        shapes = jax.eval_shape(make_dqn(config(), SPEC).init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.asarray(9 * rng.random(leaf.shape) + 1, leaf.dtype), shapes)


STATES = {updates: state_of(updates) for updates in (100, 200, 300)}


def save(directory: Path, *updates: int, kept: int = 3) -> None:
    checkpointer = Checkpointer(str(directory), kept)
    for number in updates:
        checkpointer.save(STATES[number], progress_at(number))
    checkpointer.close()


def restore(directory: Path, like: Any = STATES[100], read_only: bool = False) -> Any:
    fresh = jax.tree.map(np.zeros_like, like)
    checkpointer = Checkpointer(str(directory), read_only=read_only)
    try:
        return checkpointer.restore_newest(fresh, COMPATIBILITY_KEY, ARCHITECTURE)
    finally:
        checkpointer.close()


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    save(directory, 100, 200)
    return directory


@pytest.fixture
def damageable(two_checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_checkpoints, tmp_path / "run"))


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """All log records from warnings on, those of orbax included."""
    with caplog.at_level(logging.WARNING):
        yield caplog


def files_of(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


# All is well ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dqn", "dpg"])
@pytest.mark.parametrize("read_only", [False, True])
def test_restored_state_equals_the_saved_one_and_nothing_is_logged(
    tmp_path: Path, log: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], kind: str, read_only: bool
) -> None:
    state = state_of(5, kind)
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(state, progress_at(7))
    checkpointer.close()
    restored, progress = restore(tmp_path, state_of(6, kind), read_only=read_only)
    assert_equal_bits(restored, state)
    assert progress == progress_at(7)
    assert [type(value) for value in progress] == [type(value) for value in progress_at(7)]
    assert log.records == []
    assert capfd.readouterr() == ("", "")


def test_newest_checkpoint_is_restored_and_a_limited_number_is_kept(tmp_path: Path) -> None:
    save(tmp_path, 100, 200, 300, kept=2)
    restored, progress = restore(tmp_path)
    assert_equal_bits(restored, STATES[300])
    assert progress == progress_at(300)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [".lock", "200", "300"]


@pytest.mark.parametrize("read_only", [False, True])
def test_without_a_checkpoint_nothing_is_restored(
    tmp_path: Path, log: pytest.LogCaptureFixture, read_only: bool
) -> None:
    assert restore(tmp_path / "new", read_only=read_only) is None
    assert (tmp_path / "new").exists() != read_only, "who only reads leaves nothing behind"
    assert log.records == []


def test_the_state_may_be_donated_or_overwritten_as_soon_as_save_returns(tmp_path: Path) -> None:
    state = jax.device_put(STATES[100])._replace(updates=np.array(100, np.int32))
    expected = jax.tree.map(np.array, state)
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(state, progress_at(100))
    for leaf in jax.tree.leaves(state._replace(updates=())):
        leaf.delete()
    state.updates[...] = -1
    checkpointer.close()
    assert_equal_bits(restore(tmp_path)[0], expected)


def test_a_save_holds_a_single_copy_of_the_state(tmp_path: Path) -> None:
    state = {"a": np.random.default_rng(0).random(1_000_000), "b": np.random.default_rng(1).random(1_000_000)}
    checkpointer = Checkpointer(str(tmp_path))
    tracemalloc.start()
    try:
        checkpointer.save(state, progress_at(1))
        checkpointer._join()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    checkpointer.close()
    assert peak_bytes < 1.5 * sum(leaf.nbytes for leaf in state.values())


# Damage -----------------------------------------------------------------------------------------------------------


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip_a_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_damage_of_any_file_restores_the_previous_checkpoint_with_one_warning(
    damageable: Path, log: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_over, parse = [], Mock(wraps=ocp.Checkpointer.restore)
    monkeypatch.setattr(ocp.Checkpointer, "restore", lambda self, path, **items: parse(self, path, **items))
    for path in files_of(damageable / "checkpoints" / "200"):
        sound = path.read_bytes()
        path.write_bytes(damage(sound))
        log.clear()
        restored, progress = restore(damageable, read_only=True)
        assert progress.updates in (100, 200)
        assert progress == progress_at(progress.updates)
        assert_equal_bits(restored, STATES[progress.updates])
        assert len(log.records) == (progress.updates == 100)
        if progress.updates == 100:
            passed_over.append(path.parent.name)
            assert "200 is damaged, trying the one before" in log.text
            assert log.records[0].getMessage().isprintable(), "one line"
            assert {call.args[1].name for call in parse.call_args_list} == {"100"}, "no parser meets a damaged file"
        parse.reset_mock()
        path.write_bytes(sound)
    assert {"progress", "state", "d"} <= set(passed_over)


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo"])
@pytest.mark.timeout(300)
def test_file_replaced_by_a_link_or_a_fifo_is_damage_and_does_not_block(
    damageable: Path, tmp_path: Path, log: pytest.LogCaptureFixture, kind: str
) -> None:
    for path in files_of(damageable / "checkpoints" / "200"):
        moved = path.rename(tmp_path / "moved")
        os.mkfifo(path) if kind == "fifo" else path.symlink_to(moved if kind == "link" else tmp_path / "missing")
        log.clear()
        assert restore(damageable, read_only=True)[1] == progress_at(100)
        assert len(log.records) == 1
        path.unlink()
        moved.rename(path)
    assert restore(damageable, read_only=True)[1] == progress_at(200)


def test_training_goes_on_from_the_checkpoint_before_a_damaged_one_which_is_set_aside(damageable: Path) -> None:
    (damageable / "checkpoints" / "200" / "progress" / "metadata").write_bytes(b"{")
    assert restore(damageable, read_only=True)[1] == progress_at(100)
    assert (damageable / "checkpoints" / "200").exists(), "a reader changes nothing"
    assert restore(damageable)[1] == progress_at(100)
    [aside] = (damageable / "checkpoints").glob("damaged-200-*")
    assert (aside / "progress" / "metadata").read_bytes() == b"{"
    save(damageable, 200, kept=1)
    state, progress = restore(damageable)
    assert_equal_bits(state, STATES[200])
    assert progress == progress_at(200)


# Other configurations, other files in the way ---------------------------------------------------------------------


def test_a_checkpoint_of_another_network_is_refused_naming_both(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(STATES[100], progress_at(100)._replace(architecture="fedcba"))
    checkpointer.close()
    with pytest.raises(CheckpointError, match=f"a different network: fedcba, not {ARCHITECTURE}"):
        restore(tmp_path)


def test_a_checkpoint_of_another_format_is_refused_naming_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("apex_jax.run.checkpoint.FORMAT", 9)
        save(tmp_path, 100)
    with pytest.raises(CheckpointError, match="a different format: 9, not 2"):
        restore(tmp_path)


@pytest.mark.parametrize(("leaf", "now"), [
    (np.zeros(2, np.int32), r"int32\[2\]"), (np.zeros((), np.int16), r"int16\[\]"), ((), "absent"),
])  # fmt: skip
def test_a_checkpoint_of_another_state_is_refused_naming_the_leaf(damageable: Path, leaf: Any, now: str) -> None:
    with pytest.raises(CheckpointError, match=rf"200 has a different state: updates: was int32\[\], now {now}; use"):
        restore(damageable, STATES[100]._replace(updates=leaf))


def test_directory_is_for_one_learner_and_any_number_of_readers(damageable: Path) -> None:
    first = Checkpointer(str(damageable))
    with pytest.raises(CheckpointError, match=r"another learner saves in .*checkpoints: stop it, or choose another"):
        Checkpointer(str(damageable))
    assert restore(damageable, read_only=True)[1] == progress_at(200)
    first.close()
    Checkpointer(str(damageable)).close()


@pytest.mark.parametrize("checksums", [None, b"", b"[1]", b"{}", b'{"files": 1}', b'{"files": {"x": [1, 2]}}'])
def test_newest_damaged_checkpoints_are_not_sound(tmp_path: Path, checksums: bytes | None) -> None:
    for updates in (100, 200, 300):
        (tmp_path / str(updates)).mkdir()
        (tmp_path / str(updates) / "x").write_bytes(b"x")
        write_checksums(tmp_path / str(updates))
    assert sound_steps(tmp_path) == [100, 200, 300]
    for updates in (100, 300):
        path = tmp_path / str(updates) / CHECKSUMS
        path.unlink() if checksums is None else path.write_bytes(checksums)
    assert sound_steps(tmp_path) == [100, 200], "only up to the newest sound one are they read"
