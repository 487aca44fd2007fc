"""The supervisor with stand-ins for the roles, which do as they are told: who is started again, given up, or killed."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from apex_jax.config import ActorConfig, AddressConfig, Config, EnvironmentConfig
from apex_jax.config.command_line import parse
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.host.errors import RunError
from apex_jax.operations import records
from apex_jax.operations.pages import RunPage
from apex_jax.process import StopSignal
from apex_jax.run.provenance import check_resumable, read_starts, write_config
from apex_jax.workers import local
from apex_jax.workers.local import LocalRun, run_lock
from tests.rigs.live_views import write
from tests.rigs.processes import wait_for_the_end_of, wait_until

WAIT = "sys.stdin.buffer.read()"  # until the supervisor is gone
READY = "(folder / 'ready').touch()"
WRITE_ARGUMENTS = 'pathlib.Path(folder / "arguments").write_text("\\n".join(sys.argv[1:]))'
WAIT_FOR_WORD = "sys.stdin.buffer.read(1)"  # that the run is over
STAND_IN = """
import os, pathlib, signal, subprocess, sys, threading
folder = pathlib.Path(__file__).parent

def lives(name):  # process ids of all that have begun
    path = folder / f"{name}.lives"
    return path.read_text().splitlines() if path.exists() else []

def is_gone(name):  # and the supervisor knows it
    return not pathlib.Path("/proc", lives(name)[-1]).exists()

def wait_until(condition):
    while not condition():
        threading.Event().wait(0.01)

name = sys.argv[sys.argv.index("--name") + 1]
with open(folder / f"{name}.lives", "a") as file:
    file.write(f"{os.getpid()}\\n")
