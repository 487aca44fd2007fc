"""Environments written in JAX, as a user would write them, sound and faulty ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces


class Place(NamedTuple):
    x: jax.Array
    time: jax.Array


class Corridor:
    """A walk along `length` fields by steps of -1, 0 or 1 and a random push; the right end pays 1 and ends the game."""

    action_space: Any = spaces.Discrete(3, start=-1)

    def __init__(self, length: int = 5, limit: int = 9) -> None:
        self.length, self.limit = length, limit
        self.observation_space: Any = spaces.Box(0, length, (2,), np.float32)

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        place = Place(jax.random.randint(key, (), 0, 2), jnp.int32(0))
        return self.observe(place), place

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        push = jax.random.bernoulli(key, 0.2).astype(jnp.int32)
        place = Place(jnp.clip(state.x + action - push, 0, self.length), state.time + 1)
        is_there = place.x == self.length
        info = {"is_there": is_there, "time": place.time}
        return self.observe(place), place, is_there * 1.0, is_there, place.time >= self.limit, info

    def observe(self, place: Place) -> Any:
        return jnp.array([place.x, place.time], jnp.float32)


class Drawn(Corridor):
    """The same as an image of booleans, [1, fields, 2], padded to three rows."""

    def __init__(self, length: int = 5, limit: int = 9) -> None:
        super().__init__(length, limit)
        self.observation_space = spaces.Box(0, 1, (3, length + 1, 2), np.int8)

    def observe(self, place: Place) -> Any:
        return jnp.zeros((3, self.length + 1, 2), bool).at[1, place.x, place.time % 2].set(True)


class Levels(Drawn):
    """Its image has levels beyond the bounds of its space."""

    def observe(self, place: Place) -> Any:
        return 7 * super().observe(place).astype(jnp.int8)


class Restarting(Corridor):
    """Its `step` resets itself at the end of a game, as gymnax's public one does."""

    splits = True

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        last, after, reward, terminated, truncated, info = super().step(key, state, action)
        first, begun = self.reset(jax.random.split(key)[1] if self.splits else key)
        is_over = terminated | truncated
        kept = jax.tree.map(lambda new, old: jnp.where(is_over, new, old), begun, after)
        return jnp.where(is_over, first, last), kept, reward, terminated, truncated, info


class RestartingWithItsKey(Restarting):
    """The same with the key of the step."""

    splits = False


class Cast(Drawn):
    """Its image has another dtype than its space."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, self.observation_space.shape, np.uint8)

    def observe(self, place: Place) -> Any:
        return super().observe(place).astype(jnp.int32)


class Shown(Corridor):
    """The same with a picture of its own."""

    def render(self, state: Any) -> np.ndarray:
        return np.full((2, 4, 3), 200 + int(state.time), np.uint8)


class Sliding(Corridor):
    """The same with an action of one number."""

    action_space = spaces.Box(-2.0, 1.0, (1,), np.float32)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        return super().step(key, state, jnp.rint(action[0]).astype(jnp.int32))


class OtherShape(Corridor):
    def observe(self, place: Place) -> Any:
        return jnp.zeros(3)


class OtherState(Corridor):
    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        observation, place, *rest = super().step(key, state, action)
        return observation, (place.x,), *rest


class OtherType(Corridor):
    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        observation, place, *rest = super().step(key, state, action)
        return observation, place._replace(time=state.time + 0.5), *rest


class FiveResults(Corridor):
    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        return super().step(key, state, action)[:5]


class Masked(Corridor):
    """Has a mask of valid actions."""

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        *results, info = super().step(key, state, action)
        return *results, info | {"action_mask": jnp.ones(3)}


class Several(Corridor):
    """An image, numbers, one of them discrete, and a mask, by which a step back is invalid in the first field."""

    def __init__(self, length: int = 5, limit: int = 9) -> None:
        super().__init__(length, limit)
        self.observation_space = spaces.Dict(
            image=spaces.Box(0, 255, (16, 18), np.uint8),
            place=spaces.Discrete(length + 1),
            time=spaces.Box(0, limit, (), np.float32),
            action_mask=spaces.MultiBinary(3),
        )

    def observe(self, place: Place) -> Any:
        image = jnp.zeros((16, 18), jnp.uint8).at[place.x, place.time].set(200)
        mask = jnp.array([place.x > 0, True, True])
        return {"image": image, "place": place.x, "time": place.time, "action_mask": mask}


class Sized(Corridor):
    observation_size = num_players = 2

    def step(self, key: jax.Array, state: Any, action: jax.Array, params: Any = None) -> tuple[Any, ...]:
        return super().step(key, state, action)


class Parts(Corridor):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(x=spaces.Text(5))


class NotFinite(Corridor):
    def observe(self, place: Place) -> Any:
        return jnp.array([place.x, 1 / (2 - place.time)], jnp.float32)


class Unpaid(Corridor):
    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        observation, state, _, *others = super().step(key, state, action)
        return observation, state, jnp.nan, *others


class Torn(Drawn):
    """Its image is not finite after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 1, self.observation_space.shape, np.float32)

    def observe(self, place: Place) -> Any:
        return jnp.where(place.time > 0, jnp.nan, super().observe(place).astype(jnp.float32))


def no_environment() -> None:
    """Forgets to return one."""
