"""CarRacing on two cores: Gymnasium's track, car and rewards, seen in 48x48 gray pixels, two numbers as action.

    pip install -r requirements-box2d.txt
    python examples/car_racing.py                  # arguments are settings, such as seed=2 total_minutes=30

Gymnasium draws every frame in 1000x800 pixels and shrinks it, which takes longer than all else. Here each action lasts
four frames, as in Atari, and only the last is drawn, at the size in which the agent sees it.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pygame
from gymnasium.envs.box2d import car_racing

sys.path.insert(1, str(Path(__file__).parents[1]))  # finds apex_jax if it is not installed

REPEATS = 4
PIXELS, METERS = 48, 62.0  # of a side of the image, and what it shows
GRASS, ROAD, CAR = 200, 90, 0


class FastCarRacing(car_racing.CarRacing):
    """CarRacing without a picture for each step: `small_image` draws one when it is wanted."""

    def _render(self, mode: str) -> Any:
        return super()._render(mode) if mode == "rgb_array" else None

    def small_image(self) -> np.ndarray:
        """Returns the road and the car from above, which drives upwards: uint8[PIXELS, PIXELS]."""
        assert self.car is not None
        hull = self.car.hull
        cosine, sine = math.cos(hull.angle), math.sin(hull.angle)
        turned = np.array([[cosine, sine], [sine, -cosine]]).T * PIXELS / METERS
        roads = [poly for poly, _ in self.road_poly if len(poly) == 4]
        points = (np.array(roads) - np.array(hull.position)) @ turned + (PIXELS / 2, PIXELS * 0.75)
        surface = pygame.Surface((PIXELS, PIXELS), depth=8)
        surface.set_palette([(level, level, level) for level in range(256)])
        surface.fill(GRASS)
        for road in points[((points > -4) & (points < PIXELS + 4)).all(axis=2).any(axis=1)]:
            pygame.draw.polygon(surface, ROAD, road)
        for wheel in self.car.wheels[:2]:  # the front wheels: where the car steers
            spot = (np.array(wheel.position) - np.array(hull.position)) @ turned + (PIXELS / 2, PIXELS * 0.75)
            pygame.draw.circle(surface, CAR, spot, 1)
        image = pygame.surfarray.array2d(surface).T.astype(np.uint8)
        image[-2:] = 0  # a bar of the speed, below
        image[-2:, : int(min(1, math.hypot(*hull.linearVelocity) / 100) * PIXELS)] = 255
        return image


class CarRacing(gymnasium.Env[np.ndarray, np.ndarray]):
    """The action: steering to the right, and gas (above 0) or brake (below 0), both from -1 to 1."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12.5}  # noqa: RUF012 - the form that Gymnasium wants

    def __init__(self, render_mode: str | None = None):
        self.game = FastCarRacing(render_mode=render_mode)
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(0, 255, (PIXELS, PIXELS), np.uint8)
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts at the beginning of a new track."""
        self.game.reset(seed=seed)
        self.frames = 0
        return self.game.small_image(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Drives four frames; an episode has 1,000, as with Gymnasium."""
        steer, pedal = np.clip(action, -1, 1)
        total, terminated = 0.0, False
        for _ in range(REPEATS):
            _, reward, terminated, _, _ = self.game.step(np.array([steer, max(0, pedal), max(0, -pedal)]))
            total, self.frames = total + float(reward), self.frames + 1
            if terminated:
                break
        return self.game.small_image(), total, terminated, self.frames >= 1000, {}

    def render(self) -> Any:
        """Returns Gymnasium's own picture, for the film."""
        return self.game.render()

    def close(self) -> None:
        """Closes the track's window, if it has one."""
        self.game.close()


if __name__ == "__main__":
    from apex_jax.main import main

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the program's processes find this file
    sys.argv[1:] = ["--config", "car_racing", "environment.task=gymnasium:car_racing:CarRacing", *sys.argv[1:]]
    sys.exit(main())
