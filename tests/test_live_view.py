"""The live view: true numbers from the files of all processes, and readable output of both kinds."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

from apex_jax.config import ActorConfig, Config, EnvironmentConfig, ReplayConfig
from apex_jax.metrics import MetricsWriter
from apex_jax.operations.live_view import LiveView, introduction
from apex_jax.operations.progress import Evaluation, Progress, ProgressReader

START = 1_000_000.0  # unix seconds


class Clock:
    """Time that a test sets."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def write(
    directory: Path, name: str, seconds: float, step: int, started: float = START, **values: float | None
) -> None:
    """Appends what process `name`, started at `started`, writes `seconds` later; `__` in a keyword stands for `/`."""
    path = directory / "metrics" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    tags = {tag.replace("__", "/"): value for tag, value in values.items()}
    with open(path, "a") as file:
        file.write(json.dumps({"time": started + seconds, "seconds": seconds, "step": step} | tags) + "\n")


def config(**changes: object) -> Config:
    replay = ReplayConfig(capacity_transitions=10_000, min_size_to_sample=1_000, samples_per_insert=2.0)
    return Config(replay=replay, actor=ActorConfig(processes=2)).replace(**changes)


def progress(**changes: object) -> Progress:
    base = Progress(
        phase="learning",
        elapsed_seconds=3723.9,
        frames=12_345_678,
        total_frames=40_000_000,
        frames_per_second=5120.4,
        updates=98_765,
        updates_per_second=42.13,
        replay_size=61_234,
        replay_capacity=200_000,
        min_size_to_sample=5_000,
        samples_per_insert=2.013,
        target_samples_per_insert=2.0,
        training_return=-12.34,
        latest_evaluation=Evaluation(7.25, 0.7918),
        best_evaluation=Evaluation(9.5, 0.8555),
        seconds_left=5400.0,
        roles={"learner": "running", "replay": "running", "actor-0": "restarted 1x", "evaluator": "running"},
        memory_bytes=3 * 2**30,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_run_passes_from_starting_over_filling_and_learning_to_finishing(tmp_path: Path) -> None:
    reader = ProgressReader(str(tmp_path), config(total_updates=100), Clock())
    assert reader.read().phase == "starting"
    write(tmp_path, "learner", 1, 0, learner__updates=0, charts__updates_per_second=0.0)
    assert reader.read().phase == "starting"
    write(tmp_path, "replay", 1, 40, replay__size_transitions=10)
    assert reader.read().phase == "filling the replay"
    write(tmp_path, "replay", 2, 5000, replay__size_transitions=5000)
    assert reader.read().phase == "compiling the learner"
    write(tmp_path, "learner", 9, 4000, learner__updates=40, charts__updates_per_second=8.0)
    assert reader.read().phase == "learning"
    write(tmp_path, "learner", 14, 8000, learner__updates=40, charts__updates_per_second=0.0)
    assert reader.read().phase == "learning"  # it waits for batches; it does not go back
    write(tmp_path, "learner", 19, 9000, learner__updates=100, charts__updates_per_second=8.0)
    assert reader.read().phase == "finishing"


def test_each_limit_ends_the_run(tmp_path: Path) -> None:
    clock = Clock()
    for limit, reached in (("total_environment_frames", 4000), ("total_updates", 100), ("total_minutes", 1.0)):
        for value, phase in ((reached, "finishing"), (reached * 2, "starting")):
            directory = tmp_path / f"{limit}-{value}"
            directory.mkdir()
            reader = ProgressReader(str(directory), config(**{limit: value}), clock)
            write(directory, "learner", 0, 4000, learner__updates=100)
            reader.read()
            clock.now += 60
            assert reader.read().phase == phase, (limit, value)


def test_numbers_come_from_the_files_of_all_processes(tmp_path: Path) -> None:
    clock = Clock()
    reader = ProgressReader(str(tmp_path), config(total_environment_frames=100_000), clock)
    memory = "system__resident_memory_bytes"
    write(tmp_path, "learner", 5, 8000, learner__updates=50, charts__updates_per_second=10.0, **{memory: 300})
    write(tmp_path, "replay", 5, 8400, replay__size_transitions=2100, replay__samples_per_insert=1.9, **{memory: 40})
    write(tmp_path, "replay", 9, 8400, charts__episodic_return=-20.5, charts__environment_frames_per_second=1600.0)
    write(tmp_path, "actor-1", 5, 8000, actor__steps_per_second=200.0, **{memory: 2})
    clock.now = START + 12
    now = reader.read()
    assert (now.frames, now.frames_per_second, now.total_frames) == (8400, 1600.0, 100_000)
    assert (now.updates, now.updates_per_second) == (50, 10.0)
    assert (now.replay_size, now.replay_capacity, now.min_size_to_sample) == (2100, 10_000, 1_000)
    assert (now.samples_per_insert, now.target_samples_per_insert) == (1.9, 2.0)
    assert (now.training_return, now.elapsed_seconds, now.memory_bytes) == (-20.5, 12.0, 342)
    assert now.roles == {
        "learner": "running",
        "replay": "running",
        "actor-0": "starting",
        "actor-1": "running",
        "evaluator": "starting",
    }


def test_newest_value_of_a_tag_holds_whichever_process_wrote_it(tmp_path: Path) -> None:
    reader = ProgressReader(str(tmp_path), config(), Clock())
    write(tmp_path, "learner", 9, 4, charts__episodic_return=2.0)
    write(tmp_path, "replay", 5, 4, charts__episodic_return=1.0)
    assert reader.read().training_return == 2.0
    write(tmp_path, "replay", 10, 4, charts__episodic_return=3.0)
    write(tmp_path, "learner", 11, 4, charts__episodic_return=None)
    assert reader.read().training_return == 3.0


def test_frames_of_the_replay_count_while_the_learner_hears_of_none(tmp_path: Path) -> None:
    reader = ProgressReader(str(tmp_path), config(), Clock())
    assert reader.read().frames == 0
    write(tmp_path, "replay", 1, 4000)
    write(tmp_path, "learner", 2, 0)
    assert reader.read().frames == 4000


def test_process_whose_time_begins_anew_was_restarted(tmp_path: Path) -> None:
    reader = ProgressReader(str(tmp_path), config(), Clock())
    for started, seconds in ((0, 5), (0, 10), (20, 1), (20, 6), (40, 2)):
        write(tmp_path, "actor-0", seconds, 4, started=START + started)
    assert reader.read().roles["actor-0"] == "restarted 2x"


def test_best_evaluation_stays_when_a_worse_one_follows(tmp_path: Path) -> None:
    reader = ProgressReader(str(tmp_path), config(), Clock())
    assert (reader.read().latest_evaluation, reader.read().best_evaluation) == (None, None)
    write(tmp_path, "evaluator", 1, 4, eval__episodic_return=14.6, eval__human_normalized_score=1.0)
    write(tmp_path, "evaluator", 2, 4, eval__episodic_return=-20.7, eval__human_normalized_score=0.0)
    write(tmp_path, "evaluator", 3, 4, system__resident_memory_bytes=1)
    now = reader.read()
    assert now.latest_evaluation == Evaluation(-20.7, 0.0)
    assert now.best_evaluation == Evaluation(14.6, 1.0)


def test_resumed_run_goes_on_from_the_history_but_not_with_its_rates(tmp_path: Path) -> None:
    write(tmp_path, "learner", 90, 4000, learner__updates=70, charts__updates_per_second=9.0)
    write(tmp_path, "replay", 90, 4000, replay__size_transitions=500, charts__environment_frames_per_second=100.0)
    write(tmp_path, "evaluator", 90, 4000, eval__episodic_return=3.0)
    reader = ProgressReader(str(tmp_path), config(total_updates=140), Clock(START + 500))
    now = reader.read()
    assert (now.phase, now.frames, now.updates) == ("starting", 4000, 70)
    assert (now.updates_per_second, now.frames_per_second, now.replay_size, now.seconds_left) == (0, 0, 0, None)
    assert now.best_evaluation == Evaluation(3.0, None)
    assert set(now.roles.values()) == {"starting"}
    write(tmp_path, "learner", 1, 4004, started=START + 500, learner__updates=70)
    assert reader.read().roles["learner"] == "running"  # the start of a resumed run is no restart


@pytest.mark.parametrize(
    ("limits", "seconds_left"),
    [
        ({}, None),
        ({"total_minutes": 2.0}, 120 - 20),
        ({"total_environment_frames": 50_000}, (50_000 - 20_000) / 1000),
        ({"total_updates": 500}, (500 - 400) / 20),
        ({"total_minutes": 2.0, "total_environment_frames": 50_000, "total_updates": 5000}, 30),
        ({"total_minutes": 0.4, "total_environment_frames": 50_000, "total_updates": 1000}, 4),
        ({"total_environment_frames": 5_000}, 0),
    ],
)
def test_time_left_is_that_of_the_limit_that_comes_first(
    tmp_path: Path, limits: dict[str, float], seconds_left: float | None
) -> None:
    clock = Clock()
    reader = ProgressReader(str(tmp_path), config(**limits), clock)
    for second in range(0, 21, 2):  # the first rate that the learner writes counts the time that it compiled
        rate, minutes = (20.0 if second else 0.01), {"charts__elapsed_minutes": second / 60}
        frames, updates = 1000 * second, 20 * second
        write(tmp_path, "learner", second, frames, learner__updates=updates, charts__updates_per_second=rate, **minutes)
        clock.now = START + second
        left = reader.read().seconds_left
        if second < 5 and "total_minutes" not in limits:
            assert left is None  # no guess before it is sound
    assert left == (None if seconds_left is None else pytest.approx(seconds_left))


def test_time_left_is_known_before_any_process_writes_where_minutes_limit_the_run(tmp_path: Path) -> None:
    limits = {"total_minutes": 30.0, "total_environment_frames": 10**9, "total_updates": 10**9}
    assert ProgressReader(str(tmp_path), config(**limits), Clock()).read().seconds_left == 1800


def test_reader_understands_what_the_writer_writes(tmp_path: Path) -> None:
    reader = ProgressReader(str(tmp_path), config())
    MetricsWriter(str(tmp_path), "learner").write(4000, {"learner/updates": 7, "charts/updates_per_second": 2.5})
    now = reader.read()
    assert (now.phase, now.frames, now.updates, now.updates_per_second) == ("learning", 4000, 7, 2.5)


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
        " replay 61,234 of 200,000 transitions, samples per insert 2.01 (target: 2), training return -12.3,"
        " evaluation 7.2 (79% of human), best 9.5 (86% of human), actor-0 restarted 1x"
    )