life = len(lives(name))
wait_until(lambda: all(map(lives, ("replay", "learner", "actor-0", "evaluator"))))
exec((folder / f"{name}.py").read_text())
"""


class Stage:
    """A run whose roles are lines of Python, run once all roles are there; `life` in them counts the role's starts."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.stop = StopSignal()
        self.config = Config(run_directory=str(folder / "run"), actor=ActorConfig(processes=1))
        (folder / "main.py").write_text(STAND_IN)
        (folder / "run").mkdir()

    def run(self, **lines: str) -> None:
        """Plays a run; roles without lines do what they do in a run that ends well at once."""
        well = {"replay": WAIT, "learner": "", "actor-0": WAIT, "evaluator": WAIT_FOR_WORD}
        for name, line in (well | {name.replace("_", "-"): line for name, line in lines.items()}).items():
            (self.folder / f"{name}.py").write_text(line)
        with RunPage(self.config) as page:
            self.local = LocalRun(self.config, describe(self.config), AddressConfig(weights="ipc://w"), self.stop, page)
            assert self.local.report()["finished"] is False
            self.local.run()

    @property
    def lives(self) -> dict[str, int]:
        """How often each role was started."""
        return {path.stem: len(path.read_text().splitlines()) for path in self.folder.glob("*.lives")}


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(local, "COMMAND", [sys.executable, str(tmp_path / "main.py")])
    monkeypatch.setattr(local, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(local, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(local, "LONGEST_HEAD_START_SECONDS", 0.0)  # the stand-ins report nothing
    return Stage(tmp_path)


ONCE_EACH = {"replay": 1, "learner": 1, "actor-0": 1, "evaluator": 1}


def test_run_is_over_when_the_learner_and_then_the_evaluator_have_ended(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.run()
    assert stage.lives == ONCE_EACH
    assert stage.local.report()["finished"] is True
    printed = capsys.readouterr().out
    assert f"Files:       {stage.config.run_directory}\n" in printed
    assert f"Look at:     {stage.config.run_directory}/report.html\n" in printed
    assert re.search(r"^Watch it at http://127\.0\.0\.1:\d+/$", printed, re.MULTILINE)


def test_evaluator_is_started_once_the_other_roles_have_reported(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LONGEST_HEAD_START_SECONDS", 600.0)
    monkeypatch.setattr(records, "REPORT_SECONDS", 0.01)
    others, lives_before_the_last_report = list(ONCE_EACH)[:-1], {}

    def report() -> None:
        wait_until(lambda: stage.lives.keys() >= {*others})
        lives_before_the_last_report.update(stage.lives)
        for name in others:
            path = records.report_path(stage.config.run_directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text("{}")

    reporter = threading.Thread(target=report)
    reporter.start()
    stage.run()
    reporter.join()
    assert "evaluator" not in lives_before_the_last_report
    assert stage.lives == ONCE_EACH


def test_roles_are_given_the_config_and_the_addresses_of_the_run(stage: Stage) -> None:
    stage.run(actor_0=f'{WRITE_ARGUMENTS}\nassert os.environ["APEX_JAX_SUPERVISED"]\n{WAIT}')
    assert stage.lives == ONCE_EACH
    command = parse((stage.folder / "arguments").read_text().splitlines())
    assert (command.role, command.name) == ("actor", "actor-0")
    assert command.config == stage.config.replace(addresses=AddressConfig(weights="ipc://w"))
    kept = load(Path(stage.config.run_directory, "logs", "config.yaml"))
    assert kept == stage.config, "the run's own is the learner's to write"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "{}['ab'[life - 1]]", "os._exit(143)"])
def test_role_that_fails_is_started_again(stage: Stage, end: str, caplog: pytest.LogCaptureFixture) -> None:
    stage.run(learner=f"if life <= 2: {end}")
    assert stage.lives == {**ONCE_EACH, "learner": 3}
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "learner ended with exit code" in caplog.text
    assert ("exit code 1 (KeyError: 'a')" in caplog.text) is (end[0] == "{")


def test_processes_that_environments_started_in_a_role_s_own_process_end_with_it(stage: Stage) -> None:
    task = EnvironmentConfig(task="gymnasium:CartPole-v1", own_processes=False, frame_stack=1, frame_skip=1)
    stage.config = stage.config.replace(environment=task)
    start = "(folder / f'started-{life}').write_text(str(subprocess.Popen(['sleep', '600']).pid))"
    stage.run(
        actor_0=f"{start}; life == 1 and os.kill(os.getpid(), signal.SIGKILL); {READY}; {WAIT}",
        learner="wait_until((folder / 'ready').exists)",
    )
    wait_for_the_end_of([int(path.read_text()) for path in stage.folder.glob("started-*")])
    assert stage.lives["actor-0"] == 2


@pytest.mark.parametrize(("role", "line", "error", "starts"), [
    ("actor-0", 'print("life", life)\nsys.exit(4)', "6 times in a row .*exit code 4.*  life 6$", 6),
    ("learner", 'sys.exit("error: no disk")', "2 times in a row .*exit code 1.*  error: no disk$", 2),
    ("learner", 'sys.exit(f"error: {life}.5e-3 is too much")', "2 times in a row .*  error: 2.5e-3 is too much$", 2),
    ("learner", r'print("E: a\n---\nFor simplicity, JAX has removed its frames"); sys.exit(1)', "2 times in a row", 2),
    ("actor-0", "1 / 0", "2 times in a row .*exit code 1.*  ZeroDivisionError: division by zero$", 2),
    ("learner", 'print("fatal: not finite"); sys.exit(3)', "cannot go on .*exit code 3.*  fatal: not finite$", 1),
    ("evaluator", "sys.exit(2)", "refused its configuration .*exit code 2", 1),
])  # fmt: skip
def test_role_that_cannot_be_kept_alive_ends_the_run_with_its_last_log_lines(
    stage: Stage, role: str, line: str, error: str, starts: int
) -> None:
    with pytest.raises(RunError, match=rf"(?s)^{role} .*{error}"):
        stage.run(**{"learner": WAIT, role: line})
    assert stage.lives == {**ONCE_EACH, role: starts}


@pytest.mark.parametrize(("steady_seconds", "line", "starts"), [
    (60.0, 'sys.exit("error: " + "abc"[life - 1] if life <= 3 else 0)', 4),
    (0.0, "sys.exit(4 if life <= 6 else 0)", 7),  # each restart is forgotten after a steady time
])  # fmt: skip
def test_role_whose_errors_differ_or_are_seldom_is_restarted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, steady_seconds: float, line: str, starts: int
) -> None:
    monkeypatch.setattr(local, "STEADY_SECONDS", steady_seconds)
    stage.run(learner=line)
    assert stage.lives["learner"] == starts


def finished_run(folder: Path, lacks: str = "") -> Config:
    """Writes what a finished run leaves, but for what it lacks."""
    updates = 120 if lacks == "updates" else 100
    config = Config(run_directory=str(folder), total_updates=updates, actor=ActorConfig(processes=1))
    write(folder, "learner", 9, 4000, learner__updates=100.0)
    evaluated = 90.0 if lacks == "last evaluation" else 100.0
    write(folder, "evaluator", 9, 4000, eval__episodic_return=14.6, eval__updates=evaluated)
    (folder / "checkpoints" / ("90" if lacks == "checkpoint" else "100")).mkdir(parents=True)
    return config


@pytest.mark.parametrize("lacks", ["", "updates", "checkpoint", "last evaluation"])
def test_finished_run_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lacks: str
) -> None:
    started: list[LocalRun] = []
    monkeypatch.setattr(LocalRun, "run", lambda run: started.append(run))
    config = finished_run(tmp_path, lacks)
    assert local.run(config, "local", StopSignal()) == 0
    assert bool(started) == (lacks != "") == bool(read_starts(tmp_path))
    printed = capsys.readouterr().out
    parts = (f"{tmp_path} ", "total_updates=100", "100 updates", "4,000 frames", "14.6", "raise total_updates")
    assert [part for part in parts if part not in printed] == ([] if not lacks else list(parts))


def test_finished_run_names_the_changed_settings_that_are_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = finished_run(tmp_path)
    write_config(config, tmp_path)
    changed = config.replace(learner=replace(config.learner, learning_rate=0.5))
    assert local.run(changed, "local", StopSignal()) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"learner.learning_rate=0.5 (was {config.learner.learning_rate})" in last


def test_number_of_actors_is_printed_and_the_same_for_all_roles_and_resumes_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    monkeypatch.setattr(LocalRun, "run", lambda _: write_config(load(tmp_path / "logs" / "config.yaml"), tmp_path))
    for cores, gpu, given, number in ((16, True, [], 3), (2, False, [], 1), (16, True, ["actor.processes=2"], 2)):
        monkeypatch.setattr(local, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(local, "has_gpu", lambda _, gpu=gpu: gpu)
        config = load(None, [f"run_directory={tmp_path}", "actor.environments=8", *given])
        check_resumable(config)
        assert local.run(config, "local", StopSignal()) == 0
        line = f"{number} actor process{'es' * (number > 1)}, for {cores} cores{' and a GPU' * gpu}\n"
        assert capsys.readouterr().out == ("" if given else line)
        of_roles, of_run = load(tmp_path / "logs" / "config.yaml"), load(tmp_path / "config.yaml")
        assert [(each.actor.processes, each.ladder_size) for each in (of_roles, of_run)] == [(number, 8 * number)] * 2


def test_learner_that_fails_at_the_end_is_restarted_with_its_peers(stage: Stage) -> None:
    dies_when_alone = "if life == 1: wait_until(lambda: is_gone('replay') and is_gone('actor-0')); sys.exit(1)\n"
    finds_them_again = "wait_until(lambda: len(lives('replay')) == len(lives('actor-0')) == 2)"
    leaves_early = f"if life == 2: {WAIT}"
    stage.run(learner=dies_when_alone + finds_them_again, replay=leaves_early, actor_0=leaves_early)
    assert stage.lives == {"replay": 2, "learner": 2, "actor-0": 2, "evaluator": 1}


def test_last_evaluation_that_fails_can_be_repeated(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.run(evaluator=f"{WAIT_FOR_WORD}; sys.exit(3)")
    assert stage.lives == ONCE_EACH
    assert "the last evaluation failed with exit code 3" in caplog.text
    assert f"main.py --role evaluator checkpoint={stage.config.run_directory}" in caplog.text


def test_evaluator_that_is_down_when_the_run_ends_comes_back_for_the_last_evaluation(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "FIRST_DELAY_SECONDS", 600.0)  # it would be down much longer
    stage.run(
        learner="wait_until(lambda: is_gone('evaluator'))", evaluator=f"life == 1 and sys.exit(1); {WAIT_FOR_WORD}"
    )
    assert stage.lives["evaluator"] == 2


def test_role_that_ignores_sigterm_is_killed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SAVE_SECONDS", 0.1)
    deaf = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\n{WAIT}"
    said = "(folder / 'run' / 'logs' / 'replay.log').read_text()"
    stage.run(replay=deaf, learner=f"wait_until(lambda: {said})")
    pid = int(Path(stage.config.run_directory, "logs", "replay.log").read_text())
    assert not Path("/proc", str(pid)).exists()


@contextlib.contextmanager
def stopped_once_everyone_is_there(stage: Stage) -> Iterator[None]:
    """Stops the run once each role has begun and one of them is `READY`."""
    paths = [stage.folder / f"{name}.lives" for name in ONCE_EACH]

    def stop() -> None:
        wait_until(lambda: all(map(Path.exists, paths)) and (stage.folder / "ready").exists())
        stage.stop.set()

    director = threading.Thread(target=stop)
    director.start()
    yield
    director.join()
    assert not [path for path in paths if Path("/proc", path.read_text().strip()).exists()]


def test_stop_ends_all_roles(stage: Stage) -> None:
    with stopped_once_everyone_is_there(stage):
        stage.run(learner=f"{READY}; {WAIT}")
    assert stage.lives == ONCE_EACH


def test_failed_save_at_a_stop_is_printed(stage: Stage) -> None:
    said = "print('fatal: the last updates are lost: no room', flush=True)"
    lost = f"signal.signal(signal.SIGTERM, lambda *_: ({said}, os._exit(3)))"
    with (
        stopped_once_everyone_is_there(stage),
        pytest.raises(RunError, match=r"^learner ended with exit code 3, see .*learner\.log: the last updates are l"),
    ):
        stage.run(learner=f"{lost}; {READY}; {WAIT}")


def test_run_directory_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    with run_lock(tmp_path / "run"), pytest.raises(RunError, match="another run is using"), run_lock(tmp_path / "run"):
        raise AssertionError("locked twice")
    with pytest.raises(PermissionError, match="of the run"), run_lock(tmp_path / "run"):
        raise PermissionError("of the run")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"), run_lock(tmp_path / "file" / "run"):
        raise AssertionError("a file is no folder")
