"""Environments of a user: small ones that learn, and ones that misbehave. `gymnasium:tests.rigs.environments:NAME`."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import subprocess
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from examples.masked_cards import CARDS, Tricks

LENGTH = 5


class Corridor(gymnasium.Env[Any, Any]):
    """Go right: the end of the corridor pays 1 and ends the episode; each step costs 0.01."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as in Gymnasium's own

    def __init__(self, length: int = LENGTH, render_mode: str | None = None):
        self.length, self.render_mode, self.place, self.steps = length, render_mode, 0, 0
        self.observation_space: Any = spaces.Dict({
            "place": spaces.Box(-1, 1, (1, 2), np.float32),
            "end": spaces.Box(0, np.inf, (), np.float64),
        })  # fmt: skip
        self.action_space = spaces.Discrete(2)

    def observation(self) -> Any:
        """Returns the present observation."""
        place = self.place / self.length
        return {"place": np.array([[place, 1 - place]], np.float32), "end": float(self.length)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(self.length))
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert type(action) is int
        self.steps += 1
        self.place = max(0, self.place + (1 if action else -1))
        ended = self.place == self.length
        return self.observation(), (1.0 if ended else -0.01), ended, False, {"not to be pickled": lambda: 0}

    def render(self) -> Any:
        return np.full((64, 96, 3), 10 * self.place, np.uint8)


class Long(Corridor):
    """States a bound for its length that it exceeds, as Gymnasium's Lunar Lander does for its place."""

    def __init__(self) -> None:
        super().__init__(length=3)
        self.observation_space["end"] = spaces.Box(0, 2.5, (), np.float64)


class Switches(Corridor):
    """Two switches; the mask has a number for each of the four combinations, or is a tuple of one for each switch."""

    def __init__(self, several: bool = False) -> None:
        super().__init__()
        self.action_space = spaces.MultiDiscrete([2, 2])  # type: ignore[assignment]
        self.several = several

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        mask = np.array([1, 0]), np.array([0, 1])
        return super().reset(**arguments)[0], {"action_mask": mask if self.several else np.array([1, 0, 0, 1])}


class Raises(Corridor):
    """Raises in its constructor, at its first reset, or at a step."""

    def __init__(self, at: str = "step", step: int = 1000):
        super().__init__()
        self.at, self.last = at, step
        self.fail("made")

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        self.fail("reset")
        return super().reset(**arguments)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.steps + 1 == self.last:
            self.fail("step")
        return super().step(action)

    def fail(self, at: str) -> None:
        """Raises the error."""
        if at == self.at:
            raise ValueError(f"the {at} failed\nas told")


class Hangs(Corridor):
    """Never returns from its third step; or, with the path of a file, from its constructor after the first.

    It writes its process's id to the file `processes`.
    """

    def __init__(self, made: str = "", processes: str = ""):
        super().__init__()
        if processes:
            with open(processes, "a") as file:
                file.write(f"{os.getpid()}\n")
        while made and Path(made).exists():
            time.sleep(0.01)
        if made:
            Path(made).touch()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        while self.steps == 2:
            re.match("(a+)+b", "a" * 99)  # keeps Python's lock
        return super().step(action)


class Dies(Corridor):
    """Ends its own process at its third step, or when it is made."""

    def __init__(self, made: bool = False):
        super().__init__()
        if made:
            os._exit(7)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.steps == 2:
            os._exit(7)
        return super().step(action)


class Draws(Corridor):
    """Draws from the global generators, and from one of its own that it seeds with them; writes down its number."""

    def __init__(self, number: Any = None, folder: str = "", closed: str = ""):
        super().__init__()
        self.observation_space = spaces.Box(0, 1, (4,), np.float64)
        self.own = np.random.RandomState(np.random.randint(2**31))
        self.number, self.folder, self.closed = number, folder, closed

    def observation(self) -> Any:
        number = self.number / 100 if self.number is not None else 0.0
        return np.array([np.random.rand(), random.random(), self.own.rand(), number])

    def close(self) -> None:
        if self.closed:
            with open(self.closed, "a") as file:
                file.write(f"{self.number!r} {self.folder}\n")


