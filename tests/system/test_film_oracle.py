"""EnvPool's continuous tasks against the simulators of films: the same observations, actions and rewards.

Skipped without requirements-film.txt. Only tasks whose observation determines the state can be replayed from EnvPool's
first observation. The equality is that of x86-64; a chaotic task drifts on other processors.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Iterator
from typing import Any

import envpool
import jax
import numpy as np
import pytest

from apex_jax.agent.registry import make_algorithm
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.host.program import CONFIGS
from apex_jax.policy import Policy
from apex_jax.workers.film_command import dm_control_of, envpool_name, simulator_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*(precision lowered|out of date|SwigPy|swigvarlink):"),
]


@pytest.fixture(scope="module", autouse=True)
def packages() -> Iterator[None]:
    """Skips these tests if the simulators or the renderer are missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUJOCO_GL", "egl")
        try:
            for package in ("dm_control.suite", "imageio", "pygame"):
                importlib.import_module(package)
        except (ImportError, AttributeError) as error:  # PyOpenGL raises AttributeError without EGL
            pytest.skip(f"{error}: see requirements-film.txt")
        yield


def pool_of(task: str, seed: int) -> Any:
    return envpool.make(task, env_type="gymnasium", num_envs=1, seed=seed)


def config_of(task: str) -> Config:
    small = ("network.policy_units=[8]", "network.critic_units=[8]")
    return load(CONFIGS / "walker.yaml", [f"environment.task={task}", *small])


def policy_of(task: str) -> Policy:
    """Returns an untrained agent for EnvPool's task."""
    config = config_of(task)
    environment_spec = describe(config)
    algorithm = make_algorithm(config, environment_spec.spec)
    params = algorithm.acting_params(algorithm.init(jax.random.key(0)))
    return Policy(algorithm, params, environment_spec)


def cartpole(position: np.ndarray) -> list[float]:
    """Returns the position of the cart and the angle of the pole."""
    return [position[0], np.arctan2(position[2], position[1])]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors round differently")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("task", "positions", "tolerance"), [
    ("CartpoleSwingup-v1", cartpole, 1e-12),  # the angle is recomputed from its cosine and sine
    ("HumanoidRunPureState-v1", np.asarray, 0.0),
])  # fmt: skip
def test_episode_is_that_of_dm_control(
    task: str, positions: Callable[[np.ndarray], Any], tolerance: float, seed: int
) -> None:
    pool, own = pool_of(task, seed), dm_control_of(task, 0)
    rng = np.random.default_rng(seed)
    names = list(own.reset().observation)
    received, _ = pool.reset()
    with own.physics.reset_context():
        own.physics.data.qpos[:] = positions(received["position"][0])
        own.physics.data.qvel[:] = received["velocity"][0]
    for step in range(1, 1001):
        action = rng.uniform(-1, 1, own.action_spec().shape)
        received, rewards, terminated, truncated, _ = pool.step(action[None])
        time_step = own.step(action)
        exact, ended = time_step.observation, time_step.last()
        for name in names:
            np.testing.assert_allclose(received[name][0], exact[name], rtol=0, atol=tolerance, err_msg=f"step {step}")
        assert rewards[0] == pytest.approx(time_step.reward, abs=1e-7)  # EnvPool's are float32
        assert (bool(truncated[0]), bool(terminated[0]), ended) == (step == 1000, False, step == 1000)


def test_observations_and_bounds_of_all_tasks_are_envpools() -> None:
    tasks = [envpool_name(*names) for names in importlib.import_module("dm_control.suite").ALL_TASKS]
    assert len(tasks) == 51
    for task in tasks:
        check_observation_and_bounds(task)


def check_observation_and_bounds(task: str) -> None:
    own, pool, config = dm_control_of(task, 0), pool_of(task, 0), config_of(task)
    parts, received = own.reset().observation, pool.reset()[0]
    order = [name for name in received if name in parts]
    seen = describe(config).parts or ()
    assert [(part.name, part.shape) for part in seen] == [(name, np.shape(parts[name])) for name in order]
    assert set(order) == set(parts)
    assert {name: np.shape(part) for name, part in parts.items()} == {name: received[name].shape[1:] for name in order}
    space, bounds = pool.action_space, own.action_spec()
    np.testing.assert_allclose((bounds.minimum, bounds.maximum), (space.low, space.high))


@pytest.mark.parametrize("task", ["WalkerWalk-v1", "HalfCheetah-v4", "Pendulum-v1"])
def test_frame_of_the_simulator_changes_with_an_action(task: str) -> None:
    simulator, policy = simulator_of(task, 1), policy_of(task)
    observation, before = simulator.reset(), simulator.render()
    for _ in range(5):
        assert np.isfinite(policy(observation)).all()
        observation, _, ended = simulator.step(np.array(policy.environment_spec.high))
        assert not ended
    assert (simulator.render() != before).any()
