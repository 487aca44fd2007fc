"""Files of many runs: what plot reads of them is what it reads of their directories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apex_jax.config import load as settings
from apex_jax.host.errors import UsageError
from apex_jax.plotting.curves import read_run
from apex_jax.plotting.packed_runs import read_packed
from apex_jax.plotting.plot_command import groups_of
from results.publish import pack, thinned
from tests.rigs.runs import START, make_run, write_lines


def test_packed_runs_equal_the_runs_of_their_directories(tmp_path: Path) -> None:
    made = [make_run(tmp_path / name, [1.0, float(seed)], (f"seed={seed}",)) for seed, name in enumerate("ab")]
    write_lines(
        made[1] / "metrics" / "actor-0.jsonl", [(START + 1, 4.0, {"charts/episodic_return_epsilon_below_0.01": 3.0})]
    )
    pack(made, tmp_path / "both.jsonl")
    for packed, directory in zip(read_packed(tmp_path / "both.jsonl"), made, strict=True):
        expected = read_run(directory)
        assert packed.directory == directory.name
        assert (packed.task, packed.settings, packed.method) == (expected.task, expected.settings, expected.method)
        for curve, other in zip(
            [packed.evaluation, *packed.training.values()],
            [expected.evaluation, *expected.training.values()],
            strict=True,
        ):
            np.testing.assert_array_equal(curve, other)
    [group] = groups_of([str(tmp_path / "both.jsonl")])
    assert len(group.runs) == 2
    [named] = groups_of([f"x={tmp_path / 'both.jsonl'}"])
    assert named.label == "x"


@pytest.mark.parametrize(("lines", "kept"), [(1, 1), (20, 20), (120, 30), (1200, 100)])
def test_published_metrics_are_a_line_a_minute_but_30_of_a_short_run(lines: int, kept: int) -> None:
    written = [{"time": 5.0 * i, "seconds": 5.0 * i} for i in range(lines)]  # every five seconds, as by default
    published = thinned(written)
    assert kept <= len(published) <= kept + 1
    assert published[-1:] == written[-1:]


def test_a_text_in_place_of_a_configuration_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(settings, "_read", opened.append)
    (tmp_path / "x.jsonl").write_text('{"name":"a","config":"/secret","starts":[],"changes":[],"metrics":{}}')
    with pytest.raises(UsageError, match=r"x\.jsonl: line 1 is no packed run"):
        read_packed(tmp_path / "x.jsonl")
    assert opened == []


@pytest.mark.parametrize("line", [
    "{}", "[]", "", "{", "[" * 2000, '{"name":"a","config":3,"starts":[],"changes":[],"metrics":{}}',
])  # fmt: skip
def test_invalid_line_of_a_packed_file_is_a_one_line_error(tmp_path: Path, line: str) -> None:
    pack([make_run(tmp_path / "a", [1.0, 2.0])], tmp_path / "x.jsonl")
    with open(tmp_path / "x.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError, match=r"x\.jsonl: line 2 is no packed run"):
        read_packed(tmp_path / "x.jsonl")


def test_file_without_a_run_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(UsageError, match="holds no run"):
        read_packed(tmp_path / "x.jsonl")