class Simulated(Corridor):
    """Starts two processes that it never ends.

    It writes its own id and theirs to the file `processes`, of at most `most` lines, and its own to `closed`.
    """

    def __init__(self, processes: str, closed: str, most: int = 1000, step: int = -1):
        super().__init__()
        self.closed, self.last = closed, step
        program = subprocess.Popen(["sleep", "600"])
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        fork.start()
        with open(processes, "a") as file:
            file.write(f"{os.getpid()} {program.pid} {fork.pid}\n")
        if len(Path(processes).read_text().splitlines()) > most:
            raise ValueError("there are too many")

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.steps + 1 == self.last:
            raise ValueError("the step failed")
        return super().step(action)

    def close(self) -> None:
        with open(self.closed, "a") as file:
            file.write(f"{os.getpid()}\n")


def processes_of(file: Path) -> tuple[list[int], list[int]]:
    """Returns the processes of `Simulated` environments, one an environment, and those that these have started."""
    rows = [[int(word) for word in line.split()] for line in file.read_text().splitlines()]
    return [row[0] for row in rows], [process for row in rows for process in row[1:]]


class Observes(Corridor):
    """Returns one observation of a space, or a reward, that the test sets."""

    space: Any = spaces.Discrete(2)
    value: Any = 0
    reward: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = self.space

    def observation(self) -> Any:
        return self.value

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.value, self.reward, False, False, {}


class Mistaken(Corridor):
    """Returns what an older Gymnasium did ("reset", "step"), or another type; or has a space of no fixed size."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        if what == "sequence":
            self.observation_space = spaces.Sequence(spaces.Box(0, 1, (2,), np.float32))

    def reset(self, **arguments: Any) -> Any:
        observation, info = super().reset(**arguments)
        return {"reset": observation, "info": (observation, None)}.get(self.what, (observation, info))

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        rewards = {"none": None, "shape": np.ones(1), "text": "1"}
        if self.what == "step":
            return observation, reward, terminated, info
        return observation, rewards.get(self.what, reward), terminated, truncated, info


class Old(Corridor):
    """Has the `reset` of an older Gymnasium."""

    def reset(self) -> Any:  # type: ignore[override]
        return self.observation()


class Pixels(Corridor):
    """Draws the place as pixels of a shape, from 0 to `high`: uint8 up to 255, or else float32 up to 1."""

    def __init__(self, shape: tuple[int, ...] = (20, 24), continuous: bool = False, high: int = 255):
        super().__init__()
        if continuous:
            self.action_space = spaces.Box(-1, 1, (2,), np.float32)  # type: ignore[assignment]
        self.observation_space = spaces.Box(0, high, tuple(shape), np.uint8 if high == 255 else np.float32)

    def observation(self) -> Any:
        space = self.observation_space
        image = np.full(space.shape, 10 * self.place + self.steps % 10, np.uint8)
        image[tuple(size - 1 for size in space.shape)] = 255  # the last corner, in the last channel
        return (image * (space.high.max() / 255)).astype(space.dtype)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return super().step(action if type(action) is int else int(action[0] > 0))


class MaskedBoard(Pixels):
    """A small board, with an action mask in `info`."""

    def __init__(self) -> None:
        super().__init__((7, 7, 3))

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset(**options)[0], {"action_mask": np.ones(2, np.int8)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"action_mask": np.ones(2, np.int8)}


class OwnSpaces(Corridor):
    """Has an action space of a class that no other process can import."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = type("Local", (spaces.Discrete,), {})(2)  # type: ignore[assignment]


class Acts(Corridor):
    """Asserts that its space contains each action: "start" is a Discrete from 5, or else a Box of that dtype."""

    actions: ClassVar[list[Any]] = []  # of all these environments in this process

    def __init__(self, what: str):
        super().__init__()
        low, high = np.array([-0.1, 0.1]), np.array([0.2, 0.7])
        space = spaces.Discrete(2, start=5) if what == "start" else spaces.Box(low, high, dtype=np.dtype(what).type)
        self.action_space = space  # type: ignore[assignment]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.actions.append(action)
        return super().step(0)


