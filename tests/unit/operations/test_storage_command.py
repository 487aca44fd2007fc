"""The command storage copies a run to a URL and back, and refuses a URL that is no place for a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.host.errors import RunError, UsageError
from apex_jax.operations import storage_command
from tests.rigs.storages import content, copied, run

__all__ = ["run"]


def test_push_and_pull_commands_copy_a_run_both_ways(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
