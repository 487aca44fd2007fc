"""The command plot: its pictures, its table, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.host.errors import RunError, UsageError
from apex_jax.plotting.plot import groups_of, run
from tests.rigs.runs import make_run


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apex_jax.plotting.curves.RESAMPLES", 20)


def test_plot_command_draws_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", [1.0, 2.0])
    make_run(tmp_path / "b=c", [3.0, 4.0])
    output = tmp_path / "out.svg"
    assert run([rf"a$^$|b\bad={tmp_path / 'a'}", f"SB3={tmp_path / 'b=c'}", "--output", str(output)]) == 0
    assert "<svg" in output.read_text()
    printed = capsys.readouterr().out
    assert "| SB3 | 1 |" in printed
    assert [group.label for group in groups_of([str(tmp_path / "b=c")])] == [str(tmp_path / "b=c")]


@pytest.mark.parametrize(("arguments", "message"), [
    ([], r"^plot: .*required: .*plot --help"),
    (["nowhere"], "nowhere: "),
    (["."], r"metrics/\*\.jsonl"),
    (["empty"], "empty: "),
    (["a", "--output", "x.jpg"], r"--output x.jpg: .*\.png"),
    (["a", "--output", "nowhere/x.png"], "nowhere"),
    (["a", "--output", "x.png"], r"x.*\.png: Is a directory"),
])  # fmt: skip
def test_wrong_use_of_plot_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", [1.0, 2.0])
    make_run(tmp_path / "empty", [])
    (tmp_path / "x.png").mkdir()
    with pytest.raises((UsageError, RunError), match=message) as caught:
        run(arguments)
    assert str(caught.value).isprintable()


def test_run_without_an_evaluation_is_left_out_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path / "a", [1.0, 2.0])
    make_run(tmp_path / "empty", [])
    groups = groups_of([str(tmp_path / "a"), f"empty={tmp_path / 'empty'}"])
    assert [group.label for group in groups] == [str(tmp_path / "a")]
    [line] = caplog.messages
    assert line.startswith(f"{tmp_path / 'empty'}: ")


def test_plot_of_the_learners_directory_finds_the_evaluations_of_the_same_run_beside_it(tmp_path: Path) -> None:
    for name, returns in (("learner", []), ("evaluator", [1.0, 2.0]), ("other", [3.0])):
        make_run(tmp_path / name, returns)
        (tmp_path / name / "run_identity").write_text(("b" if name == "other" else "a") * 16)
    [group] = groups_of([str(tmp_path / "learner")])
    assert group.runs[0].evaluation.returns.tolist() == [1.0, 2.0]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of two runs, `a` and `b`, in the working directory."""
    for name in "ab":
        make_run(tmp_path / "runs" / name, [1.0, 1.0])
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize(("arguments", "picture"), [
    (["one=runs/a"], "runs/a/plot.png"),
    (["{runs}/a/", "runs/b"], "{runs}/plot.png"),
])  # fmt: skip
def test_picture_of_one_run_is_in_its_directory_and_of_several_beside_the_first(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], picture: str
) -> None:
    (runs / "a" / "curves.png").write_bytes(b"the picture of the run's end")
    assert run([text.format(runs=runs) for text in arguments]) == 0
    assert f"\n{picture.format(runs=runs)}: " in capsys.readouterr().out
    assert list(runs.rglob("plot.png")) == [Path(picture.format(runs=runs)).absolute()]
    assert (runs / "a" / "curves.png").read_bytes() == b"the picture of the run's end"


def test_pictures_among_the_arguments_are_skipped(runs: Path) -> None:
    for _ in range(2):  # the first call makes the picture that `runs/*` names the second time
        assert run(sorted(f"runs/{path.name}" for path in runs.iterdir())) == 0
        assert list(runs.rglob("*.png")) == [runs / "plot.png"]
    with pytest.raises(UsageError, match=r"plot\.png: is a file"):
        run(["runs/plot.png"])
