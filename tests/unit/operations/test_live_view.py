"""The live view shows every number of a run, as lines or as a panel that fits the terminal."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

from apex_jax.config import EnvironmentConfig, LearnerConfig, NetworkConfig
from apex_jax.operations.live_view import LiveView, final_summary, rows
from apex_jax.operations.progress import EvaluationSummary
from tests.rigs.live_views import START, Clock, config, progress


class Terminal(io.StringIO):
    """A stream whose `isatty` is true."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal 80 columns wide."""
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    return Terminal()


def panel_of(terminal: Terminal, page_address: str = "", task: str = "Pong-v5", **changes: object) -> list[str]:
    """Returns the lines of the panel that shows this progress."""
    of_task = config(environment=EnvironmentConfig(task=task))
    with contextlib.closing(LiveView(of_task, terminal, page_address=page_address)) as view:
        before = len(terminal.getvalue())
        view.update(progress(**changes))
        return Text.from_ansi(terminal.getvalue()[before:]).plain.splitlines()


def line_of(**changes: object) -> str:
    stream = io.StringIO()
    LiveView(config(), stream, Clock()).update(progress(**changes))
    return stream.getvalue().splitlines()[-1]


def test_view_says_when_learning_will_start_at_this_speed_and_which_key_decides() -> None:
    line = line_of(replay_size=250, frames_per_second=40.0)  # of 1,000 transitions, of four frames each
    assert "replay 250 of the 1,000 needed to start (25%), in about 0:01:15; sooner: replay.min_size_to_sample" in line
    assert "needed to start (0%);" in line_of(replay_size=0, frames_per_second=0.0)


def test_view_hints_at_the_configuration_for_slow_environments_of_numbers_once_it_knows_the_speed() -> None:
    network = NetworkConfig(channels=(), kernel_sizes=(), strides=())
    numbers = config(network=network, environment=EnvironmentConfig(frame_skip=1))
    pixels, an_update_a_step = numbers.replace(network=NetworkConfig()), numbers.replace(learner=LearnerConfig(2))
    slow, fast = {"frames_per_second": 199.0}, {"frames_per_second": 201.0}
    cases = [(numbers, slow), (numbers, fast), (numbers, slow | {"elapsed_seconds": 10.0})]
    cases += [(pixels, slow), (an_update_a_step, slow)]
    hints = ["--config slow" in rows(run, progress(replay_size=250, **seen))[3].text for run, seen in cases]
    assert hints == [True, False, False, False, False]


def test_plain_output_begins_at_once_and_is_a_line_each_ten_seconds_and_with_each_evaluation() -> None:
    stream, clock = io.StringIO(), Clock()
    with contextlib.closing(LiveView(config(), stream, clock)) as view:
        introduced = len(stream.getvalue().splitlines())
        assert introduced >= 1
        for tick in range(50):  # half seconds
            clock.now = START + tick / 2
            view.update(progress(latest_evaluation=EvaluationSummary(float(tick >= 25), None, 8)))
    kinds = [line.partition(":")[0] for line in stream.getvalue().splitlines()[introduced:]]
    assert kinds == ["evaluation", "learning", "learning", "evaluation", "learning"]  # 0, 0, 10, 12.5, 20
    assert "\x1b" not in stream.getvalue()


def test_plain_output_prints_a_lasting_warning_once() -> None:
    stream, clock = io.StringIO(), Clock()
    view = LiveView(config(), stream, clock)
    for warnings in (("q is 120",), ("q is 130", "other"), (), ("q is 90.5",)):
        view.update(progress(warnings=warnings))
        clock.now += 10
    printed = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert printed == ["warning: q is 120", "warning: other", "warning: q is 90.5"]


def test_every_number_is_shown_in_a_line_and_in_a_panel_within_80_columns(terminal: Terminal) -> None:
    panel = panel_of(terminal)
    assert len(panel) <= 12
    assert max(cell_len(line) for line in panel) <= 80
    numbers = ["learning", "1:02:03, about 1:30:00 left", "12,345,678", "5,120", "98,765", "42.1", "2.01 (target: 2)"]
    numbers += ["61,234 of 10,000 transitions", "-12.34", "7.25 (79% of human), best 9.5 (86% of human)", "actor-0"]
    for text in ("\n".join(panel), line_of()):
        assert [number for number in (*numbers, "3.00 GiB") if number not in text] == []
    assert "restarted 1x: actor-0; running: learner, replay" in "\n".join(panel)


def test_terminal_has_its_cursor_back_at_the_end_and_after_an_error(terminal: Terminal) -> None:
    view = LiveView(config(), terminal)
    assert terminal.getvalue().count("\x1b[?25l") == 1
    view.close()
    view.close()
    assert terminal.getvalue().count("\x1b[?25h") == 1
    with pytest.raises(KeyboardInterrupt), contextlib.closing(LiveView(config(), terminal)):
        raise KeyboardInterrupt
    assert terminal.getvalue().count("\x1b[?25h") == 2


# The summary of the end -----------------------------------------------------------------------------------------


CHECKPOINT = "checkpoints/4000"


def summary_of(run: Path, *folders: str, screen: bool = True, **changes: object) -> str:
    """Returns the summary of a run whose directory has these folders."""
    for name in folders:
        (run / name).mkdir(parents=True)
    return final_summary(progress(**changes), config(run_directory=str(run)), screen)


def test_summary_lists_results_and_commands_to_look_at_them(tmp_path: Path) -> None:
    run = tmp_path / "my runs"
    text = summary_of(run, CHECKPOINT, warnings=("a warning",), reached_limits=("total_updates=9",))
    play = f"--role evaluator checkpoint='{run}' episodes=100"
    parts = ["12,345,678", "98,765", "7.25 (79%", "9.5 (86%", "total_updates=9", "a warning", f"'{run}'", play]
    assert [part for part in parts if part not in text] == []
    assert "Record:" not in text, "it would fail, too"
    assert "Look at" not in text
    for name in ("curves.png", "video.mp4"):
        (run / name).touch()
    text = summary_of(run, reached_limits=("total_updates=9",))
    assert f"checkpoint='{run}' episodes=1 video='{run}/game'" in text
    pictures = [line for line in text.splitlines() if line.startswith("Look at")]
    assert pictures == [f"Look at:     '{run}/{name}'" for name in ("curves.png", "video.mp4")]


def test_summary_names_only_commands_and_files_that_work(tmp_path: Path) -> None:
    text = summary_of(tmp_path / "short", "logs", "checkpoints/.saving-8")
    assert "none was saved" in text
    assert not [word for word in ("--role evaluator", "Look at") if word in text]
    blind = summary_of(tmp_path / "blind", CHECKPOINT, screen=False)
    assert "episodes=100" in blind
    assert "video=" not in blind
