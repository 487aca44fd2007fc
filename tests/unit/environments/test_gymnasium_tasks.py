"""Environments of Gymnasium, by their names, and as actors and policies see their observations and actions."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete, MultiBinary
from gymnasium.vector.utils import concatenate, create_empty_array

from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments import gymnasium_tasks
from apex_jax.environments.environment import VectorEnvironment, describe
from apex_jax.environments.gymnasium_tasks import NUMBER, Adapted, make
from apex_jax.environments.task import (
    BrokenEnvironment,
    action_bounds,
    action_of,
    action_space,
    action_spec,
    environment_spec,
    leaves_of,
    parts_of,
)
from apex_jax.host.errors import UsageError
from apex_jax.policy import Policy
from apex_jax.run.environment_spec import read_environment_spec, record_environment_spec
from apex_jax.types import ActionSpec, EnvironmentSpec, SegmentSpec, named_parts
from tests.rigs import environments

OWN = "gymnasium:tests.rigs.environments:"


def config(task: str, *overrides: str, stack: int = 1) -> Config:
    frames = (f"environment.frame_stack={stack}", "environment.frame_skip=1")
    return load(None, [f"environment.task={task}", *frames, *overrides])


@pytest.mark.parametrize(("task", "settings", "end"), [
    (f"{OWN}Corridor", {}, environments.LENGTH),
    (f"{OWN}Corridor", {"length": 7}, 7),
    (f"{OWN}from_a_function", {"length": 8}, 8),
    (f"{OWN}Corridor-v0", {}, environments.LENGTH),
    (f"{OWN}Corridor-v0", {"length": 9}, 9),
])  # fmt: skip
def test_class_function_or_registered_name_makes_the_environment_with_its_settings(
    task: str, settings: dict[str, int], end: int
) -> None:
    settings_text = config(task, f"environment.settings={settings}").environment.settings
    adapted = make(task, settings_text)
    first, _ = adapted.reset(seed=3)
    twin = environments.Corridor(end)
    expected, _ = twin.reset(seed=3)
    np.testing.assert_array_equal(first, [expected["end"], *expected["place"][0]])  # the order of the space's keys
    assert first.dtype == np.float32


SPACES: dict[str, spaces.Space[Any]] = {
    "number": spaces.Discrete(16),
    "number from -2": spaces.Discrete(5, start=-2),
    "numbers": spaces.MultiDiscrete([2, 5, 3]),
    "numbers from 1, in a matrix": spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[1, 1], [0, -7]])),
    "bits": spaces.MultiBinary((2, 3)),
    "matrix": spaces.Box(-1, 1, (3, 2)),
    "float64": spaces.Box(-1, 1, (), np.float64),
    "whole numbers": spaces.Box(-9, 9, (2,), np.int64),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,)), spaces.Discrete(2)]),
    "dict": spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(0, 1, (1, 2)), "c": spaces.MultiBinary(2)}),
    "nested": spaces.Dict({
        "arm": spaces.Tuple([spaces.Dict({"z": spaces.Discrete(2), "y": spaces.Box(0, 1, (2,))}), spaces.Discrete(4)]),
        "bits": spaces.MultiDiscrete([2, 2]),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", SPACES)
def test_policy_takes_what_the_environment_returns_alone_in_a_batch_and_flattened(name: str, tmp_path: Path) -> None:
    space = SPACES[name]
    space.seed(3)
    vectors = spaces.flatten_space(space)
    spec = SegmentSpec(vectors.shape or (), "float32", 1, 32, 3, ActionSpec.discrete(2))
    record_environment_spec(tmp_path, EnvironmentSpec(spec, parts_of(leaves_of(space)), None, None))
    seen = Seen()
    policy = Policy(seen, {}, read_environment_spec(tmp_path))  # type: ignore[arg-type]
    observations = [space.sample() for _ in range(5)]
    expected = np.array([spaces.flatten(space, each) for each in observations], np.float32)
    for observation, vector in zip(observations, expected, strict=True):
        assert policy(observation) == 0
        assert seen.stacks.tolist() == [[vector.tolist()]]
    empty: Any = create_empty_array(space, 5)
    batch = concatenate(space, observations, empty)  # as Gymnasium's vector environments do
    for given in (batch, expected):
        assert policy(given).tolist() == [0] * 5
        np.testing.assert_array_equal(seen.stacks[:, 0], expected)


class Seen:
    """An algorithm that always acts `action`, and keeps the stacks that it sees."""

    action: Any = np.int32(0)

    def act(self, params: Any, stacks: Any, *_: Any) -> Any:
        self.stacks, count = stacks, len(next(iter(named_parts(stacks).values())))
        return SimpleNamespace(action=np.stack([self.action] * count), value=np.zeros(count))


@pytest.mark.parametrize(("name", "observation", "message"), [
    ("number", 16, r"16; expected \(\) of whole numbers 0 to 15, or a batch"),
    ("number", [3, -1], r"\[3, -1\]; expected"),
    ("number", 3.0, r"expected \(\) of whole numbers 0 to 15"),
    ("number from -2", 3, "expected .* -2 to 2"),
    ("numbers", [1, 5, 0], r"expected \(3,\) of whole numbers 0 to 1, 0 to 2, 0 to 4"),
    ("tuple", (1, [0.0, 0.0]), "without 2; expected 0 .* 0 to 2, 1 \\(2,\\), 2 .* 0 to 1"),
    ("nested", {"arm": 3, "bits": [0, 0]}, "without arm/0/y, arm/0/z, arm/1; expected"),
    ("dict", {"b": 1.5, "a": [[0.0, 0.0]], "c": [0, 1]}, "of b float64; expected"),
])  # fmt: skip
def test_policy_refuses_an_observation_outside_the_space_and_names_the_part(
    name: str, observation: Any, message: str
) -> None:
    size = spaces.flatten_space(SPACES[name]).shape or ()
    spec = SegmentSpec(size, "float32", 1, 32, 3, ActionSpec.discrete(2))
    policy = Policy(Seen(), {}, EnvironmentSpec(spec, parts_of(leaves_of(SPACES[name])), None, None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        policy(observation)


@pytest.mark.parametrize(("task", "overrides", "message"), [
    ("gymnasium:Cartpol-v1", (), "CartPole"),
    ("gymnasium:no_such_module:Env-v0", (), "no_such_module"),
    (f"{OWN}Corridr", (), "Corridr"),
    (f"{OWN}Unlearnable", (), r"\[16 17\].* 272 .* 256"),
    (f"{OWN}Bits", ("environment.settings={size: 9}",), r"MultiBinary\(9\).* 512 combinations, must be at most 256"),
    (f"{OWN}Mistaken", ("environment.settings={what: sequence}",), r"Sequence\("),
    ("gymnasium:ALE/Pong-v5", (), "gymnasium:ale_py:ALE/Pong-v5"),
    (f"{OWN}Corridor", ("environment.frame_skip=4",), "environment.frame_stack=1, or leave them and --config out"),
    (f"{OWN}Pixels", ("environment.frame_skip=4",), "environment.frame_skip=1"),
    (f"{OWN}Pixels", (), r"network.kernel_sizes=\[8, 4, 3\]: .* 20"),
    ("gymnasium:a:b:c", (), "environment.task=gymnasium:a:b:c: "),
    (f"{OWN}Corridor", ("environment.settings=3",), "environment.settings=3: "),
])  # fmt: skip
def test_environment_that_cannot_be_trained_is_one_line_with_the_fix(
    task: str, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        describe(config(task, *overrides))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("task", "settings", "message"), [
    (f"{OWN}Raises", '{"at":"made"}', r"ValueError: the made failed \(.*tests/rigs/environments.py, line \d+\)"),
    (f"{OWN}Corridor", '{"lenth":3}', "TypeError: .*lenth"),
    (f"{OWN}no_environment", "{}", "no_environment .*str"),
    (f"{OWN}a_batch", "{}", "a_batch .*SyncVectorEnv"),
    (f"{OWN}ManyAgents", "{}", "ManyAgents .*PettingZoo"),
])  # fmt: skip
def test_environment_that_cannot_be_made_is_one_line_with_its_file_and_a_traceback_in_the_log(
    task: str, settings: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BrokenEnvironment, match=message) as error:
        make(task, settings)
    assert "\n" not in str(error.value)
    assert "Traceback" in capfd.readouterr().err


def observing(monkeypatch: pytest.MonkeyPatch, space: Any, value: Any, reward: Any = 0.0) -> Adapted:
    for name, of in {"space": space, "value": value, "reward": reward}.items():
        monkeypatch.setattr(environments.Observes, name, of)
    return make(f"{OWN}Observes", "{}")


@pytest.mark.parametrize("reward", [np.nan, -np.inf, 1e39, np.float64(-1e39)])
def test_reward_that_is_not_finite_as_float32_is_refused(reward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = observing(monkeypatch, spaces.Discrete(2), 0, reward)
    adapted.reset()
    with pytest.raises(BrokenEnvironment, match=re.escape(f"a reward of {reward}")):
        adapted.step(0)


INT64 = spaces.Box(-9, 9, (2,), np.int64)
ANY = spaces.Box(-np.inf, np.inf, (2,))


def nested(space: Any) -> spaces.Dict:
    return spaces.Dict(a=spaces.Dict(b=space))


@pytest.mark.parametrize(("space", "value", "words"), [
    (ANY, np.array([0, np.nan]), "an observation"),
    (spaces.Box(-np.inf, np.inf, (1,), np.float64), np.array([1e39]), "float32"),
    (nested(ANY), {"a": {"b": np.array([-np.inf, 0])}}, "[a][b]"),
    (nested(ANY), {"a": {}}, "[a] without b"),
    (nested(ANY), {"a": {"b": np.zeros((1, 2))}}, "[a][b] of float64[1, 2]"),
    (ANY, np.array(["far", ""]), "of <U3[2]"),
    (INT64, np.array([1, 0.5]), "the value 1.0"),
    (spaces.Box(-100, 100, (2,), np.int8), np.array([1, 200]), "the value 200"),
    (spaces.Box(0, 9, (8, 8), np.uint8), np.full((8, 8), 10, np.uint8), "10"),
    (spaces.Discrete(5), -1, "the value -1"),
    (spaces.Discrete(5), 2.0, "the value 2.0"),
    (spaces.MultiDiscrete([2, 3]), np.array([2, 0]), "the value [2 0]"),
    (spaces.Text(3, charset="four"), "four", "the value four"),
    (nested(spaces.MultiDiscrete([2])), {"a": {"b": np.array([9])}}, "[a][b] with the value [9]"),
])  # fmt: skip
def test_observation_outside_its_space_is_refused_with_its_part_and_its_value(
    space: Any, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = observing(monkeypatch, space, value)
    for call in (adapted.reset, lambda: adapted.step(0)):
        with pytest.raises(BrokenEnvironment, match=re.escape(words)):
            call()


@pytest.mark.parametrize(("space", "value"), [
    (spaces.Box(0, 1, (2,), np.float32), np.array([1.5, 0.5])),
    (spaces.Box(0, 1, (2,), np.int8), np.array([True, False])),
    (spaces.Box(0, 1, (2,), np.uint8), np.array([True, False])),
    (spaces.Box(-100, 100, (2,), np.int8), np.array([-100, 100])),
    (spaces.Discrete(3, start=-1), np.int64(-1)),
])  # fmt: skip
def test_observation_of_another_type_or_beyond_the_bounds_of_a_box_of_floats_is_accepted(
    space: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    observing(monkeypatch, space, value).reset()


@pytest.mark.parametrize("space", [
    Discrete(5, start=-2), Discrete(3, dtype=np.int32), spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), np.int16, start=np.array([[1, 1], [0, -7]])),
    Box(-2.5, np.array([0.1, 3.0], np.float32)), Box(0, 1, (2,), np.float64),
], ids=str)  # fmt: skip
def test_space_of_actions_is_that_of_the_description_that_was_stored(space: spaces.Space[Any], tmp_path: Path) -> None:
    cartpole, actions = config("gymnasium:CartPole-v1"), action_of("gymnasium:A", space)
    made = environment_spec(cartpole, (), 4, actions, None)
    record_environment_spec(tmp_path, made)
    assert action_space(read_environment_spec(tmp_path)) == space


def test_environment_that_is_only_described_has_a_number_of_its_own_and_is_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    settings = config(f"{OWN}Draws", f"environment.settings={{number: {NUMBER}, closed: {closed}}}")
    with contextlib.closing(make(f"{OWN}Draws", f'{{"number":"{NUMBER}"}}')) as playing:
        describe(settings)
        assert closed.read_text() != f"{round(100 * playing.reset()[0][3])} \n"


def test_failing_or_foreign_render_is_no_screen(capfd: pytest.CaptureFixture[str]) -> None:
    adapted = make(f"{OWN}Corridor", "{}", rendered=True)
    adapted.reset()
    screen = adapted.render()
    assert screen is not None
    assert screen.shape == (64, 96, 3)
    corridor = adapted.env.unwrapped
    corridor.render = lambda: "a picture"  # type: ignore[method-assign,assignment,return-value]
    assert adapted.render() is None
    corridor.render = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    assert adapted.render() is None
    assert "ZeroDivisionError" in capfd.readouterr().err
    corridor.render = lambda: screen  # type: ignore[method-assign,assignment,return-value]
    assert adapted.render() is None, "what failed is not called again"


def test_film_has_the_rate_of_the_environment() -> None:
    assert gymnasium_tasks.describe(config(f"{OWN}Corridor")).frames_per_second == 10
    frozen_lake = gymnasium.make("FrozenLake-v1").metadata["render_fps"]
    assert gymnasium_tasks.describe(config("gymnasium:FrozenLake-v1")).frames_per_second == frozen_lake


def test_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "environments_of_a_user.py").write_text("from tests.rigs.environments import Corridor as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert make("gymnasium:environments_of_a_user:Mine", "{}").reset(seed=0)


# Actions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high", "bounds"), [
    ([-2, -0.5], [2, 0.25], ([-2, -0.5], [2, 0.25])),
    ([-1e10, -2e6], [1e10, 2e6], ([-1, -1], [1, 1])),
    ([-np.inf, -3], [np.inf, 3], ([-1, -3], [1, 3])),
    ([-9e5], [9e5], ([-9e5], [9e5])),
])  # fmt: skip
def test_bounds_beyond_a_million_count_as_minus_1_and_1(low: Any, high: Any, bounds: Any) -> None:
    found = action_bounds(Box(np.array(low, np.float64), np.array(high, np.float64), dtype=np.float64))
    np.testing.assert_array_equal(found, bounds)
    assert {bound.dtype for bound in found} == {np.dtype(np.float64)}


@pytest.mark.parametrize(("low", "high"), [(2, np.inf), (-np.inf, 0), (-np.inf, np.inf), (-1e10, 1e10), (0, 2e6)])
def test_open_bound_is_refused_with_the_wrapper_that_closes_it(low: float, high: float) -> None:
    action_of("A", Box(-2, 9e5, (2,)), is_bounded=True)
    with pytest.raises(UsageError, match=r"A: .*Box.*TransformAction"):
        action_of("A", Box(np.array([-1, low]), np.array([1, high]), dtype=np.float64), is_bounded=True)


@pytest.mark.parametrize("space", [Box(-1, 1, (2, 2)), Box(0, 9, (2,), np.int64), MultiBinary(3)])
def test_other_actions_are_refused(space: Any) -> None:
    with pytest.raises(UsageError, match=r"environment\.task=A: "):
        action_spec("A", space)


@pytest.mark.parametrize("what", ["start", "float32", "float64", "float16"])
def test_space_contains_every_action_of_actors_and_policies(what: str) -> None:
    settings = config(f"{OWN}Acts", f"environment.settings={{what: {what}}}", "environment.own_processes=false")
    environment_spec = describe(settings)
    spec = environment_spec.spec
    environment = VectorEnvironment(settings, environment_spec, np.zeros(1, np.int64), 60)
    algorithm = Seen()
    space: Any = environments.Acts(what).action_space
    bounds = (5, 6) if what == "start" else (space.low, space.high)
    environment.receive()
    for end, bound in zip((spec.action.low, spec.action.high), bounds, strict=True):
        algorithm.action = np.full(spec.action.shape, end, spec.action.dtype)
        environment.send(algorithm.action[None], np.zeros(1, np.int32))
        environment.receive()
        of_policy = Policy(algorithm, {}, environment_spec)(environments.Corridor().observation())  # type: ignore[arg-type]
        assert space.contains(of_policy)
        np.testing.assert_array_equal(of_policy, bound)
        np.testing.assert_array_equal(environments.Acts.actions[-1], bound)
    environment.close()


@pytest.mark.parametrize(("made", "count", "first_second_and_last"), [
    (environments.Combines, 24, ([[0, -1], [5, 1]], [[0, -1], [5, 2]], [[1, 1], [5, 4]])),
    (environments.Bits, 8, ([0, 0, 0], [0, 0, 1], [1, 1, 1])),
])  # fmt: skip
def test_every_combination_of_several_discrete_parts_reaches_the_environment_and_the_user(
    made: Any, count: int, first_second_and_last: Any, tmp_path: Path
) -> None:
    settings = config(f"{OWN}{made.__name__}", "environment.own_processes=false")
    environment_spec = describe(settings)
    assert environment_spec.spec.action == ActionSpec.discrete(count)
    record_environment_spec(tmp_path, environment_spec)
    environment_spec, seen = read_environment_spec(tmp_path), Seen()
    policy = Policy(seen, {}, environment_spec)  # type: ignore[arg-type]
    environment = VectorEnvironment(settings, environment_spec, np.zeros(1, np.int64), 60)
    environment.receive()
    found = []
    for number in range(count):
        environment.send(np.array([number], np.int32), np.zeros(1, np.int32))
        environment.receive()
        seen.action = np.int32(number)
        of_policy = policy(environments.Corridor().observation())
        assert made().action_space.contains(of_policy)
        np.testing.assert_array_equal(of_policy, made.actions[-1])
        assert environment_spec.numbered(of_policy[None]) == [number]
        found.append(of_policy.tolist())
    environment.close()
    assert len({str(action) for action in found}) == count
    assert (found[0], found[1], found[-1]) == first_second_and_last


def test_number_that_cannot_be_learned_from_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, of in {"space": ANY, "value": np.array([0, 2e8])}.items():
        monkeypatch.setattr(environments.Observes, name, of)
    settings = config(f"{OWN}Observes")
    what = r"2e\+08 .* 1e\+08 .*network.normalize_observations"
    with pytest.raises(BrokenEnvironment, match=what):
        gymnasium_tasks.describe(settings, steps=10)
    network = dataclasses.replace(settings.network, normalize_observations=True)
    gymnasium_tasks.describe(settings.replace(network=network), steps=10)
