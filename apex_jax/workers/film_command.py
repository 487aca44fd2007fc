"""The command film: an episode of a run's policy in the task's own simulator, DM control or Gymnasium, as a video.

Training uses EnvPool, which shows no screen of MuJoCo: the return here is an independent check of observations and
actions. A run calls the command at its end, because a broken graphics library can end or hang the process.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apex_jax.config.load import parse_overrides
from apex_jax.host.errors import RunError, first_line
from apex_jax.host.program import NAME, Parser, installing
from apex_jax.plotting.video import video_paths, video_writer
from apex_jax.run.evaluations import return_text, run_directory_of
from apex_jax.run.metrics import MetricsWriter

FILM_EXTRA = f"{installing('film')}, apt install libegl1 libgl1; no DM control for Python 3.13"
FRAME_PIXELS = 480  # height and width of DM control's frames, and of Gymnasium's MuJoCo tasks by default
FRAMES_PER_SECOND_LIMIT = 30  # of the video: rendering a frame on the CPU takes longer than many steps
MOST_STEPS = 1000  # as in DM control's and Gymnasium's tasks, except LQR, which has no limit


class Simulator(NamedTuple):
    """One episode in the original environment of a task."""

    steps_per_second: float  # of simulated time
    reset: Callable[[], Any]  # starts the episode; returns the first observation: float[D], or its parts by name
    step: Callable[[np.ndarray], tuple[Any, float, bool]]  # action -> observation, reward, whether the episode ended
    render: Callable[[], np.ndarray]  # uint8[height, width, 3]


def envpool_name(domain: str, task: str) -> str:
    """Returns EnvPool's name of a task of DM control: WalkerWalk-v1 for ("walker", "walk")."""
    words = f"{domain}_{task}".split("_")
    return "".join(word[0].upper() + word[1:] for word in words) + "-v1"


def dm_control_of(task: str, seed: int) -> Any:
    """Returns DM control's environment of a task under EnvPool's name. Raises LookupError if there is none."""
    from dm_control import suite

    names = {envpool_name(*names): names for names in suite.ALL_TASKS}
    if task not in names:
        raise LookupError("neither Gymnasium nor DM control has this task")
    return suite.load(*names[task], task_kwargs={"random": seed})


def simulator_of(task: str, seed: int) -> Simulator:
    """Returns the original environment of a task under EnvPool's name. Raises the simulators' own errors."""
    import gymnasium

    if task in gymnasium.registry:
        made = gymnasium.make(task, render_mode="rgb_array", disable_env_checker=True)

        def step(action: np.ndarray) -> tuple[Any, float, bool]:
            observation, reward, terminated, truncated, _ = made.step(action)
            return observation, float(reward), terminated or truncated

        return Simulator(
            made.metadata["render_fps"], lambda: made.reset(seed=seed)[0], step, lambda: np.asarray(made.render())
        )
    suite = dm_control_of(task, seed)

    def step_of_suite(action: np.ndarray) -> tuple[Any, float, bool]:
        time_step = suite.step(action)
        return time_step.observation, time_step.reward, time_step.last()

    render = partial(suite.physics.render, height=FRAME_PIXELS, width=FRAME_PIXELS, camera_id=0)
    return Simulator(1 / suite.control_timestep(), lambda: suite.reset().observation, step_of_suite, render)


def film(simulator: Simulator, act: Callable[[Any], np.ndarray], path: Path) -> float:
    """Films an episode in which `act` chooses the actions; returns its return. `path`: see `video_writer`."""
    every = math.ceil(simulator.steps_per_second / FRAMES_PER_SECOND_LIMIT)
    rate = Fraction(simulator.steps_per_second / every).limit_denominator(1000)
    observation, episode_return, ended, steps = simulator.reset(), 0.0, False, 0
    with video_writer(path, rate) as add:
        add(simulator.render())
        while not ended and steps < MOST_STEPS:
            observation, reward, ended = simulator.step(act(observation))
            episode_return, steps = episode_return + reward, steps + 1
            if ended or steps % every == 0:
                add(simulator.render())
    return episode_return


def run(arguments: Sequence[str]) -> int:
    """Runs the command; `arguments`: after "film". Returns the exit code. Raises UsageError, RunError."""
    options = _parser().parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a display, on the CPU if there is no GPU
    from apex_jax.policy import Policy, load_agent  # imported here: JAX, after its device has been chosen

    agent = load_agent(options.run, None, parse_overrides(options.code, ""))
    policy = Policy(agent.algorithm, agent.params, agent.environment_spec)
    directory, config = Path(run_directory_of(options.run)).absolute(), agent.config
    os.chdir(tempfile.gettempdir())  # MuJoCo writes a log to the working directory
    try:
        simulator = simulator_of(config.environment.task, config.seed % 2**32)
        found = film(simulator, policy, directory / "video")
    except Exception as error:  # of any type: they are those of the simulators and of OpenGL
        what = f"{config.environment.task} cannot be filmed: {first_line(error)}"
        raise RunError(f"{what}; it needs {FILM_EXTRA}") from None
    writer = MetricsWriter(str(directory), "evaluator", (directory / "tensorboard").is_dir())
    writer.write(agent.progress.environment_steps * config.environment.frame_skip, {"eval/film_return": found})
    files = " and ".join(map(str, video_paths(directory / "video")))
    print(f"return {return_text(found)} in the task's own simulator, which no training has seen: {files}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "film",
        description="Plays an episode with a run's policy in DM control or Gymnasium's MuJoCo, and writes video.mp4"
        f" and video.gif into the run. It needs {FILM_EXTRA}.",
        epilog=f"example: {NAME} film runs/WalkerWalk-v1-1",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, such as runs/WalkerWalk-v1-1, or its best/")
    what = "algorithm.name, network.name of the run, if it is code of your own, which is then imported"
    parser.add_argument("code", metavar="KEY=VALUE", nargs="*", help=what)
    return parser
