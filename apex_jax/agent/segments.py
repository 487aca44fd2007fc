"""Steps of a batch of environments -> segments: self-contained runs of frames with their n-step transitions."""

from __future__ import annotations

import numpy as np

from apex_jax.agent.losses import initial_priority
from apex_jax.types import Segment, SegmentColumns, SegmentSpec


class SegmentBuilder:
    """Writes each environment's frames into slots and cuts a `Segment` whenever `spec.slots` of them are full.

    What a slot holds: the newest frame of an observation, the action chosen on it with its q-values, and then, as the
    next observation arrives, that action's outcome. An episode starts with its whole initial stack (F slots, of which
    only the last starts a transition) and ends with its last observation (which starts none), so the window of F
    frames that ends at any slot is exactly what the environment returned there, and is never patched.
    """

    def __init__(
        self, spec: SegmentSpec, num_environments: int, discount: float, reward_clip: float, life_loss_terminates: bool
    ):
        """`reward_clip`: rewards are clipped to [-reward_clip, reward_clip]; 0 = not at all."""
        self._spec = spec
        self._discount = discount
        self._reward_clip = reward_clip or np.inf
        self._life_loss_terminates = life_loss_terminates
        shape = (num_environments, spec.slots)
        self._position = np.zeros(num_environments, np.int64)
        self._frames = np.zeros((*shape, *spec.frame_shape), spec.frame_dtype)
        self._action = np.zeros(shape, np.int32)
        self._q_taken = np.zeros(shape, np.float32)
        self._q_max = np.zeros(shape, np.float32)
        self._acted = np.zeros(shape, bool)  # an action was taken from here, and counts
        self._reward = np.zeros(shape, np.float32)
        self._terminal = np.zeros(shape, bool)  # that action ended the return: nothing to bootstrap from
        self._last = np.zeros(shape, bool)  # that action ended the return, by termination or time limit

    def add(
        self, env_id: np.ndarray, observation: np.ndarray, reward: np.ndarray, first: np.ndarray, terminated: np.ndarray,
        truncated: np.ndarray, life_lost: np.ndarray, action: np.ndarray, q_taken: np.ndarray, q_max: np.ndarray,
    ) -> list[Segment]:  # fmt: skip
        """Takes what the environments returned and what was then done; returns the segments that became full.

        The first seven are the fields of `environment.Step`; `action` int32[A], `q_taken` = q(s, a) and
        `q_max` = max_a q(s, a), float32[A], are the policy's answer to this observation.
        """
        ends = terminated | (life_lost if self._life_loss_terminates else False)
        self._write_outcomes(env_id[~first], reward[~first], ends[~first], (ends | truncated)[~first])
        segments = []
        for row in np.flatnonzero(first):
            segments += self._write_initial_stack(env_id[row], observation[row, :-1])
        slot = self._position[env_id]
        self._frames[env_id, slot] = observation[:, -1]
        self._action[env_id, slot] = action
        self._q_taken[env_id, slot] = q_taken
        self._q_max[env_id, slot] = q_max
        self._acted[env_id, slot] = ~(terminated | truncated)
        return segments + self._advance(env_id)

    def _write_outcomes(self, env_id: np.ndarray, reward: np.ndarray, terminal: np.ndarray, last: np.ndarray) -> None:
        slot = self._position[env_id] - 1
        self._reward[env_id, slot] = np.clip(reward, -self._reward_clip, self._reward_clip)
        self._terminal[env_id, slot] = terminal
        self._last[env_id, slot] = last

    def _write_initial_stack(self, env_id: int, older_frames: np.ndarray) -> list[Segment]:
        segments = []
        for frame in older_frames:
            self._frames[env_id, self._position[env_id]] = frame
            self._acted[env_id, self._position[env_id]] = False
            segments += self._advance(np.array([env_id]))
        return segments

    def _advance(self, env_id: np.ndarray) -> list[Segment]:
        self._position[env_id] += 1
        full = env_id[self._position[env_id] == self._spec.slots]
        return [segment for i in full if (segment := self._cut(i)) is not None]

    def _cut(self, env_id: int) -> Segment | None:
        """Returns the full segment of an environment (None if no transition starts in it) and keeps the overlap."""
        row = (self._action, self._q_taken, self._q_max, self._acted, self._reward, self._terminal, self._last)
        columns = n_step_columns(*(array[env_id] for array in row), self._spec, self._discount)
        segment = Segment(self._frames[env_id].copy(), columns) if columns.priority.any() else None
        overlap = self._spec.overlap
        for array in (self._frames, *row):
            array[env_id, :overlap] = array[env_id, -overlap:].copy()  # a copy, as the two may share slots
        self._position[env_id] = overlap
        return segment


def n_step_columns(
    action: np.ndarray, q_taken: np.ndarray, q_max: np.ndarray, acted: np.ndarray, reward: np.ndarray,
    terminal: np.ndarray, last: np.ndarray, spec: SegmentSpec, discount: float,
) -> SegmentColumns:  # fmt: skip
    """Returns the transitions that start in a full segment; all arguments are [L], one value a slot.

    A transition sums rewards over k <= n steps: n, or as many as are left until the return ends (`last`). Its discount
    is gamma^k, or 0 if it ends by termination (`terminal`); a time limit keeps it, so the truncated episode bootstraps
    from its last observation.
    """
    stop = spec.slots - spec.n_step
    running = acted[:stop].copy()
    running[: spec.frame_stack - 1] = False  # the window would begin before the segment: the one before has these
    starts = running.copy()
    n_step_return = np.zeros(stop)
    remaining = starts.astype(np.float64)  # discount of whatever comes next
    k = np.zeros(stop, np.uint8)
    for step in range(spec.n_step):
        at = slice(step, step + stop)
        n_step_return += np.where(running, remaining * reward[at], 0)
        remaining *= np.where(running, discount * ~terminal[at], 1)
        k += running
        running &= ~last[at]
    priority = initial_priority(n_step_return, remaining, q_taken[:stop], q_max[np.arange(stop) + k])
    padding = (0, spec.n_step)
    return SegmentColumns(
        priority=np.pad(np.where(starts, priority, 0).astype(np.float32), padding),
        n_step_return=np.pad(n_step_return.astype(np.float32), padding),
        discount=np.pad(remaining.astype(np.float32), padding),
        action=np.pad(np.where(starts, action[:stop], 0).astype(np.int32), padding),
        bootstrap_offset=np.pad(k, padding),
    )
