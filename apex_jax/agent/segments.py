"""Turns steps of a batch of environments into segments: self-contained runs of frames with n-step transitions."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from apex_jax.agent.losses import initial_priority
from apex_jax.host.compiled import compiled
from apex_jax.types import MASK, NUMBERS, Columns, Segment, SegmentSpec, Step, joined, named_parts, zero_columns


class Slots(NamedTuple):
    """The data of each frame slot except its frame; [E, L], or [L] for one environment."""

    action: np.ndarray  # dtype and shape as in the spec; chosen for the observation that ends at this slot
    value: np.ndarray  # float32, q(s, action)
    bootstrap_value: np.ndarray  # float32, bootstraps a return that ends at this slot
    acted: np.ndarray  # bool, False if no transition starts here: older frames of an initial stack, end of an episode
    reward: np.ndarray  # float32, clipped reward of the action
    terminal: np.ndarray  # bool, the action ended the return by termination: no bootstrap follows
    last: np.ndarray  # bool, the action ended the return, by termination or time limit


class SegmentBuilder:
    """Writes each environment's frames into slots, and cuts a `Segment` when `spec.slots` of them are full.

    A slot holds the newest frame of an observation, the action chosen for it with its values, and, once the next
    observation arrives, the outcome of that action. An episode starts with its whole initial stack (F slots, of which
    only the last starts a transition) and ends with its last observation (which starts none). So the window of F
    frames of each transition's observations is exactly what the environment returned, and needs no patching.
    """

    def __init__(
        self,
        spec: SegmentSpec,
        num_environments: int,
        discount: float,
        reward_clip: float,
        life_loss_terminates: bool,
        first_slot: np.ndarray | None = None,
        largest_observation: float = math.inf,
    ):
        """`reward_clip`: rewards are clipped to [-reward_clip, reward_clip]; 0 = no clipping.

        `first_slot`: int[E] in [0, max_transitions), the slot where each environment's first segment begins; None = 0.
        `largest_observation`: a game with a larger number is left out of the segments that are not full by then.
        """
        self._spec = spec
        self._discount = discount
        self._reward_clip = reward_clip or np.inf
        self._life_loss_terminates = life_loss_terminates
        shape = (num_environments, spec.slots)
        self._position = np.zeros(num_environments, np.int64) if first_slot is None else first_slot.astype(np.int64)
        self._frames = named_parts(spec.zero_frames(*shape))
        action = np.zeros((*shape, *spec.action.shape), spec.action.dtype)
        dtypes = (np.float32, np.float32, bool, np.float32, bool, bool)
        self._slots = Slots(action, *(np.zeros(shape, dtype) for dtype in dtypes))
        self._largest_observation = largest_observation
        self._game_start = np.zeros(num_environments, np.int64)  # slot of the first frame of the game, or 0
        self._is_left_out = np.zeros(num_environments, bool)
        self.left_out = 0  # transitions

    def add(self, step: Step, action: np.ndarray, value: np.ndarray, bootstrap_value: np.ndarray) -> list[Segment]:
        """Adds a step of some environments and the policy's `Action` for it; returns the segments that became full.

        `action` [A, ...], `value` and `bootstrap_value` float32[A]: see `apex_jax.agent.algorithm.Action`.
        """
        segments = []
        if math.isfinite(self._largest_observation):
            step = self._without_large_numbers(step)
        if step.first.any():
            for row in np.flatnonzero(step.first).tolist():
                segments += self._write_initial_stack(step, row)
        options = self._reward_clip, self._life_loss_terminates
        _write_step(self._slots, self._position, step._replace(observation=None), value, bootstrap_value, *options)
        at = step.env_id, self._position[step.env_id]
        self._slots.action[at] = action
        for name, part in named_parts(step.observation).items():
            self._frames[name][at] = part[:, -1]
        for env_id in step.env_id[self._is_left_out[step.env_id]]:
            self._leave_out(env_id)
        return segments + self._advance(step.env_id)

    def _leave_out(self, env_id: int) -> None:
        """Lets no transition of the game start in this segment; those before slot F - 1 are in the previous one."""
        acted = self._slots.acted[env_id, self._game_start[env_id] : self._position[env_id] + 1]
        self.left_out += int(np.count_nonzero(acted[max(0, self._spec.frame_stack - 1 - self._game_start[env_id]) :]))
        acted[:] = False

    def _without_large_numbers(self, step: Step) -> Step:
        """Returns the step with zeros for observations that no game may have, and leaves out the games that have."""
        begins = step.env_id[step.first]
        self._is_left_out[begins], self._game_start[begins] = False, self._position[begins]
        numbers = named_parts(step.observation)[NUMBERS]
        is_large = np.abs(numbers).max(axis=(1, 2)) > self._largest_observation
        if not is_large.any():
            return step
        self._is_left_out[step.env_id[is_large]] = True
        kept = np.where(is_large[:, None, None], np.float32(0), numbers)
        return step._replace(observation=joined(named_parts(step.observation) | {NUMBERS: kept}))

    def _write_initial_stack(self, step: Step, row: int) -> list[Segment]:
        """Writes the older frames of an initial stack; a mask has none."""
        segments, env_id = [], step.env_id[row]
        for place in range(self._spec.frame_stack - 1):
            for name, part in named_parts(step.observation).items():
                if name != MASK:
                    self._frames[name][env_id, self._position[env_id]] = part[row, place]
            self._slots.acted[env_id, self._position[env_id]] = False
            segments += self._advance(np.array([env_id]))
        return segments

    def _advance(self, env_id: np.ndarray) -> list[Segment]:
        self._position[env_id] += 1
        full = env_id[self._position[env_id] == self._spec.slots]
        return [segment for i in full if (segment := self._cut(i)) is not None]

    def _cut(self, env_id: int) -> Segment | None:
        """Returns a full segment (None if no transition starts in it); the next one begins with the overlap."""
        slots = Slots(*(array[env_id] for array in self._slots))
        columns = n_step_columns(slots, self._spec, self._discount)
        frames = {name: part[env_id].copy() for name, part in self._frames.items()}
        segment = Segment(joined(frames), columns) if columns["priority"].any() else None
        overlap = self._spec.overlap
        for array in (*self._frames.values(), *self._slots):
            array[env_id, :overlap] = array[env_id, -overlap:].copy()  # copied first: the two slices may overlap
        self._position[env_id] = overlap
        self._game_start[env_id] = max(0, self._game_start[env_id] - (self._spec.slots - overlap))
        return segment


def spread_first_slots(spec: SegmentSpec, num_environments: int) -> np.ndarray:
    """Returns int64[E], `first_slot` of each environment: their segments become full one after the other.

    If all became full at once, they would reach the replay in bursts, and their frames (100 MB for 256 environments)
    would need new memory: 9 to 12 us per step of 84x84 pixels, instead of 3 to 4.
    """
    return np.arange(num_environments) * spec.max_transitions // num_environments


def n_step_columns(slots: Slots, spec: SegmentSpec, discount: float) -> Columns:
    """Returns the columns of a full segment, computed from its `slots` [L]."""
    columns = zero_columns(spec)
    starts, returns, discounts, steps = _n_step_returns(slots, spec.frame_stack, spec.n_step, discount)
    values = slots.value[starts], slots.bootstrap_value[starts + steps]
    columns["n_step_return"][starts] = returns
    columns["discount"][starts] = discounts
    columns["action"][starts] = slots.action[starts]
    columns["bootstrap_offset"][starts] = steps
    columns["priority"][starts] = initial_priority(returns, discounts, *values)
    return columns


# The compiled part -----------------------------------------------------------------------------------------------


@compiled()
def _write_step(
    slots: Slots,
    position: np.ndarray,
    step: Step,
    value: np.ndarray,
    bootstrap_value: np.ndarray,
    reward_clip: float,
    life_loss_terminates: bool,
) -> None:
    """Records the outcome of each previous action (unless a reset ignored it), then the values of the new action."""
    for row in range(step.env_id.size):
        env = step.env_id[row]
        slot = position[env]
        if not step.first[row]:
            terminal = step.terminated[row] or (life_loss_terminates and step.life_lost[row])
            slots.reward[env, slot - 1] = min(max(step.reward[row], -reward_clip), reward_clip)
            slots.terminal[env, slot - 1] = terminal
            slots.last[env, slot - 1] = terminal or step.truncated[row]
        slots.value[env, slot] = value[row]
        slots.bootstrap_value[env, slot] = bootstrap_value[row]
        slots.acted[env, slot] = not (step.terminated[row] or step.truncated[row])


@compiled()
def _n_step_returns(
    slots: Slots, frame_stack: int, n_step: int, discount: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the slots at which transitions start, int[N], their returns and discounts, float64[N], and k, int[N].

    A transition sums rewards over k steps: n, or fewer if the return ends before (`last`). Its discount is gamma^k, or
    0 if it ends by termination (`terminal`). A time limit keeps the discount, so that a truncated episode bootstraps
    from its last observation.
    """
    # Before slot F - 1 the window would begin before this segment: these transitions are in the previous segment.
    last_start = slots.acted.size - n_step
    starts = np.flatnonzero(slots.acted[frame_stack - 1 : last_start]) + frame_stack - 1
    returns, discounts, steps = np.zeros(starts.size), np.ones(starts.size), np.zeros(starts.size, np.int64)
    for row, start in enumerate(starts):
        k, ended = 0, False
        while k < n_step and not ended:
            returns[row] += discounts[row] * slots.reward[start + k]
            discounts[row] *= 0.0 if slots.terminal[start + k] else discount
            ended = slots.last[start + k]
            k += 1
        steps[row] = k
    return starts, returns, discounts, steps
