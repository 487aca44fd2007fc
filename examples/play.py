"""Plays episodes with a trained agent, in a window if there is a display: what a program of your own needs to use one.

    python examples/play.py results/lunar_lander/policy --window   # an agent that comes with this repository
    python main.py --config pendulum                               # or train one, in a minute
    python examples/play.py runs/Pendulum-v1-1
    python examples/play.py runs/jax-my_file-MyEnv-1 environment.task=jax:my_file:MyEnv --window   # code of your own

`play` is the loop around any environment of Gymnasium, for a program of your own. EnvPool's tasks that Gymnasium does
not have here, such as Pong-v5 and WalkerWalk-v1, are played in EnvPool, as the agent was trained. A window needs a
display, and tkinter (apt install python3-tk) or, for Gymnasium's own environments, pygame.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # finds apex_jax in a checkout, if it is not installed

from apex_jax import load_policy
from apex_jax.config import Config
from apex_jax.config.load import load_run_to_play, parse_overrides
from apex_jax.environments.environment import can_render, describe
from apex_jax.environments.envpool_tasks import make_pool
from apex_jax.environments.gymnasium_tasks import make
from apex_jax.host.errors import RunError, UsageError
from apex_jax.host.user_code import imported_names
from apex_jax.policy import Policy
from apex_jax.workers.recording import no_screen

Show = Callable[[Any], None]  # shows a frame, uint8[height, width, 3]


def play(environment: Any, policy: Policy, seed: int, show: Show | None = None) -> float:
    """Returns the return of one episode in an environment of Gymnasium; `show` receives what it renders."""
    observation, info = environment.reset(seed=seed)
    policy.reset()  # only agents that see stacks of frames need it
    is_masked = policy.environment_spec.spec.action.is_masked
    ended, total = False, 0.0
    while not ended:
        if show is not None:
            show(environment.render())
        action = policy(observation, info.get("action_mask") if is_masked else None)
        observation, reward, terminated, truncated, info = environment.step(action)
        total, ended = total + float(reward), terminated or truncated
    return total


def play_in_envpool(config: Config, policy: Policy, seed: int, show: Show | None) -> float:
    """Returns the return of one episode in EnvPool, preprocessed as in training; `show` receives each frame."""
    limit = config.evaluator.max_episode_frames
    pool = make_pool(config.environment, np.array([seed]), limit, threads=1, per_step=1, rendered=show is not None)
    observation, _ = pool.reset()
    ended, total = False, 0.0
    while not ended:
        if show is not None:
            show(pool.render()[0])
        observation, reward, terminated, truncated, _ = pool.step(policy(observation))
        total, ended = total + float(reward[0]), bool(terminated[0] or truncated[0])
    pool.close()
    return total


class WrittenInJax:
    """An environment of `environment.task=jax:MODULE:NAME` with the methods of Gymnasium's."""

    def __init__(self, environment: Any, max_steps: int):
        self.environment, self._reset, self._step = environment, jax.jit(environment.reset), jax.jit(environment.step)
        self.max_steps = max_steps

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Starts an episode."""
        self.key, key = jax.random.split(jax.random.key(seed))
        self.steps = 0
        observation, self.state = self._reset(key)
        return np.asarray(observation), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        """Returns what Gymnasium's environments return."""
        self.key, key = jax.random.split(self.key)
        observation, self.state, reward, terminated, truncated, info = self._step(key, self.state, action)
        self.steps += 1
        return np.asarray(observation), reward, terminated, bool(truncated) or self.steps >= self.max_steps, info

    def render(self) -> np.ndarray:
        """Returns the picture that the user's `render` makes; black if there is none."""
        return np.asarray(getattr(self.environment, "render", lambda state: np.zeros((9, 9)))(self.state))


def environment_of(config: Config, is_shown: bool) -> Any:
    """Returns the environment of `environment.task=gymnasium:...` or `jax:...`, which may be the user's."""
    task, settings, limit = config.environment.task, config.environment.settings, config.evaluator.max_episode_frames
    if config.environment.is_gymnasium:
        return make(task, settings, limit, rendered=is_shown).env  # without the wrapper that makes vectors
    if task.startswith("gymnax:"):
        raise UsageError(f"{task} is filmed: python main.py --role evaluator checkpoint=RUN video=./game.mp4")
    [function] = imported_names("environment.task", task)
    return WrittenInJax(function(**json.loads(settings)), limit)


def window() -> Show:
    """Opens a window, and returns a function that shows a frame in it. Raises RunError if there can be none."""
    from matplotlib import pyplot

    pyplot.figure()
    if pyplot.get_backend().lower() == "agg":
        raise RunError("--window needs a display, and tkinter (apt install python3-tk) or PyQt6 (pip install PyQt6)")
    pictures: list[Any] = []

    def show(frame: Any) -> None:
        if not pictures:
            pyplot.axis("off")
            pictures.append(pyplot.imshow(frame))
        pictures[0].set_data(frame)
        pyplot.pause(0.001)

    return show


def play_all(config: Config, policy: Policy, episodes: int, is_shown: bool) -> list[float]:
    """Returns the return of each episode."""
    if config.environment.has_spaces:
        if is_shown and not can_render(config, describe(config)):
            raise UsageError(f"--window: {no_screen(config)}")
        environment, show = environment_of(config, is_shown), window() if is_shown else None
        return [play(environment, policy, seed, show) for seed in range(episodes)]
    try:
        environment = gymnasium.make(config.environment.task, render_mode="human" if is_shown else None)
        return [play(environment, policy, seed) for seed in range(episodes)]
    except gymnasium.error.Error:  # it has no such task, or lacks a package for it
        show = window() if is_shown and can_render(config, describe(config)) else None
        return [play_in_envpool(config, policy, seed, show) for seed in range(episodes)]


def main() -> None:
    """Prints the return of each episode."""
    parser = argparse.ArgumentParser(description="Plays episodes with a trained agent.")
    parser.add_argument("run", help="a run directory, such as runs/Pendulum-v1-1, or the folder of an exported policy")
    parser.add_argument("--episodes", type=int, default=3, choices=range(1, 1001), metavar="N")
    parser.add_argument("--window", action="store_true", help="show the episodes, if the task can be rendered")
    parser.add_argument("settings", nargs="*", help="settings of the run that name code of yours, as KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    try:
        config = load_run_to_play(arguments.run, parse_overrides(arguments.settings, ""))
        code = [each for each in arguments.settings if each.startswith(("algorithm.", "network."))]
        # As in evaluations: some Atari games loop for ever without it.
        exploration = config.evaluator.epsilon * config.environment.is_atari
        policy = load_policy(arguments.run, exploration=exploration, code=code)
        returns = play_all(config, policy, arguments.episodes, arguments.window)
    except (RunError, UsageError, gymnasium.error.Error) as error:
        sys.exit(f"error: {error}")
    print(f"mean return {sum(returns) / len(returns):.2f} of {len(returns)} episodes:", *(f"{r:.2f}" for r in returns))


if __name__ == "__main__":
    main()
