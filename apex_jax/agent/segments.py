"""Steps of a batch of environments -> segments: self-contained runs of frames with their n-step transitions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apex_jax.agent.losses import initial_priority
from apex_jax.types import Segment, SegmentColumns, SegmentSpec, Step


class Slots(NamedTuple):
    """What is known of each frame slot beside its frame; [E, L], or [L] of one environment."""

    action: np.ndarray  # int32, chosen on the observation that ends here
    q_taken: np.ndarray  # float32, q(s, action)
    q_max: np.ndarray  # float32, max_a q(s, a)
    acted: np.ndarray  # bool, the action counts: the episode had not ended here
    reward: np.ndarray  # float32, clipped, that the action brought
    terminal: np.ndarray  # bool, the action ended the return and there is nothing to bootstrap from
    last: np.ndarray  # bool, the action ended the return, by termination or time limit


class SegmentBuilder:
    """Writes each environment's frames into slots and cuts a `Segment` whenever `spec.slots` of them are full.

    What a slot holds: the newest frame of an observation, the action chosen on it with its q-values, and then, as the
    next observation arrives, that action's outcome. An episode starts with its whole initial stack (F slots, of which
    only the last starts a transition) and ends with its last observation (which starts none), so the window of F
    frames that ends at any slot is exactly what the environment returned there, and is never patched.
    """

    def __init__(
        self,
        spec: SegmentSpec,
        num_environments: int,
        discount: float,
        reward_clip: float,
        life_loss_terminates: bool,
        first_slot: np.ndarray | None = None,
    ):
        """`reward_clip`: rewards are clipped to [-reward_clip, reward_clip]; 0 = not at all.

        `first_slot`: int[E] in [0, max_transitions), where each environment's first segment begins; None = at slot 0.
        """
        self._spec = spec
        self._discount = discount
        self._reward_clip = reward_clip or np.inf
        self._life_loss_terminates = life_loss_terminates
        shape = (num_environments, spec.slots)
        self._position = np.zeros(num_environments, np.int64) if first_slot is None else first_slot.astype(np.int64)
        self._frames = np.zeros((*shape, *spec.frame_shape), spec.frame_dtype)
        dtypes = (np.int32, np.float32, np.float32, bool, np.float32, bool, bool)
        self._slots = Slots(*(np.zeros(shape, dtype) for dtype in dtypes))

    def add(self, step: Step, action: np.ndarray, q_taken: np.ndarray, q_max: np.ndarray) -> list[Segment]:
        """Takes what environments returned and the policy's answer to it; returns the segments that became full.

        `action` int32[A], `q_taken` = q(s, action) and `q_max` = max_a q(s, a), float32[A].
        """
        self._write_outcomes(step)
        segments = []
        for row in np.flatnonzero(step.first):
            segments += self._write_initial_stack(step.env_id[row], step.observation[row, :-1])
        at = step.env_id, self._position[step.env_id]
        self._frames[at] = step.observation[:, -1]
        self._slots.action[at] = action
        self._slots.q_taken[at] = q_taken
        self._slots.q_max[at] = q_max
        self._slots.acted[at] = ~(step.terminated | step.truncated)
        return segments + self._advance(step.env_id)

    def _write_outcomes(self, step: Step) -> None:
        """Writes what the actions before have led to, where they were not ignored by a reset."""
        acted = ~step.first
        terminal = step.terminated | (step.life_lost if self._life_loss_terminates else False)
        at = step.env_id[acted], self._position[step.env_id[acted]] - 1
        self._slots.reward[at] = np.clip(step.reward[acted], -self._reward_clip, self._reward_clip)
        self._slots.terminal[at] = terminal[acted]
        self._slots.last[at] = (terminal | step.truncated)[acted]

    def _write_initial_stack(self, env_id: int, older_frames: np.ndarray) -> list[Segment]:
        segments = []
        for frame in older_frames:
            self._frames[env_id, self._position[env_id]] = frame
            self._slots.acted[env_id, self._position[env_id]] = False
            segments += self._advance(np.array([env_id]))
        return segments

    def _advance(self, env_id: np.ndarray) -> list[Segment]:
        self._position[env_id] += 1
        full = env_id[self._position[env_id] == self._spec.slots]
        return [segment for i in full if (segment := self._cut(i)) is not None]

    def _cut(self, env_id: int) -> Segment | None:
        """Returns the full segment of an environment (None if no transition starts in it) and keeps the overlap."""
        columns = n_step_columns(Slots(*(array[env_id] for array in self._slots)), self._spec, self._discount)
        segment = Segment(self._frames[env_id].copy(), columns) if columns.priority.any() else None
        overlap = self._spec.overlap
        for array in (self._frames, *self._slots):
            array[env_id, :overlap] = array[env_id, -overlap:].copy()  # a copy, as the two may share slots
        self._position[env_id] = overlap
        return segment


def spread_first_slots(spec: SegmentSpec, num_environments: int) -> np.ndarray:
    """Returns int64[E], first slots with which the environments' segments become full one after the other.

    All at once they would reach the replay in bursts, and their frames, 100 MB of 256 environments, fresh memory: that
    takes 9 to 12 us a step instead of 3 to 4 at 84x84.
    """
    return np.arange(num_environments) * spec.max_transitions // num_environments


def n_step_columns(slots: Slots, spec: SegmentSpec, discount: float) -> SegmentColumns:
    """Returns the transitions that start in a full segment, given its slots [L].

    A transition sums rewards over k <= n steps: n, or as many as are left until the return ends (`last`). Its discount
    is gamma^k, or 0 if it ends by termination (`terminal`); a time limit keeps it, so the truncated episode bootstraps
    from its last observation.
    """
    stop = spec.slots - spec.n_step
    running = slots.acted[:stop].copy()
    running[: spec.frame_stack - 1] = False  # the window would begin before the segment: the one before has these
    starts = running.copy()
    n_step_return = np.zeros(stop)
    remaining = starts.astype(np.float64)  # discount of whatever comes next
    k = np.zeros(stop, np.uint8)
    for step in range(spec.n_step):
        at = slice(step, step + stop)
        n_step_return += np.where(running, remaining * slots.reward[at], 0)
        remaining *= np.where(running, discount * ~slots.terminal[at], 1)
        k += running
        running &= ~slots.last[at]
    q_bootstrap = slots.q_max[np.arange(stop) + k]
    priority = initial_priority(n_step_return, remaining, slots.q_taken[:stop], q_bootstrap)
    dtypes = (np.float32, np.float32, np.float32, np.int32, np.uint8)
    columns = SegmentColumns(*(np.zeros(spec.slots, dtype) for dtype in dtypes))  # the last n slots start nothing
    columns.priority[:stop] = np.where(starts, priority, 0)
    columns.n_step_return[:stop] = n_step_return
    columns.discount[:stop] = remaining
    columns.action[:stop] = np.where(starts, slots.action[:stop], 0)
    columns.bootstrap_offset[:stop] = k
    return columns