def test_plain_output_says_a_warning_once_while_it_lasts() -> None:
    stream, clock = io.StringIO(), Clock()
    view = LiveView(config(), stream, clock)
    for warnings in (("q is 120",), ("q is 130", "other"), (), ("q is 90.5",)):
        view.update(progress(warnings=warnings))
        clock.now += 10
    told = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert told == ["warning: q is 120", "warning: other", "warning: q is 90.5"]


def test_plain_output_says_how_far_the_replay_is_filled_and_what_is_not_known_yet() -> None:
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
        "-12.3",
        "7.2 (79% of human), best 9.5 (86% of human)",
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
        view.update(progress(latest_evaluation=Evaluation(-0.04, -0.004)))
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
def test_time_that_is_spent_is_not_told_as_time_left(phase: str, left: float, said: str) -> None:
    stream = io.StringIO()
    LiveView(config(), stream, Clock()).update(progress(phase=phase, seconds_left=left))
    assert said in stream.getvalue()
    assert "0:00:00" not in stream.getvalue()


def test_many_actors_in_one_state_are_counted_not_named(terminal: Terminal) -> None:
    roles = {"replay": "running", **{f"actor-{i}": "running" for i in range(255)}, "actor-255": "restarted 1x"}
    with LiveView(config(), terminal) as view:
        view.update(progress(roles=roles))
    assert "restarted 1x: actor-255; running: replay, 255 actors" in Text.from_ansi(terminal.getvalue()).plain


def test_closing_gives_the_cursor_back_once(terminal: Terminal) -> None:
    view = LiveView(config(), terminal)
    assert terminal.getvalue().count("\x1b[?25l") == 1
    view.update(progress())
    view.close()
    view.close()
    assert terminal.getvalue().count("\x1b[?25h") == 1


def test_error_while_the_panel_stands_gives_the_cursor_back(terminal: Terminal) -> None:
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
            {"total_minutes": 0.5, "total_environment_frames": 4_000_000, "total_updates": 1000},
            "ends after 0.5 minutes or 4,000,000 frames or 1,000 updates, whichever comes first.",
        ),
    ],
)
def test_introduction_says_what_starts_and_when_it_ends(limits: dict[str, float], end: str) -> None:
    text = introduction(config(**limits))
    assert "Training Ape-X on Pong-v5 with 64 environments" in text
    assert end in text
    assert "1,000 transitions" in text
    assert "runs/Pong-v5-1" in text
