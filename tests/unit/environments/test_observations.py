"""Observations of several parts become one vector: the parts that DM control has, in EnvPool's order, bit for bit.

The tables are not EnvPool's: they are those of `dm_control.suite` (1.0.38) and of Gymnasium's pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from envpool.registration import registry

from apex_jax.config import Config, EnvironmentConfig
from apex_jax.environments.environment import VectorEnvironment, segment_spec
from apex_jax.environments.envpool_tasks import describe
from apex_jax.environments.observations import flattened
from apex_jax.types import Step
from tests.unit.environments.conftest import Recorder


class Task(NamedTuple):
    """What a task of DM control returns and takes."""

    parts: dict[str, int]  # sizes by name
    actions: int


HUMANOID = {"head_height": 1, "extremities": 12, "torso_vertical": 3, "com_velocity": 3}
ARM = {"arm_pos": 16, "arm_vel": 8, "touch": 5, "hand_pos": 4}
QUADRUPED = {"egocentric_state": 44, "torso_velocity": 3, "torso_upright": 1, "imu": 6, "force_torque": 24}
DOG = {
    **{"joint_angles": 73, "joint_velocites": 73, "torso_pelvis_height": 2, "z_projection": 9, "torso_com_velocity": 3},
    **{"inertial_sensors": 9, "foot_forces": 12, "touch_sensors": 4, "actuator_state": 38},
}
DM_CONTROL: dict[str, Task] = {
    f"{name}-v1": Task(parts, actions)
    for names, actions, parts in (
        ("AcrobotSwingup AcrobotSwingupSparse", 1, {"orientations": 4, "velocity": 2}),
        ("BallInCupCatch", 2, {"position": 4, "velocity": 4}),
        ("CartpoleBalance CartpoleBalanceSparse", 1, {"position": 3, "velocity": 2}),
        ("CartpoleSwingup CartpoleSwingupSparse", 1, {"position": 3, "velocity": 2}),
        ("CartpoleTwoPoles", 1, {"position": 5, "velocity": 3}),
        ("CartpoleThreePoles", 1, {"position": 7, "velocity": 4}),
        ("CheetahRun", 6, {"position": 8, "velocity": 9}),
        ("DogStand DogWalk DogTrot DogRun", 38, DOG),
        ("DogFetch", 38, DOG | {"ball_state": 6, "target_position": 3}),
        ("FingerSpin", 2, {"position": 4, "velocity": 3, "touch": 2}),
        (
            *("FingerTurnEasy FingerTurnHard", 2),
            {"position": 4, "velocity": 3, "touch": 2, "target_position": 2, "dist_to_target": 1},
        ),
        ("FishUpright", 5, {"joint_angles": 7, "upright": 1, "velocity": 13}),
        ("FishSwim", 5, {"joint_angles": 7, "upright": 1, "velocity": 13, "target": 3}),  # DM control: target, velocity
        ("HopperStand HopperHop", 4, {"position": 6, "velocity": 7, "touch": 2}),
        ("HumanoidStand HumanoidWalk HumanoidRun", 21, {"joint_angles": 21, **HUMANOID, "velocity": 27}),
        ("HumanoidRunPureState", 21, {"position": 28, "velocity": 27}),
        ("HumanoidCMUStand HumanoidCMUWalk HumanoidCMURun", 56, {"joint_angles": 56, **HUMANOID, "velocity": 62}),
        ("LqrLqr21", 1, {"position": 2, "velocity": 2}),
        ("LqrLqr62", 2, {"position": 6, "velocity": 6}),
        (
            *("ManipulatorBringBall ManipulatorBringPeg ManipulatorInsertBall ManipulatorInsertPeg", 5),
            ARM | {"object_pos": 4, "object_vel": 3, "target_pos": 4},
        ),
        ("PendulumSwingup", 1, {"orientation": 2, "velocity": 1}),
        ("PointMassEasy PointMassHard", 2, {"position": 2, "velocity": 2}),
        ("QuadrupedWalk QuadrupedRun", 12, QUADRUPED),
        ("QuadrupedEscape", 12, QUADRUPED | {"origin": 3, "rangefinder": 20}),
        ("QuadrupedFetch", 12, QUADRUPED | {"ball_state": 9, "target_position": 3}),
        ("ReacherEasy ReacherHard", 2, {"position": 2, "to_target": 2, "velocity": 2}),
        ("StackerStack2", 5, ARM | {"box_pos": 8, "box_vel": 6, "target_pos": 2}),
        ("StackerStack4", 5, ARM | {"box_pos": 16, "box_vel": 12, "target_pos": 2}),
        ("SwimmerSwimmer6", 5, {"joints": 5, "to_target": 2, "body_velocities": 18}),
        ("SwimmerSwimmer15", 14, {"joints": 14, "to_target": 2, "body_velocities": 45}),
        ("WalkerStand WalkerWalk WalkerRun", 6, {"orientations": 14, "height": 1, "velocity": 9}),
    )
    for name in names.split()
}
every_task_of_dm_control = pytest.mark.parametrize("task", DM_CONTROL)


def config_of(task: str) -> Config:
    return Config(environment=EnvironmentConfig(task=task, frame_stack=1, frame_skip=1))


def test_table_has_every_task_of_the_dm_control_suite() -> None:
    assert len(DM_CONTROL) == 51
    assert {name for name, (module, *_) in registry.specs.items() if module == "envpool.mujoco.dmc"} == {*DM_CONTROL}


@every_task_of_dm_control
def test_parts_sizes_and_actions_are_those_of_dm_control_in_the_order_of_envpool(task: str) -> None:
    parts = describe(config_of(task)).parts
    assert parts is not None
    assert [(*part.path, math.prod(part.shape)) for part in parts] == list(DM_CONTROL[task].parts.items())
    spec = segment_spec(config_of(task))
    size = sum(DM_CONTROL[task].parts.values())
    assert (spec.frame_shape, spec.frame_dtype, spec.frame_stack) == ((size,), "float32", 1)
    assert spec.action == ((DM_CONTROL[task].actions,), "float32", -1, 1)


def naive_row(observation: dict[str, Any], row: int, names: list[str]) -> list[np.float32]:
    """Returns the numbers of one observation, one after the other, the last axis fastest."""

    def numbers(value: Any) -> Iterator[np.float32]:
        if np.ndim(value):
            for item in value:
                yield from numbers(item)
        else:
            yield np.float32(value)

    return [number for name in names for number in numbers(observation[name][row])]


def test_scalars_vectors_and_tables_of_numbers_are_flattened_part_by_part() -> None:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"z_table": (3, 2), "scalar": (), "vector": (4,), "left_out": (5,)}
    observation: dict[str, Any] = {name: rng.normal(size=(6, *shape)) for name, shape in shapes.items()}
    vectors = flattened(observation, ("z_table", "scalar", "vector"))
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [naive_row(observation, row, ["z_table", "scalar", "vector"]) for row in range(6)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
def test_observation_that_is_one_array_is_returned_unchanged(dtype: str) -> None:
    observation: np.ndarray = np.arange(12).reshape(3, 2, 2).astype(dtype)
    assert flattened(observation, None) is observation


@pytest.mark.parametrize("task", [
    "WalkerWalk-v1", "QuadrupedWalk-v1", "HumanoidRun-v1", "ManipulatorBringBall-v1", "LqrLqr21-v1", "HalfCheetah-v4",
    "Ant-v5", "Pendulum-v1",
])  # fmt: skip
def test_environment_returns_what_envpool_returns_flattened_by_a_naive_loop(
    task: str, recorders: list[Recorder]
) -> None:
    settings = config_of(task)
    spec, rng = segment_spec(settings), np.random.default_rng(0)
    environment = VectorEnvironment(settings, spec, np.array([1, 2]), max_episode_frames=1_000)
    steps: list[Step] = []
    for _ in range(20):
        steps.append(environment.receive())
        environment.send(rng.uniform(-1, 1, (2, *spec.action.shape)).astype(np.float32), steps[-1].env_id)
    environment.close()
    for step, (observation, *_) in zip(steps, recorders[0].received, strict=True):
        assert step.observation.shape == (2, 1, *spec.frame_shape)
        assert step.observation.dtype == np.float32
        assert np.isfinite(step.observation).all()
        names = list(DM_CONTROL[task].parts) if task in DM_CONTROL else ["all"]
        parts = observation if task in DM_CONTROL else {"all": observation}
        assert step.observation[:, 0].tolist() == [naive_row(parts, row, names) for row in range(2)]
    assert len({row.tobytes() for step in steps for row in step.observation}) == 40  # both environments move
