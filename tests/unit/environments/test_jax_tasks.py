"""Environments written in JAX: how their spaces are read, which are refused, and how they step for the evaluator."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from apex_jax.agent.registry import make_algorithm
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import EpisodeTracker, VectorEnvironment, can_render, describe
from apex_jax.environments.task import BrokenEnvironment
from apex_jax.host.errors import UsageError
from apex_jax.workers.actor import STEPS_OF_A_CALL, Rollouts

RIG = "jax:tests.rigs.jax_environments"
KERNELS = ("network.kernel_sizes=[3]", "network.channels=[4]", "network.strides=[1]")
IMAGE = ("environment.observation_layout=HWC", *KERNELS)


def config_of(name: str, *settings: str) -> Config:
    plain = ("environment.frame_stack=1", "environment.frame_skip=1", "actor.segment_slots=16")
    return load(None, [f"environment.task={RIG}:{name}", *plain, *settings])


def test_vectors_images_and_actions_are_read_from_the_spaces() -> None:
    vector = describe(config_of("Corridor")).spec
    assert (vector.frame_shape, vector.frame_dtype) == ((2,), "float32")
    assert vector.action.num_actions == 3
    assert describe(config_of("Sized")).spec == vector, "the user's own, not one of a package"
    image = describe(config_of("Drawn", *IMAGE))
    assert (image.spec.frame_shape, image.spec.frame_dtype) == ((3, 6, 2), "uint8")
    assert "images of 3 x 6 pixels with 2 channels" in image.reading
    assert describe(config_of("Sliding")).spec.action.shape == (1,)
    assert describe(config_of("Corridor", "environment.settings={length: 7}")).spec.action.num_actions == 3


@pytest.mark.parametrize(("name", "error", "text"), [
    ("OtherShape", BrokenEnvironment, r"\(3,\).* \(2,\).*jax_environments.py"),
    ("OtherState", BrokenEnvironment, "jax_environments.py, line"),
    ("OtherType", BrokenEnvironment, r"state.time .*int32\[\].*float32\[\]"),
    ("FiveResults", BrokenEnvironment, r"step .* 5 values.*jax_environments.py"),
    ("Masked", BrokenEnvironment, "action_mask"),
    ("Cast", BrokenEnvironment, r"int32.* uint8.*astype\(jnp\.uint8\)"),
    ("Parts", UsageError, "Box"),
    ("no_environment", BrokenEnvironment, "no_environment"),
    ("Absent", UsageError, "Absent"),
])  # fmt: skip
def test_what_does_not_fit_together_is_one_line_before_anything_starts(
    name: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        describe(config_of(name, *(IMAGE if name == "Cast" else ())))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"environment.task={RIG}:{name}")


@pytest.mark.parametrize("task", ["jax:module", "jax:a-b:c", "gymnax:a:b"])
def test_other_forms_of_the_name_are_refused(task: str) -> None:
    with pytest.raises(UsageError, match="jax:PACKAGE:ID or jax:MODULE:FUNCTION"):
        load(None, [f"environment.task={task}"])


@pytest.mark.parametrize("task", ["gymnax:Braekout-MinAtar", "gymnax:CartPole-v1"])
def test_unknown_name_or_parameter_of_gymnax_is_wrong_usage(task: str) -> None:
    settings = [f"environment.task={task}", "environment.settings={no_such: 1}", "environment.frame_stack=1"]
    with pytest.raises(UsageError, match=f"environment.task={task}: .*gymnax.registered_envs"):
        describe(load(None, [*settings, "environment.frame_skip=1"]))


def test_parts_of_a_dict_are_read_as_image_numbers_and_mask_and_only_valid_actions_are_played() -> None:
    config = config_of("Several", *KERNELS, "environment.frame_stack=2", "actor.environments=4")
    described = describe(config)
    spec = described.spec
    assert (spec.frame_shape, spec.numbers, spec.action.is_masked) == ((16, 18), 7, True)
    assert "images of 16 x 18 pixels" in described.reading
    algorithm = make_algorithm(config, spec)
    params = algorithm.acting_params(algorithm.init(jax.random.key(0)))
    rollouts = Rollouts(config, algorithm, np.arange(4), np.ones(4, np.float32), jax.random.key(1))
    number, newest = 0, None
    for step, output in rollouts.steps(rollouts.start(params)):
        seen = step.observation
        for i in range(4):
            [row], [column] = np.nonzero(seen["frames"][i, -1])
            numbers = seen["numbers"][i, -1]
            assert (row, column) == (numbers[:6].argmax(), numbers[6])
            assert seen["mask"][i, 0].tolist() == [int(row > 0), 1, 1]
            assert seen["mask"][i, 0, output.action[i]], "an invalid action"
            before = numbers if step.first[i] or newest is None else newest[i]
            np.testing.assert_array_equal(seen["numbers"][i, 0], before)
        newest, number = seen["numbers"][:, -1].copy(), number + 1
    assert number == STEPS_OF_A_CALL


def test_skipped_frames_are_refused() -> None:
    with pytest.raises(UsageError, match=r"environment.frame_skip=1"):
        describe(config_of("Corridor", "environment.frame_skip=2"))


def test_steps_end_and_begin_episodes_as_those_of_other_environments() -> None:
    config = config_of("Corridor", "metrics.info=[is_there, time]")
    environment = VectorEnvironment(config, describe(config), np.arange(4), 7, per_step=1)
    tracker, episodes = EpisodeTracker(4), []
    for _ in range(200):
        step = environment.receive()
        [env_id] = step.env_id
        assert step.observation.shape == (1, 1, 2)
        if step.first[0]:
            assert step.observation[0, 0, 1] == 0
            assert step.reward[0] == 0
        episodes += tracker.add(step)
        environment.send(np.array([2 if env_id < 2 else 0]), step.env_id)
    assert {episode.env_id for episode in episodes} == set(range(4))
    for episode in episodes:
        is_there, time = episode.info
        assert time == episode.steps <= 7
        assert episode.episode_return == is_there == ((episode.env_id < 2 and episode.steps < 7) or is_there)
        if episode.env_id >= 2:
            assert (episode.steps, is_there) == (7, 0), "the limit of the run, as the walk to the left never ends"
    left = environment.receive().env_id
    environment.leave_out(left)
    environment.reset()
    assert environment.receive().first.all()


@pytest.mark.parametrize(("name", "size"), [("Drawn", (81, 162, 3)), ("Shown", (2, 4, 3)), ("Corridor", None)])
def test_video_shows_what_render_returns_or_the_image_that_is_observed(name: str, size: tuple[int, ...] | None) -> None:
    config = config_of(name, *(IMAGE if name == "Drawn" else ()))
    environment_spec = describe(config)
    assert can_render(config, environment_spec) is (size is not None)
    if size is not None:
        environment = VectorEnvironment(config, environment_spec, np.arange(2), 50, rendered=True)
        environment.receive()
        picture = environment.render()
        assert picture is not None
        assert picture.shape == size
        assert picture.dtype == np.uint8
        assert picture.any()


def test_equal_seeds_play_equal_games_and_others_do_not() -> None:
    config = config_of("Corridor")

    def play(seeds: list[int]) -> np.ndarray:
        environment = VectorEnvironment(config, describe(config), np.array(seeds), 50)
        seen = []
        for _ in range(60):
            step = environment.receive()
            seen.append(step.observation[:, 0])
            environment.send(np.full(len(seeds), 2), step.env_id)
        return np.array(seen)

    games = play([1, 2, 1])
    np.testing.assert_array_equal(games[:, 0], games[:, 2])
    np.testing.assert_array_equal(games, play([1, 2, 1]))
    assert (games[:, 0] != games[:, 1]).any()


@pytest.mark.parametrize("name", ["Unpaid", "Torn"])
def test_reward_or_image_that_is_not_finite_ends_an_evaluation_in_one_line(name: str) -> None:
    config = config_of(name, *(IMAGE if name == "Torn" else ()))
    environment = VectorEnvironment(config, describe(config), np.arange(2), 7)
    environment.send(np.zeros(2, np.int32), environment.receive().env_id)
    with pytest.raises(BrokenEnvironment, match=f"{name}: it returned a reward or an image that is not finite"):
        environment.receive()
