"""The live view shows every number of a run, as lines or as a panel that fits the terminal."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.text import Text

from apex_jax.config import EnvironmentConfig, EvaluatorConfig
from apex_jax.operations.live_view import LiveView, introduction
from apex_jax.operations.progress import EvaluationSummary
from tests.rigs.live_views import START, Clock, config, progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain_output_begins_at_once_and_is_a_line_each_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with LiveView(config(), stream, clock) as view:
        introduced = len(stream.getvalue().splitlines())
        assert introduced >= 1
        for tick in range(50):  # half seconds
            clock.now = START + tick / 2
            view.update(progress())
    lines = stream.getvalue().splitlines()[introduced:]
    assert len(lines) == 3  # at 0, 10 and 20 seconds
    assert "\x1b" not in stream.getvalue()
    assert lines[0] == (
        "learning: 1:02:03, about 1:30:00 left, 12,345,678 frames (5,120/s), 98,765 updates (42.1/s),"
        " replay 61,234 of 200,000 transitions, samples per insert 2.01 (target: 2), training return -12.34,"
        " evaluation 7.25 (79% of human), best 9.5 (86% of human), actor-0 restarted 1x"
    )


def test_plain_output_prints_a_lasting_warning_once() -> None:
    stream, clock = io.StringIO(), Clock()
    view = LiveView(config(), stream, clock)
    for warnings in (("q is 120",), ("q is 130", "other"), (), ("q is 90.5",)):
        view.update(progress(warnings=warnings))
        clock.now += 10
    told = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert told == ["warning: q is 120", "warning: other", "warning: q is 90.5"]


def test_plain_output_shows_how_far_the_replay_is_filled_and_which_values_are_unknown() -> None:
    stream = io.StringIO()
    early = {"phase": "filling the replay", "replay_size": 1_250, "seconds_left": None}
    unknown = {"training_return": None, "latest_evaluation": None, "best_evaluation": None}
    LiveView(config(), stream, Clock()).update(progress(**early, **unknown))
    line = stream.getvalue().splitlines()[-1]
    assert line.startswith("filling the replay: 1:02:03, 12,345,678 frames")
    assert "replay 1,250 of the 5,000 needed to start (25%)" in line
    assert "training return none yet, evaluation none yet" in line


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal 80 columns wide."""
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    return Terminal()


def test_panel_shows_every_number_within_80_columns(terminal: Terminal) -> None:
    with LiveView(config(), terminal) as view:
        before = len(terminal.getvalue())
        view.update(progress())
        panel = Text.from_ansi(terminal.getvalue()[before:]).plain.splitlines()
    assert 10 <= len(panel) <= 12
    assert max(cell_len(line) for line in panel) <= 80
    text = "\n".join(panel)
    for part in (
        "Pong-v5: learning",
        "1:02:03, about 1:30:00 left",
        "12,345,678 of 40,000,000, 5,120 per second",
        "98,765, 42.1 per second",
        "61,234 of 200,000 transitions",
        "2.01 (target: 2)",
        "-12.34",
        "7.25 (79% of human), best 9.5 (86% of human)",
        "restarted 1x: actor-0; running: learner, replay",
        "3.00 GiB",
    ):
        assert part in text


def test_panel_keeps_its_height_with_many_processes_and_odd_names(terminal: Terminal) -> None:
    roles = {"replay": "[dim]odd[/]", **{f"actor-{i}": "running" for i in range(256)}}
    roles |= {f"actor-{i}": f"restarted {i}x" for i in range(5, 15)}
    task = EnvironmentConfig(task="[bold]odd[/]")
    with LiveView(config(environment=task), terminal) as view:
        before = len(terminal.getvalue())
        view.update(progress(roles=roles, samples_per_insert=0.0, target_samples_per_insert=0.0))
        panel = Text.from_ansi(terminal.getvalue()[before:]).plain
    assert len(panel.splitlines()) <= 13
    assert "[bold]odd[/]: learning" in panel
    assert "[dim]odd[/]: replay" in panel
    assert "samples per insert  0.00 (target: none)" in panel


def test_address_of_the_page_is_printed_once_and_shown_in_the_panel(terminal: Terminal) -> None:
    address, stream = "http://127.0.0.1:8765/", io.StringIO()
    with LiveView(config(), stream, page_address=address) as view:
        view.update(progress())
    assert stream.getvalue().count(f"Watch it at {address}\n") == stream.getvalue().count(address) == 1
    with LiveView(config(), terminal, page_address=address) as view:
        before = len(terminal.getvalue())
        view.update(progress())
        panel = Text.from_ansi(terminal.getvalue()[before:]).plain
    assert f" {address} " in panel.splitlines()[-1]
    assert max(map(cell_len, panel.splitlines())) <= 80


