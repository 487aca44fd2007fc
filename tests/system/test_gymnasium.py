"""Environments of a user, trained by the whole program; what the user sees of those that fail."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from apex_jax.agent.segments import SegmentBuilder
from apex_jax.config.load import load
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.segment_codec import decode_segment, encode_segment
from tests.rigs.environments import processes_of
from tests.rigs.processes import ROOT, Program, Programs, wait_for_the_end_of

SECONDS = 300.0
ERROR = re.compile(r"ValueError: the (made|step) failed \(.*/tests/rigs/environments\.py, line \d+\)")


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def train(programs: Programs, directory: Path, name: str, *settings: str) -> Program:
    """Trains a little on an environment of the rig."""
    small = ("actor.environments=2", "evaluator.episodes=2", "replay.min_size_to_sample=500", "total_updates=200")
    task = f"environment.task=gymnasium:tests.rigs.environments:{name}"
    arguments = ("--config", str(ROOT / "configs" / "cartpole.yaml"), f"run_directory={directory}", *small, task)
    return programs.start(*arguments, *settings, environment={"PYTHONPATH": str(ROOT)})


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("at", ["step", "made"])
def test_environment_that_always_fails_ends_the_run_with_one_line_and_a_traceback_in_the_log(
    at: str, programs: Programs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with programs:
        program = train(programs, run, "Raises", f"environment.settings={{at: {at}, step: 30}}")
        assert program.exit_code(SECONDS) == 1
    assert ERROR.search(program.stderr.splitlines()[-1])
    assert "Traceback" in (program.stderr if at == "made" else (run / "logs" / "actor-0.log").read_text())


@pytest.mark.ci
def test_environment_that_fails_in_its_first_steps_ends_the_start_before_anything_is_written(
    programs: Programs, tmp_path: Path
) -> None:
    with programs:
        program = train(programs, tmp_path / "run", "Raises", "environment.settings={at: step, step: 3}")
        assert program.exit_code(SECONDS) == 1
    assert ERROR.search(program.stderr.splitlines()[-1])
    assert not (tmp_path / "run").exists()


CHECKED = {
    "gymnasium:tests.rigs.environments:Cards": ("vectors of 16 numbers", "8 choices", "which of them are valid"),
    "gymnasium:Pendulum-v1 --config pendulum": ("vectors of 3 numbers", "1 numbers", "dpg", "2,000 steps"),
    "Pong-v5": ("uint8 [44, 44], the newest 4 stacked", "6 choices"),
}


@pytest.mark.parametrize("arguments", [
    pytest.param(each, marks=pytest.mark.ci if "Cards" in each else pytest.mark.long) for each in CHECKED
])  # fmt: skip
def test_check_prints_how_an_environment_is_read_and_leaves_nothing(
    arguments: str, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with programs:
        program = programs.start("check", *arguments.split(), environment={"PYTHONPATH": str(ROOT)})
        assert program.exit_code(SECONDS) == 0, program.stderr
    assert all(word in program.stdout for word in (*CHECKED[arguments], "steps a second")), program.stdout
    assert {path.name for path in tmp_path.rglob("*")} == {"program-0.out", "program-0.err"}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("end", ["normal", signal.SIGINT, signal.SIGKILL])
def test_environments_are_closed_and_their_processes_end_with_the_run(
    end: str | signal.Signals, programs: Programs, tmp_path: Path
) -> None:
    started, closed = tmp_path / "processes", tmp_path / "closed"
    settings = [f"environment.settings={{processes: {started}, closed: {closed}}}"]
    with programs:
        program = train(
            programs, tmp_path / "run", "Simulated", *settings, "total_updates=20", "evaluator.max_episode_frames=100"
        )
        if isinstance(end, signal.Signals):
            evaluations = tmp_path / "run" / "evaluations.jsonl"
            program.wait_until(evaluations.exists)
            program.send(end)
        code = program.exit_code(SECONDS)
        assert code == {"normal": 0, signal.SIGINT: 130, signal.SIGKILL: -9}[end], program.stderr
        leaders, processes = processes_of(started)
        wait_for_the_end_of(leaders, processes)
        assert set(leaders) == set(map(int, closed.read_text().split()))
        made = 1 + 2 + 2  # one is described and tried, the actor and the evaluator have two each
        assert len(leaders) == made if end == "normal" else len(leaders) <= made  # an early end finds no actor yet


@pytest.mark.ci
def test_frames_of_an_atari_game_of_gymnasium_reach_the_segments_bit_for_bit() -> None:
    task = "environment.task=gymnasium:ale_py:ALE/Breakout-v5"
    settings = load(None, [task, "environment.settings={obs_type: grayscale}", "environment.frame_skip=1"])
    environment_spec, seeds, num_steps = describe(settings), [3, 4], 400
    spec = environment_spec.spec
    assert spec.frame_shape == (210, 160)
    environment = VectorEnvironment(settings, environment_spec, np.array(seeds), 600)
    builder = SegmentBuilder(spec, len(seeds), 0.99, 1.0, True)
    twins = [gymnasium.make("ale_py:ALE/Breakout-v5", obs_type="grayscale") for _ in seeds]
    frames: list[list[np.ndarray]] = [[], []]  # as the twins return them, the first of an episode four times
    ended, lives_lost, before = [True, True], 0, np.zeros(2, np.int32)
    values, segments = np.zeros(2, np.float32), []
    for number in range(num_steps):
        step = environment.receive()
        actions = np.random.default_rng(number).integers(spec.action.num_actions, size=2).astype(np.int32)
        for i, twin in enumerate(twins):
            if ended[i]:
                frame, ended[i] = twin.reset(seed=seeds[i] if number == 0 else None)[0], False
                frames[i] += [frame] * spec.frame_stack
            else:
                frame, reward, *ends, _ = twin.step(int(before[i]))
                ended[i] = any(ends)
                frames[i].append(frame)
                assert step.reward[i] == reward
        lives_lost += int(step.life_lost.sum())
        segments += builder.add(step, actions, values, values)
        environment.send(actions, step.env_id)
        before = actions
    environment.close()
    assert lives_lost > 0
    length, stride = spec.slots, spec.slots - spec.overlap
    expected = [np.array(of[i : i + length]) for of in frames for i in range(0, len(of) - length + 1, stride)]
    received = [decode_segment(encode_segment(segment, spec), spec).frames for segment in segments]
    assert len(received) == len(expected) >= 12
    assert {frame.tobytes() for frame in received} == {frame.tobytes() for frame in expected}
