"""The command plot: its pictures, its table, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.host.errors import RunError, UsageError
from apex_jax.plotting.plot_command import groups_of, run
from tests.rigs.runs import make_run, write_run


def test_plot_command_draws_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", [1.0, 2.0])
    make_run(tmp_path / "b=c", [3.0, 4.0])
    output = tmp_path / "out.svg"
    assert run([str(tmp_path / "a"), f"SB3={tmp_path / 'b=c'}", "--output", str(output)]) == 0
    assert "<svg" in output.read_text()
    printed = capsys.readouterr().out
    assert f"| {tmp_path / 'a'} | 1 |" in printed
    assert "| SB3 | 1 |" in printed


def test_label_is_used_as_written(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [1.0, 2.0])
    assert run([rf"a$^$|b\bad={tmp_path / 'a'}", "--output", str(tmp_path / "x.png")]) == 0


def test_unwritable_picture_is_a_one_line_error(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [1.0, 2.0])
    (tmp_path / "x.png").mkdir()
    with pytest.raises(RunError, match=r"x.*\.png: Is a directory; choose another --output"):
        run([str(tmp_path / "a"), "--output", str(tmp_path / "x.png")])


def test_directory_may_hold_an_equals_sign(tmp_path: Path) -> None:
    make_run(tmp_path / "b=c", [3.0])
    assert [group.label for group in groups_of([str(tmp_path / "b=c")])] == [str(tmp_path / "b=c")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plot: the following arguments are required: .*; see python main.py plot --help"),
        (["{tmp}/nowhere"], "nowhere: no such directory; give the directory of a run"),
        (["{tmp}/empty"], "empty: has no evaluation yet"),
        (["{tmp}/a", "--output", "x.jpg"], r"--output x.jpg: give a file .* ends in .png, .svg or .pdf"),
        (["{tmp}/a", "--output", "{tmp}/nowhere/x.png"], "give a file in an existing folder"),
    ],
)
def test_wrong_use_of_plot_is_a_one_line_error(tmp_path: Path, arguments: list[str], message: str) -> None:
    make_run(tmp_path / "a", [1.0])
    make_run(tmp_path / "empty", [])
    with pytest.raises(UsageError, match=message) as caught:
        run([argument.format(tmp=tmp_path) for argument in arguments])
    assert str(caught.value).isprintable()


def test_run_without_an_evaluation_is_left_out_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path / "a", [1.0, 2.0])
    make_run(tmp_path / "empty", [])
    groups = groups_of([str(tmp_path / "a"), f"empty={tmp_path / 'empty'}"])
    assert [group.label for group in groups] == [str(tmp_path / "a")]
    assert caplog.messages == [f"{tmp_path / 'empty'}: has no evaluation yet: left out"]


def test_unprintable_label_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use a label of printable characters"):
        groups_of([f"\udcff={tmp_path}"])


@pytest.mark.parametrize(
    ("runs", "picture"),
    [
        (["runs/a"], "runs/a/plot.png"),
        (["one=runs/a"], "runs/a/plot.png"),
        (["runs/a", "runs/b"], "runs/plot.png"),
        (["{folder}/runs/a/", "runs/b"], "{folder}/runs/plot.png"),
    ],
)
def test_picture_of_one_run_is_in_its_directory_and_of_several_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: list[str], picture: str
) -> None:
    for name in "ab":
        write_run(tmp_path / "runs" / name, [0.0], [(300.0, 1.0), (600.0, 2.0)], [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a" / "curves.png").write_bytes(b"the picture of the run's end")
    assert run([text.format(folder=tmp_path) for text in runs]) == 0
    assert f"\n{picture.format(folder=tmp_path)}: thin lines are runs" in capsys.readouterr().out
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("plot.png")] == [
        Path(picture.format(folder=tmp_path)).relative_to(tmp_path) if "{" in picture else Path(picture)
    ]
    assert (tmp_path / "runs" / "a" / "curves.png").read_bytes() == b"the picture of the run's end"


def test_pictures_among_the_arguments_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        write_run(tmp_path / "runs" / name, [0.0], [(300.0, 1.0), (600.0, 2.0)], [])
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the first call makes the picture that `runs/*` names the second time
        assert run(sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").glob("*"))) == 0
        assert "\nruns/plot.png: thin lines are runs" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"plot\.png: is a file; give the directory of a run"):
        run(["runs/plot.png"])


@pytest.mark.parametrize("twice", [["runs/a", "runs/a/"], ["A=runs/a", "A=runs/../runs/a"]])
def test_run_that_is_given_twice_in_one_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, twice: list[str]
) -> None:
    write_run(tmp_path / "runs" / "a", [0.0], [(300.0, 1.0), (600.0, 2.0)], [])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r" is given twice, as (A=)?runs/a and (A=runs/\.\./)?runs/a/?; keep one$"):
        run(twice)
    assert run(["before=runs/a", "after=runs/a"]) == 0  # two lines, each of one run