def test_narrow_terminal_shows_every_process(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    roles = dict.fromkeys(("replay", "learner", "actor-0", "actor-1", "evaluator"), "running")
    with LiveView(config(), terminal) as view:
        view.update(progress(roles=roles))
    panel = Text.from_ansi(terminal.getvalue()).plain
    assert all(name in panel for name in roles)
    assert max(map(len, panel.splitlines()[-12:])) <= 60


def test_narrow_terminal_cuts_no_row(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "58")
    with LiveView(config(), terminal) as view:
        view.update(progress(latest_evaluation=EvaluationSummary(-1e-7, -0.004, 7)))
    panel = " ".join(Text.from_ansi(terminal.getvalue()).plain.replace("│", " ").split())
    assert "evaluation 0.0 (0% of human), best 9.5 (86% of human)" in panel  # neither is minus zero a number


def test_panel_shows_warnings_whole(terminal: Terminal) -> None:
    text = "actors wait for the learner 80% of the time: lower replay.samples_per_insert (now 4), or learn on a GPU"
    with LiveView(config(), terminal) as view:
        view.update(progress(warnings=(text,)))
    panel = Text.from_ansi(terminal.getvalue()).plain
    assert f"warning: {text}" in " ".join(panel.replace("│", " ").split())


@pytest.mark.parametrize(("phase", "left", "said"), [
    ("learning", 61.0, "1:02:03, about 0:01:01 left"),
    ("learning", 0.9, "1:02:03, about to finish"),
    ("finishing", 0.0, "finishing: 1:02:03, 12,345,678 frames"),
])  # fmt: skip
def test_time_left_is_never_shown_as_0(phase: str, left: float, said: str) -> None:
    stream = io.StringIO()
    LiveView(config(), stream, Clock()).update(progress(phase=phase, seconds_left=left))
    assert said in stream.getvalue()
    assert "0:00:00" not in stream.getvalue()


def test_many_actors_in_one_state_are_counted_not_named(terminal: Terminal) -> None:
    roles = {"replay": "running", **{f"actor-{i}": "running" for i in range(255)}, "actor-255": "restarted 1x"}
    with LiveView(config(), terminal) as view:
        view.update(progress(roles=roles))
    assert "restarted 1x: actor-255; running: replay, 255 actors" in Text.from_ansi(terminal.getvalue()).plain


def test_close_shows_the_cursor_again_once(terminal: Terminal) -> None:
    view = LiveView(config(), terminal)
    assert terminal.getvalue().count("\x1b[?25l") == 1
    view.update(progress())
    view.close()
    view.close()
    assert terminal.getvalue().count("\x1b[?25h") == 1


def test_error_while_the_panel_is_shown_shows_the_cursor_again(terminal: Terminal) -> None:
    with pytest.raises(KeyboardInterrupt), LiveView(config(), terminal):
        raise KeyboardInterrupt
    assert terminal.getvalue().count("\x1b[?25h") == 1


def test_dumb_terminal_gets_plain_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    LiveView(config(), terminal, Clock()).update(progress())
    assert "\x1b" not in terminal.getvalue()
    assert "12,345,678 frames" in terminal.getvalue()


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        ({}, "runs until it is stopped with Ctrl-C."),
        ({"total_minutes": 30.0}, "ends after 30 minutes."),
        ({"total_minutes": 1.0}, "ends after 1 minute."),
        (
            {"evaluator": EvaluatorConfig(stop_at_return=475.0), "total_updates": 1000},
            "ends after 1,000 updates or an evaluation with a return of 475, whichever comes first.",
        ),
        (
            {"total_minutes": 0.5, "total_environment_frames": 4_000_000, "total_updates": 1000},
            "ends after 0.5 minutes or 4,000,000 frames or 1,000 updates, whichever comes first.",
        ),
    ],
)
def test_introduction_lists_the_roles_and_the_limits_of_the_run(limits: dict[str, object], end: str) -> None:
    text = introduction(config(**limits))
    assert "Training Ape-X on Pong-v5 with 64 environments" in text
    assert end in text
    assert "1,000 transitions" in text
    assert "runs/Pong-v5-1" in text
