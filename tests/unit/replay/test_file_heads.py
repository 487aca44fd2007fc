"""A file of the journal says of which format and configuration it is, and is refused otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from apex_jax.environments.environment import segment_spec
from apex_jax.replay.file_heads import Identity, JournalError
from tests.rigs.journals import World, config_of
from tests.rigs.links import CONFIG


@pytest.mark.parametrize("kept", ["segments", "snapshot"])
def test_journal_of_another_configuration_is_refused_and_unchanged(tmp_path: Path, kept: str) -> None:
    world = World(tmp_path)
    world.store(1)
    world.stop()
    for path in (tmp_path / "replay").glob("s*"):
        if not path.name.startswith(kept):
            path.unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "replay").iterdir()}
    other = config_of(tmp_path).replace(environment=replace(CONFIG.environment, task="Catch-v0"))
    with pytest.raises(
        JournalError, match=r"environment.task: was Pong-v5, now Catch-v0; .*another run_directory, or move .*/replay"
    ):
        World(tmp_path, config=other)
    assert {path.name: path.read_bytes() for path in (tmp_path / "replay").iterdir()} == before


def test_a_journal_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    monkeypatch.setattr("apex_jax.replay.file_heads.FORMAT", 9)
    world.store(1)
    world.kill()
    monkeypatch.undo()
    with pytest.raises(JournalError, match="has format 9, this release reads format 2"):
        World(tmp_path)


def test_a_journal_from_before_a_key_existed_is_accepted_unless_its_value_was_another() -> None:
    spec = segment_spec(CONFIG)
    before = Identity("task=gymnasium:X frame_stack=1", spec).facts
    Identity("task=gymnasium:X frame_stack=1 observation_layout=auto", spec).check(Path("segments"), before)
    with pytest.raises(JournalError, match=r"observation_layout: was auto, now CHW"):
        Identity("task=gymnasium:X frame_stack=1 observation_layout=CHW", spec).check(Path("segments"), before)
