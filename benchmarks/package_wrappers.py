"""Wrappers for `benchmarks.packages`, of packages whose environments are not plain ones of one agent.

They run in the interpreter of the package, of Python 3.8 or later, and import what they need when they are called.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any


class Small:
    """Grey pictures of every eighth pixel; each action, a number, is held for `skip` steps."""

    def __init__(self, environment: Any, skip: int, limit: int, actions: Any = None, part: str = ""):
        spaces, numpy = import_module("gymnasium.spaces"), import_module("numpy")
        self.numpy, self.environment, self.skip, self.limit, self.part = numpy, environment, skip, limit, part
        self.actions = range(environment.action_space.n) if actions is None else actions
        self.action_space = spaces.Discrete(len(self.actions))
        space = environment.observation_space
        height, width = (-(-side // 8) for side in (space[part] if part else space).shape[:2])
        self.observation_space = spaces.Box(0, 255, (height, width), numpy.uint8)

    def small(self, observation: Any) -> Any:
        """Returns a picture."""
        picture = observation[self.part] if self.part else observation
        return picture[::8, ::8].mean(-1).astype(self.numpy.uint8)

    def reset(self, seed: Any = None) -> Any:
        """Starts an episode."""
        self.steps = 0
        try:
            result = self.environment.reset(seed=seed)
        except TypeError:  # old gym
            result = self.environment.reset()
        return self.small(result[0] if isinstance(result, tuple) else result), {}

    def step(self, action: int) -> Any:
        """Holds an action."""
        total, self.steps = 0.0, self.steps + 1
        for _ in range(self.skip):
            observation, reward, terminated, *others = self.environment.step(self.actions[action])
            total += float(reward)
            if terminated or any(others[:-1]):
                break
        return self.small(observation), total, terminated, self.steps >= self.limit or any(others[:-1]), {}

    def close(self) -> None:
        """Closes the environment."""
        self.environment.close()


def one_of_many(module: str, task: str, **settings: Any) -> Any:
    """Returns an environment of several agents with one of them, whose tuples of one are taken apart."""
    gymnasium = import_module("gymnasium")
    import_module(module)

    class One(gymnasium.Wrapper):  # type: ignore[misc, name-defined]
        """One agent."""

        def reset(self, **arguments: Any) -> Any:
            observation, info = self.env.reset(**arguments)
            return observation[0], info

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = self.env.step((action,))
            ends = bool(import_module("numpy").all(terminated)), bool(import_module("numpy").any(truncated))
            return observation[0], float(import_module("numpy").sum(reward)), *ends, info

    one = One(gymnasium.make(task, **settings))
    one.observation_space, one.action_space = one.env.observation_space[0], one.env.action_space[0]
    return one


def registered(module: str, task: str, **settings: Any) -> Any:
    """Returns an environment of a package that registers its own by a function."""
    import_module(module).register_envs()
    return import_module("gymnasium").make(task, **settings)


def minigrid(task: str) -> Any:
    """Returns the image of MiniGrid without the text."""
    import_module("minigrid")
    return import_module("minigrid.wrappers").ImgObsWrapper(import_module("gymnasium").make(task))


def tetris() -> Any:
    """Returns Tetris with one action for each placement, whose outcome is described by height, holes and bumpiness."""
    wrappers, gymnasium = import_module("tetris_gymnasium.wrappers.grouped"), import_module("gymnasium")
    features = import_module("tetris_gymnasium.wrappers.observation").FeatureVectorObservation
    game = import_module("tetris_gymnasium.envs").Tetris(width=6, height=12)
    options = {"terminate_on_illegal_action": False}
    grouped = wrappers.GroupedActionsObservations(game, [features(game, report_height=False)], **options)
    return gymnasium.wrappers.FlattenObservation(gymnasium.wrappers.TimeLimit(grouped, 100))


def evogym() -> Any:
    """Returns a walker of a fixed body; 3 is a horizontal actuator, 0 is empty."""
    import_module("evogym.envs")
    body = import_module("numpy").array([[3, 3, 3, 3], [3, 3, 3, 3], [3, 0, 0, 3], [3, 0, 0, 3]])
    return import_module("gymnasium").make("Walker-v0", body=body, max_episode_steps=150)


def mario() -> Any:
    """Returns Super Mario with the buttons that lead to the right."""
    game = import_module("gym_super_mario_bros").make("SuperMarioBros-v0").unwrapped
    actions = import_module("gym_super_mario_bros.actions").RIGHT_ONLY
    return Small(import_module("nes_py.wrappers").JoypadSpace(game, actions), skip=8, limit=200)


def retro() -> Any:
    """Returns the game whose cartridge stable-retro brings, with some of its buttons."""
    game = import_module("stable_retro").make("Airstriker-Genesis-v0", render_mode="rgb_array")
    held = ((), ("B",), ("LEFT",), ("RIGHT",), ("LEFT", "B"), ("RIGHT", "B"))
    buttons = [import_module("numpy").array([name in each for name in game.buttons], "int8") for each in held]
    return Small(game, skip=4, limit=400, actions=buttons)


def vizdoom() -> Any:
    """Returns ViZDoom's first task."""
    import_module("vizdoom.gymnasium_wrapper")
    game = import_module("gymnasium").make("VizdoomBasic-v1", frame_skip=4)
    return Small(game, skip=1, limit=300, part="screen")


