"""A walk to the right as the authors of JAX packages would write it: one class for each shape of interface.

Each follows the rules of `walk`: the place moves by -1 or 1; at 3 the episode ends with a reward of 1, at the fifth
step it is cut off.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

GOAL, LIMIT = 3, 5


def walk(place: int, time: int, action: int) -> tuple[int, int, float, bool, bool]:
    """Returns place, time, reward, and whether the episode has ended or is cut off, in plain Python."""
    place, time = max(0, place + (1 if action else -1)), time + 1
    return place, time, float(place == GOAL), place == GOAL, place != GOAL and time == LIMIT


class Walk(NamedTuple):
    """The state of each of them."""

    place: Any
    time: Any


def _moved(state: Walk, action: Any) -> tuple[Walk, Any, Any]:
    state = Walk(jnp.maximum(0, state.place + 2 * action - 1), state.time + 1)
    is_there = state.place == GOAL
    return state, is_there, ~is_there & (state.time == LIMIT)


def _begun(key: Any) -> Walk:
    assert jnp.issubdtype(key.dtype, jnp.unsignedinteger), "states may hold keys of the older form alone"
    return Walk(jax.random.randint(key, (), 0, 2), jnp.int32(0))


class _Space(NamedTuple):
    shape: tuple[int, ...] = ()
    dtype: Any = jnp.float32
    low: float = 0.0
    high: float = 5.0


class _Choices(NamedTuple):
    n: int = 2


@struct.dataclass
class Params:
    """As in craftax."""

    max_timesteps: int = LIMIT


class CraftaxWalk:
    """As in craftax: `done` is all that tells of an episode that its limit has cut off."""

    default_params = Params()

    def observation_space(self, params: Params) -> _Space:
        return _Space((2,))

    def action_space(self, params: Params) -> _Choices:
        return _Choices()

    def reset_env(self, key: Any, params: Params) -> Any:
        state = _begun(jax.random.key_data(key))
        return jnp.stack(state), state

    def step_env(self, key: Any, state: Any, action: Any, params: Params) -> Any:
        assert params == self.default_params
        state, ended, cut = _moved(state, action)
        return jnp.stack(state), state, ended * 1.0, ended | cut, {}

    def is_terminal(self, state: Any, params: Params) -> Any:
        return (state.place == GOAL) | (state.time >= params.max_timesteps)


class GymnaxWalk(CraftaxWalk):
    """As in gymnax."""

    def step_env(self, key: Any, state: Any, action: Any, params: Params) -> Any:
        *seen, ended, info = super().step_env(key, state, action, params)
        return *seen, ended & ~self.is_truncated(seen[1], params), info

    def is_truncated(self, state: Any, params: Params) -> Any:
        return (state.place != GOAL) & (state.time == LIMIT)


@struct.dataclass
class PgxState:
    """As in pgx."""

    walk: Walk
    observation: Any
    rewards: Any
    terminated: Any
    truncated: Any
    legal_action_mask: Any


class PgxWalk:
    """As in pgx; a step back is invalid at 0."""

    num_players, num_actions, id = 1, 2, "walk"

    def init(self, key: Any) -> PgxState:
        no = jnp.zeros((), bool)
        return self._state(_begun(key), no, no)

    def step(self, state: PgxState, action: Any, key: Any) -> PgxState:
        return self._state(*_moved(state.walk, action))

    def _state(self, walk: Walk, ended: Any, cut: Any) -> PgxState:
        mask = jnp.array([walk.place > 0, True])
        return PgxState(walk, jnp.stack(walk), jnp.stack([ended * 1.0]), ended, cut, mask)


class BraxState(NamedTuple):
    """As in brax."""

    pipeline_state: Walk
    obs: Any
    reward: Any
    done: Any
    metrics: Any
    info: Any


class BraxWalk:
    """As in brax; an action above 0 is a step to the right. Like ant, it changes the metrics of a state in place."""

    observation_size, action_size = 2, 1

    def reset(self, key: Any) -> BraxState:
        state, zero = _begun(key), jnp.zeros(())
        return BraxState(state, jnp.stack(state) * 1.0, zero, zero, {"survive": zero}, {"truncation": zero})

    def step(self, state: BraxState, action: Any) -> BraxState:
        walk, ended, cut = _moved(state.pipeline_state, (action[0] > 0).astype(jnp.int32))
        state.metrics.update(survive=1.0)
        result = walk, jnp.stack(walk) * 1.0, ended * 1.0, (ended | cut) * 1.0
        return BraxState(*result, state.metrics, {"truncation": cut * 1.0})


class Seen(NamedTuple):
    """A nested observation."""

    at: Walk
    action_mask: Any


@struct.dataclass
class TimeStep:
    """As in dm_env; xminigrid's holds the state."""

    step_type: Any
    reward: Any
    discount: Any
    observation: Any
    state: Any = None

    def last(self) -> Any:
        return self.step_type == 2


class _ActionSpec(NamedTuple):
    num_values: Any = 2


class JumanjiWalk:
    """As in jumanji: state and time step, with a mask among the observation."""

    action_spec = _ActionSpec(np.int32(2))

    def reset(self, key: Any) -> Any:
        state, no = _begun(key), jnp.zeros((), bool)
        return state, _time_step(state, no, no)

    def step(self, state: Any, action: Any) -> Any:
        state, ended, cut = _moved(state, action)
        return state, _time_step(state, ended, cut)


class PartsWalk(JumanjiWalk):
    """As in jumanji: an action has two parts, the first is the step, and the mask has their shape."""

    action_spec = _ActionSpec(np.array([2, 3]))

    def reset(self, key: Any) -> Any:
        return self._with_mask(super().reset(key))

    def step(self, state: Any, action: Any) -> Any:
        assert action.shape == (2,)
        return self._with_mask(super().step(state, action[0]))

    def _with_mask(self, result: Any) -> Any:
        state, step = result
        mask = jnp.array([[state.place > 0] * 3, [True, False, True]])
        return state, step.replace(observation=step.observation._replace(action_mask=mask))


class XMiniGridWalk:
    """As in xminigrid: the time step holds the state, and params come first."""

    def default_params(self) -> int:
        return 7

    def num_actions(self, params: int) -> int:
        return 2

    def reset(self, params: int, key: Any) -> Any:
        state, no = _begun(key), jnp.zeros((), bool)
        return _time_step(state, no, no, state)

    def step(self, params: int, step: Any, action: Any) -> Any:
        assert params == 7
        state, ended, cut = _moved(step.state, action)
        return _time_step(state, ended, cut, state)


def _time_step(state: Walk, ended: Any, cut: Any, held: Any = None) -> TimeStep:
    seen = Seen(state, jnp.array([state.place > 0, True]))
    return TimeStep(jnp.where(ended | cut, 2, 1), ended * 1.0, 1.0 - ended, seen, held)
