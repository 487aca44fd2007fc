"""Specification of the command: the folder appears whole or not at all, and every refusal is one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apex_jax.export import export_command, folder
from apex_jax.host.errors import RunError, UsageError
from tests.rigs.saved_runs import save_run


@pytest.fixture(autouse=True)
def _keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which the command sets


def write(path: Path, run: str, updates: int | None, code: dict[str, str]) -> list[str]:
    (path / "file").write_text(f"{run} {updates} {code}")
    return ["a note"]


def test_a_new_or_empty_folder_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder, "write_files", write)
    (tmp_path / "empty").mkdir()
    (tmp_path / ".new.half").mkdir()  # left by a killed process
    (tmp_path / ".new.half" / "old").touch()
    for name, arguments in (("new", []), ("empty", ["environment.task=gymnasium:a:B", "--updates", "7"])):
        assert export_command.run(["run", str(tmp_path / name), *arguments]) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}: file\na note\n"
    assert {path.name for path in tmp_path.iterdir()} == {"new", "empty"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    assert (tmp_path / "empty" / "file").read_text() == "run 7 {'environment.task': 'gymnasium:a:B'}"


@pytest.mark.parametrize(("name", "message"), [
    ("full", "is not empty"),
    ("full/file", "is no folder"),
    ("none/new", "there is no folder .*none"),
    ("/", "has no name"),
    ("", "has no name"),
])  # fmt: skip
def test_a_folder_that_cannot_be_made_is_refused_and_kept(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "write_files", write)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^export: .*{message}"):
        export_command.run(["run", name])
    assert (tmp_path / "full" / "file").read_text() == "kept"
    assert os.listdir(tmp_path) == ["full"]


@pytest.mark.parametrize("error", [RunError("a line"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_export_leaves_nothing(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *_: object) -> list[str]:
        (path / "file").touch()
        raise error

    monkeypatch.setattr(folder, "write_files", fail)
    with pytest.raises((RunError, KeyboardInterrupt)):
        export_command.run(["run", str(tmp_path / "new")])
    assert os.listdir(tmp_path) == []


def test_export_of_a_missing_or_damaged_run_is_one_line_of_error(tmp_path: Path) -> None:
    for run in (tmp_path / "none", tmp_path):
        with pytest.raises(RunError, match=r"interface.json does not exist: give the directory of a run"):
            export_command.run([str(run), str(tmp_path / "new")])
    save_run("Catch-v0", tmp_path / "run", (1,))
    for file in (tmp_path / "run" / "checkpoints" / "1").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"none of the checkpoints in .* can be read") as error:
        export_command.run([str(tmp_path / "run"), str(tmp_path / "new")])
    assert "\n" not in str(error.value)
    with pytest.raises(RunError, match="has no checkpoint of 3 updates; it has: 1"):
        export_command.run([str(tmp_path / "run"), str(tmp_path / "new"), "--updates", "3"])
    assert os.listdir(tmp_path) == ["run"]