def quadcopter() -> Any:
    """Returns PyFlyt's without Numba, which would compile for half a minute in each process."""
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    import_module("PyFlyt.gym_envs")
    return import_module("gymnasium").make("PyFlyt/QuadX-Hover-v4")


def weighted(task: str) -> Any:
    """Returns an environment of mo-gymnasium whose rewards are added up."""
    package = import_module("mo_gymnasium")
    return package.wrappers.LinearReward(package.make(task))


def trading() -> Any:
    """Returns the market of gym-trading-env with prices that are a sine with noise."""
    numpy, pandas, gymnasium = import_module("numpy"), import_module("pandas"), import_module("gymnasium")
    import_module("gym_trading_env")
    close = 100 + 5 * numpy.sin(numpy.arange(2000) / 10) + numpy.random.default_rng(0).normal(0, 0.2, 2000)
    columns = {"open": close, "high": close + 0.1, "low": close - 0.1, "close": close, "volume": 1.0}
    prices = pandas.DataFrame(columns, index=pandas.date_range("2020", periods=2000, freq="h"))
    for bars in (1, 5):
        prices[f"feature_change_{bars}"] = prices.close.pct_change(bars) * 100
    settings = {"positions": [-1, 0, 1], "trading_fees": 0.0, "max_episode_duration": 200, "verbose": 0}
    return gymnasium.make("TradingEnv", df=prices.dropna(), **settings)


def traffic() -> Any:
    """Returns one junction of sumo-rl."""
    os.environ.setdefault("SUMO_HOME", os.path.dirname(str(import_module("sumo").__file__)))
    package = import_module("sumo_rl")
    files = os.path.join(os.path.dirname(str(package.__file__)), "nets", "2way-single-intersection")
    net, routes = (os.path.join(files, f"single-intersection{end}") for end in (".net.xml", "-vhvh.rou.xml"))
    options = {"single_agent": True, "num_seconds": 500, "sumo_warnings": False}
    return package.SumoEnvironment(net_file=net, route_file=routes, **options)


def buildings() -> Any:
    """Returns two weeks of CityLearn's buildings with one agent for all."""
    package = import_module("citylearn.citylearn")
    options = {"central_agent": True, "simulation_start_time_step": 0, "simulation_end_time_step": 335}
    city = package.CityLearnEnv("citylearn_challenge_2022_phase_1", **options)
    wrappers = import_module("citylearn.wrappers")
    return wrappers.StableBaselines3Wrapper(wrappers.NormalizedObservationWrapper(city))
