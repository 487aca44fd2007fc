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
import numpy as np
import pytest

from apex_jax.environments.reference_simulator import ReferenceSimulator
from apex_jax.environments.reference_simulator_process import DMControl, envpool_name, explained, scaled
from tests.unit.environments.test_reference_simulator_process import TASKS

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
            pytest.skip(explained(error))
        yield


def pool_of(task: str, seed: int) -> Any:
    return envpool.make(task, env_type="gymnasium", num_envs=1, seed=seed)


def flat(observation: dict[str, np.ndarray], names: list[str]) -> np.ndarray:
    """Returns EnvPool's parts of these names, in its own order: float32[D]."""
    parts = [np.ravel(part[0]) for name, part in observation.items() if name in names]
    return np.concatenate(parts).astype(np.float32)


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
    pool, own = pool_of(task, seed), DMControl(task, 0)
    rng = np.random.default_rng(seed)
    names = list(own.environment.reset().observation)
    received, _ = pool.reset()
    with own.environment.physics.reset_context():
        own.environment.physics.data.qpos[:] = positions(received["position"][0])
        own.environment.physics.data.qvel[:] = received["velocity"][0]
    for step in range(1, 1001):
        action = rng.uniform(-1, 1, len(own.low))
        received, rewards, terminated, truncated, _ = pool.step(action[None])
        observation, reward, ended = own.step(scaled(action, own.low, own.high))
        exact = own.environment.task.get_observation(own.environment.physics)
        for name in names:
            np.testing.assert_allclose(received[name][0], exact[name], rtol=0, atol=tolerance, err_msg=f"step {step}")
        np.testing.assert_allclose(observation, flat(received, names), rtol=0, atol=1e-6 * (tolerance > 0))
        assert rewards[0] == pytest.approx(reward, abs=1e-7)  # EnvPool's are float32
        assert (bool(truncated[0]), bool(terminated[0]), ended) == (step == 1000, False, step == 1000)


def test_tasks_are_those_of_dm_control() -> None:
    assert set(importlib.import_module("dm_control.suite").ALL_TASKS) == set(TASKS)


@pytest.mark.parametrize("names", TASKS, ids="-".join)
def test_observation_and_bounds_are_envpools(names: tuple[str, str]) -> None:
    task = envpool_name(*names)
    own, pool = DMControl(task, 0), pool_of(task, 0)
    parts = own.environment.reset().observation
    order = [name for name in pool.reset()[0] if name in parts]
    size = sum(np.size(parts[name]) for name in order)
    own_order = [name for name in parts if name != "target"] + ["target"] if task == "FishSwim-v1" else list(parts)
    assert order == own_order
    assert own.reset().shape == (size,)
    assert {name: np.shape(part) for name, part in parts.items()} == {
        name: part.shape[1:] for name, part in pool.reset()[0].items() if name in parts
    }
    space = pool.action_space
    np.testing.assert_allclose((own.low, own.high), (space.low, space.high))


@pytest.mark.parametrize("task", ["WalkerWalk-v1", "HalfCheetah-v4", "Pendulum-v1"])
def test_frame_of_the_simulator_changes_with_an_action(task: str) -> None:
    with ReferenceSimulator(task, 1) as simulator:
        assert simulator.frame is not None
        before, ended = simulator.frame, False
        while simulator.frame is None or simulator.frame is before:
            observation, _, ended = simulator.step(np.ones(simulator.action_size))
        assert (simulator.frame != before).any()
        assert np.isfinite(observation).all()
        assert not ended
