"""Specification of a loaded policy: it acts as the evaluator does, and refuses what it was not trained on."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from apex_jax import load_policy
from apex_jax.agent.algorithm import Action
from apex_jax.agent.registry import make_algorithm
from apex_jax.config import Config
from apex_jax.environments.environment import VectorEnvironment
from apex_jax.host.errors import RunError, UsageError
from apex_jax.host.user_code import imported_names
from apex_jax.policy import Policy
from apex_jax.run.environment_spec import as_record
from apex_jax.run.params_file import save_params
from apex_jax.types import ActionSpec, EnvironmentSpec, SegmentSpec
from apex_jax.workers.evaluator import Evaluator
from tests.rigs.runs import ROOT
from tests.rigs.saved_runs import save_best, save_run

RunOf = Callable[[str], Config]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """Returns a function that returns the configuration of a saved run of a task."""
    return functools.cache(lambda task: save_run(task, tmp_path_factory.mktemp("runs") / task, updates=(1,)))


def observations_of(config: Config, policy: Policy, steps: int = 20) -> list[np.ndarray]:
    """Returns the stacks [F, *O] that the policy sees in the first steps of an episode."""
    environment = VectorEnvironment(config, policy.environment_spec, np.array([5]), 1000)
    seen = []
    for _ in range(steps):
        seen.append(environment.receive().observation[0])
        action = np.zeros((1, *policy.environment_spec.spec.action.shape), policy.environment_spec.spec.action.dtype)
        environment.send(action, np.array([0]))
    environment.close()
    return seen


@pytest.mark.parametrize("task", [
    "CartPole-v1", *(pytest.param(task, marks=pytest.mark.long) for task in ("Pong-v5", "WalkerWalk-v1"))
])  # fmt: skip
def test_actions_are_bit_equal_to_those_that_the_evaluator_chooses(task: str, run_of: RunOf) -> None:
    config = run_of(task)
    policy = load_policy(config.directory)
    spec = policy.environment_spec.spec
    algorithm = make_algorithm(config, spec)
    chosen: list[tuple[np.ndarray, np.ndarray]] = []

    def act(params: Any, observation: Any, *others: Any) -> Action:
        output = algorithm.act(params, observation, *others)
        chosen.append((observation, np.asarray(output.action)))
        return output

    newest = algorithm.acting_params(algorithm.init(jax.random.key(policy.updates)))
    Evaluator(config, policy.environment_spec, algorithm._replace(act=act)).evaluate(newest, lambda: False)
    assert len(chosen) >= 8
    for stacks, actions in chosen:
        given = stacks if spec.frame_stack > 1 else stacks[:, 0]
        np.testing.assert_array_equal(policy(given), policy.environment_spec.scaled(actions))


@pytest.mark.parametrize("task", ["CartPole-v1", "WalkerWalk-v1"])
def test_one_observation_has_the_action_and_value_that_it_has_in_a_batch(task: str, run_of: RunOf) -> None:
    policy = load_policy(run_of(task).directory)
    observations = [stack[0] for stack in observations_of(run_of(task), policy)]
    actions, values = policy.act(np.stack(observations))
    alone = [policy.act(observation) for observation in observations]
    np.testing.assert_allclose([action for action, _ in alone], actions, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([value for _, value in alone], values, rtol=1e-5, atol=1e-6)
    assert all(type(value) is float for _, value in alone)
    assert all(type(action) is int for action, _ in alone) or actions.shape == (20, 6)


def test_frames_given_one_at_a_time_are_stacked_as_envpool_stacks_them(run_of: RunOf) -> None:
    policy = load_policy(run_of("Pong-v5").directory)
    stacks = observations_of(run_of("Pong-v5"), policy)
    for _ in range(2):  # the second time after a reset
        policy.reset()
        for stack in stacks:
            assert policy.act(stack[-1]) == policy.act(stack)


def test_parts_of_an_observation_make_the_vector_that_envpool_makes(run_of: RunOf) -> None:
    policy = load_policy(run_of("WalkerWalk-v1").directory)
    vectors = np.stack([stack[0] for stack in observations_of(run_of("WalkerWalk-v1"), policy)])
    batch = {"velocity": vectors[:, 15:], "height": vectors[:, 14].astype(np.float64), "orientations": vectors[:, :14]}
    np.testing.assert_array_equal(policy(batch), policy(vectors))
    one = {name: part[3] for name, part in batch.items()}
    np.testing.assert_array_equal(policy(one), policy(vectors[3]))


def test_observation_given_as_a_matrix_equals_its_flat_vector(run_of: RunOf) -> None:
    policy = load_policy(run_of("Catch-v0").directory)
    matrix = np.eye(10, 5, dtype=np.float32)  # as Catch returns it
    assert policy.act(matrix) == policy.act(matrix.ravel())
    boards = np.stack([matrix, 1 - matrix])
    np.testing.assert_array_equal(policy(boards), policy(boards.reshape(2, -1)))
    with pytest.raises(ValueError, match=r"of object; expected float32 \(10, 5\)"):
        policy({"board": matrix})


def test_exploration_chooses_actions_at_random(run_of: RunOf) -> None:
    greedy, random = (load_policy(run_of("CartPole-v1").directory, exploration=rate) for rate in (0.0, 1.0))
    observation = np.zeros(4)
    assert len({greedy(observation) for _ in range(20)}) == 1
    assert {random(observation) for _ in range(20)} == {0, 1}


def test_the_newest_undamaged_checkpoint_is_loaded_or_the_one_asked_for(tmp_path: Path) -> None:
    save_run("CartPole-v1", tmp_path, updates=(10, 20, 30))
    (tmp_path / "checkpoints" / "30" / "_CHECKPOINT_METADATA").unlink()
    assert load_policy(tmp_path).updates == 20
    first = load_policy(tmp_path, updates=10)
    assert first.updates == 10
    observation = np.linspace(-1, 1, 4)
    assert first.act(observation)[1] != load_policy(tmp_path).act(observation)[1]
    with pytest.raises(RunError, match=r"checkpoints/30 .*10, 20, 30"):
        load_policy(tmp_path, updates=30)
    with pytest.raises(RunError, match=r"11 updates.*10, 20, 30"):
        load_policy(tmp_path, updates=11)


def test_a_checkpoint_is_loaded_by_its_path_and_the_best_evaluation_by_its_folder(tmp_path: Path) -> None:
    save_best(save_run("CartPole-v1", tmp_path, updates=(10, 20)), updates=10)
    observation = np.linspace(-1, 1, 4)
    first = load_policy(tmp_path, updates=10)
    for path in (tmp_path / "checkpoints" / "10", tmp_path / "best"):
        policy = load_policy(path)
        assert policy.updates == 10
        np.testing.assert_array_equal(policy.act(observation)[0], first.act(observation)[0])
        assert policy.act(observation)[1] == first.act(observation)[1]
    with pytest.raises(RunError, match=r"10 updates, not 20"):
        load_policy(tmp_path / "best", updates=20)
    (tmp_path / "best" / "model.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"best/model.safetensors cannot be read"):
        load_policy(tmp_path / "best")


WALKER = {"orientations": np.zeros(14), "height": np.zeros(()), "velocity": np.zeros(9)}


@pytest.mark.parametrize(("task", "observation", "message"), [
    ("CartPole-v1", np.zeros(5), r"\(5,\); expected float32 \(4,\)"),
    ("CartPole-v1", np.zeros((1, 2, 4)), r"shape \(1, 2, 4\); expected"),
    ("Pong-v5", np.zeros((3, 44, 44)), r"float64; expected uint8 \(44, 44\).*in stacks of 3, or one"),
    ("WalkerWalk-v1", {"height": 1.0}, r"orientations, velocity; expected orientations \(14,\)"),
    ("WalkerWalk-v1", WALKER | {"velocity": np.zeros((3, 9))}, r"velocity \(3, 9\); expected"),
    ("WalkerWalk-v1", WALKER | {"velocity": np.zeros(())}, r"velocity \(\); expected"),
])  # fmt: skip
def test_an_observation_of_another_environment_is_refused_with_the_shape_to_give(
    task: str, observation: Any, message: str, run_of: RunOf
) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(run_of(task).directory)(observation)


def test_a_folder_that_is_no_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"interface.json does not exist") as error:
        load_policy(tmp_path)
    assert "\n" not in str(error.value)
    save_run("CartPole-v1", tmp_path / "empty", updates=())
    with pytest.raises(RunError, match="holds no checkpoint yet"):
        load_policy(tmp_path / "empty")


@pytest.mark.parametrize(("settings", "metadata", "message"), [
    ("{}", {"interface": "[]"}, "is no run or exported policy"),
    ('"/secret/of/the/user"', {}, "/secret/of/the/user"),
    ('{"lerner": {}}', {}, "unknown key lerner"),
    ('{"algorithm": {"name": "mine"}}', {}, "algorithm.name=mine"),
    ('{"seed": 1}', {"updates": "many"}, "many"),
    ('{"seed": 1}', {}, "model.safetensors: .* where this network has float32"),
])  # fmt: skip
def test_files_of_another_program_are_one_clear_error(
    settings: str, metadata: dict[str, str], message: str, tmp_path: Path
) -> None:
    environment_spec = EnvironmentSpec(
        SegmentSpec((44, 44), "uint8", 4, 40, 3, ActionSpec.discrete(6)), None, None, None
    )
    written = {"interface": json.dumps(as_record(environment_spec)), "updates": "1", "config": settings} | metadata
    save_params(tmp_path / "model.safetensors", {"weight": np.zeros(3, np.float32)}, written)
    with pytest.raises((RunError, UsageError), match=message) as error:
        load_policy(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_loading_imports_no_emulator_and_no_socket(run_of: RunOf, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom apex_jax import load_policy\n"
        f"print(load_policy({run_of('CartPole-v1').directory!r})([0.0, 0.0, 0.1, 0.0]))\n"
        "print({'envpool', 'zmq', 'matplotlib', 'gymnasium'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] in ("0", "1")
    assert done.stdout.splitlines()[1] == "set()"


def test_folder_of_a_run_is_searched_only_if_the_user_names_its_code(tmp_path: Path) -> None:
    stranger, code = save_run("CartPole-v1", tmp_path / "run").directory, "algorithm.name=of_a_stranger:make"
    (tmp_path / "of_a_stranger.py").write_text("raise SystemExit")
    Path(stranger, "starts.jsonl").write_text(json.dumps({"time": 1.0, "working_directory": str(tmp_path)}) + "\n")
    load_policy(stranger)
    with pytest.raises(UsageError, match="there is no module of_a_stranger"):
        imported_names(*code.split("="))