class Unlearnable(Corridor):
    """Has actions that no agent here can choose."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.MultiDiscrete([16, 17])  # type: ignore[assignment]


class Combines(Corridor):
    """Asserts that its space of 2 x 3 x 1 x 4 = 24 combinations, an array of 2 x 2, contains each action."""

    actions: ClassVar[list[Any]] = []  # of all these environments in this process

    def __init__(self) -> None:
        super().__init__()
        counts, start = np.array([[2, 3], [1, 4]]), np.array([[0, -1], [5, 1]])
        self.action_space = spaces.MultiDiscrete(counts, start=start)  # type: ignore[assignment]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.actions.append(action)
        return super().step(0)


class Bits(Corridor):
    """Has switches as actions."""

    actions: ClassVar[list[list[int]]] = []  # of all these environments in this process

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.action_space = spaces.MultiBinary(size)  # type: ignore[assignment]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.actions.append(action.tolist())
        return super().step(0)


class Cells(Corridor):
    """Shows its place as whole numbers, each of which is encoded one-hot, and switches."""

    def __init__(self) -> None:
        super().__init__()
        whole = spaces.Discrete(8, start=-1), spaces.MultiDiscrete([9, 6]), spaces.MultiBinary(3)
        self.observation_space = spaces.Tuple(whole)

    def observation(self) -> Any:
        return np.int64(self.place - 1), np.array([self.place, LENGTH - self.place]), np.array([1, 0, 1], np.int8)


class Cards(Tricks):
    """The card game of the example, in which an invalid card is an error.

    The mask is in `info`, or, if `observed`, beside the observation, as in PettingZoo; from the second trick on it is
    `fault`: "none", "empty", or "short"; or it begins there, "late". With `pixels`, there is a picture, too.
    """

    def __init__(self, observed: bool = False, fault: str = "", pixels: bool = False):
        super().__init__()
        self.observed, self.fault, self.pixels = observed, fault, pixels
        if observed:
            mask = spaces.Box(0, 1, (CARDS,), np.int8)
            self.observation_space = spaces.Dict(  # type: ignore[assignment]
                action_mask=mask, observation=self.observation_space
            )
        if pixels:
            picture = spaces.Box(0, 255, (16, 16), np.uint8)
            self.observation_space = spaces.Dict(  # type: ignore[assignment]
                cards=self.observation_space, picture=picture
            )

    def observe(self) -> Any:
        observation = super().observe()
        if self.pixels:
            return {"cards": observation, "picture": np.resize((255 * observation).astype(np.uint8), (16, 16))}
        return {"observation": observation, "action_mask": self.mask()} if self.observed else observation

    def mask(self) -> Any:
        """Returns the mask, or a wrong one."""
        mask = super().info()["action_mask"]
        is_wrong = 0 < len(self.hand) < 4
        return {"empty": 0 * mask, "short": mask[1:]}.get(self.fault, mask) if is_wrong else mask

    def info(self) -> dict[str, Any]:
        is_first = len(self.hand) == 4
        is_left_out = self.observed or self.fault == ("late" if is_first else "none")
        return {} if is_left_out else {"action_mask": self.mask()}

    def step(self, card: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.fault == "late" or card in self.hand, f"card {card} is not one of {self.hand}"
        return super().step(card)


def from_a_function(length: int) -> Corridor:
    """Returns a corridor."""
    return Corridor(length)


def no_environment() -> str:
    """Returns something else."""
    return "a corridor"


gymnasium.register("Corridor-v0", "tests.rigs.environments:Corridor", max_episode_steps=50)


def a_batch() -> Any:
    """Returns a batch of environments."""
    return gymnasium.vector.SyncVectorEnv([Corridor] * 2)


class ManyAgents:
    """Looks like an environment of PettingZoo."""

    possible_agents = ("me", "you")
