"""Compares the compatibility keys of processes, checkpoints and journals, and describes their differences.

A compatibility key is the text of `Config.compatibility_key`, `Config.weights_compatibility_key` or
`Config.checkpoint_compatibility_key`: `name=value` words separated by spaces.
"""

from __future__ import annotations

from apex_jax.host.errors import printable

_OF_PIXELS = ("torso", "channels", "kernel_sizes", "strides")  # absent for a task without pixels
_OF_VECTORS = ("policy_units", "critic_units", "normalize_observations")  # absent for a task with pixels
NETWORK_KEYS = (
    *(f"network.{name}" for name in (*_OF_PIXELS, "hidden_units", "dueling", "layer_norm", *_OF_VECTORS)),
    "algorithm.twin_critics",
    "algorithm.munchausen",
    "algorithm.value_rescaling",
    "algorithm.quantiles",
)
KEYS = (
    "environment.task",
    "environment.frame_size",
    "environment.frame_stack",
    "environment.frame_skip",
    "actor.segment_slots",
    "algorithm.n_step",
    "algorithm.discount",
    "environment.reward_clip",
    "environment.life_loss_terminates",
    "replay.columns",
    "environment.settings",
    "environment.observation_layout",
    *NETWORK_KEYS,
    "learner.optimizer",
    "algorithm.name",
)
"""A checkpoint is rejected if one of these differs; processes compare all but the last two."""
OFF = {
    "observation_layout": "auto",
    "torso": "convolutions",
    "layer_norm": "false",
    "munchausen": "false",
    "value_rescaling": "false",
    "quantiles": "0",
}
"""The values of options that a text of an earlier release, which does not have them, implies."""
MOST_TOLD = 2_500  # characters: enough for two compatibility keys; their UTF-8 always fits in a `Refusal`


def differences(before: str, now: str) -> dict[str, tuple[str, str]]:
    """Returns the values (before, now) of each key of KEYS that differs between two compatibility keys.

    A key that only one of them has is ignored, unless it is one of OFF: the compatibility keys of earlier releases have
    fewer.
    """
    ours, theirs = _values(now), OFF | _values(before)
    found = {}
    for key in KEYS:
        name = key.rpartition(".")[2]
        if name in ours and name in theirs and ours[name] != theirs[name]:
            found[key] = (theirs[name], ours[name])
    return found


def told(before: str, now: str, was: str = "was", is_now: str = "now") -> str:
    """Returns the keys that differ: `environment.task: was Pong-v5, now Boxing-v5; ...`.

    Returns both whole texts if none of KEYS differs. A text may come from a peer, so both are made printable, which
    can make them four times as long; the result is therefore cut after MOST_TOLD characters.
    """
    found = differences(before, now).items()
    keys = (f"{key}: {was} {printable(old)}, {is_now} {printable(new)}" for key, (old, new) in found)
    text = "; ".join(keys) or f"{was} [{printable(before)}], {is_now} [{printable(now)}]"
    return text if len(text) <= MOST_TOLD else f"{text[:MOST_TOLD]}..."


def _values(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.split(" "))
    return {name: value for name, _, value in pairs}
