"""How much each of the fleet's environments explores."""

from __future__ import annotations

import numpy as np


def epsilon_ladder(size: int, base: float, exponent: float) -> np.ndarray:
    """Returns the exploration rate of each environment of the fleet, fixed for the run: float32[size], decreasing.

    epsilon_i = base^(1 + exponent i / (N - 1)) for i = 0..N-1, with N = size; a fleet of one environment gets `base`.
    (Horgan et al. 2018, section 4.1: base 0.4, exponent 7; there i counts actors of one environment each.)
    """
    position = np.arange(size) / max(1, size - 1)
    return (base ** (1 + exponent * position)).astype(np.float32)


def noise_ladder(size: int, largest: float, smallest: float) -> np.ndarray:
    """Returns the noise scale of each environment of the fleet, fixed for the run: float32[size], decreasing.

    sigma_i = largest (smallest / largest)^(i / (N - 1)) for i = 0..N-1, with N = size; one environment gets `largest`.
    The counterpart of `epsilon_ladder` for continuous actions. If both are 0.3, all noise is as in Ape-X DPG.
    """
    position = np.arange(size) / max(1, size - 1)
    return (largest * (smallest / largest) ** position).astype(np.float32)


def choose_ladder_indices(occupants: np.ndarray, count: int) -> np.ndarray:
    """Returns `count` ladder indices for a new actor: int32[count], ascending.

    `occupants`: int[N], the number of live environments at each index. The least occupied indices are chosen, evenly
    spread over the ladder, so that the first actor alone already covers all exploration rates. Once the ladder is full,
    actors share indices.
    """
    occupants = occupants.copy()
    chosen: list[np.ndarray] = []
    while count > 0:
        lowest = occupants.min()
        free = np.flatnonzero(occupants == lowest)
        turns_until_level = occupants[occupants > lowest].min(initial=lowest + count) - lowest
        if turns := min(turns_until_level, count // len(free)):  # all in one step, as there may be thousands
            occupants[free] += turns
            chosen.append(np.repeat(free, turns))
            count -= turns * len(free)
        else:
            places = np.linspace(0, len(free) - 1, count).round().astype(int) if count > 1 else [len(free) // 2]
            chosen.append(free[places])
            count = 0
    return np.sort(np.concatenate(chosen)).astype(np.int32)
