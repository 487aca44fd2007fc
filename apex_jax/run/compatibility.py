"""Compares the compatibility keys of processes, checkpoints and journals, and describes their differences.

A compatibility key is the text of `Config.compatibility_key`, `Config.weights_compatibility_key` or
`Config.checkpoint_compatibility_key`: `name=value` words separated by spaces.
"""

from __future__ import annotations

from apex_jax.config.keys import compatibility_name
from apex_jax.config.load import SETTINGS
from apex_jax.host.errors import printable

KEYS = tuple(name for name, setting in SETTINGS.items() if setting.key.scope)
"""A checkpoint is rejected if one of these differs; processes compare those of their scope, see `Key`."""
MAX_CHARACTERS = 2_500  # enough for two compatibility keys; their UTF-8 always fits in a `Refusal`


def differences(before: str, now: str) -> dict[str, tuple[str, str]]:
    """Returns the values (before, now) of each key of KEYS that differs between two compatibility keys.

    A key that only one of them has is ignored: earlier releases have fewer keys.
    """
    ours, theirs = _values(now), _values(before)
    found = {}
    for key in KEYS:
        name = compatibility_name(key)
        if name in ours and name in theirs and ours[name] != theirs[name]:
            found[key] = (theirs[name], ours[name])
    return found


def describe_differences(before: str, now: str, was: str = "was", is_now: str = "now") -> str:
    """Returns the keys that differ: `environment.task: was Pong-v5, now Boxing-v5; ...`.

    Returns both whole texts if none of KEYS differs. A text may come from a peer, so both are made printable, which
    can make them four times as long; the result is therefore cut after MAX_CHARACTERS characters.
    """
    found = differences(before, now).items()
    keys = (f"{key}: {was} {printable(old)}, {is_now} {printable(new)}" for key, (old, new) in found)
    text = "; ".join(keys) or f"{was} [{printable(before)}], {is_now} [{printable(now)}]"
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


def _values(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.split(" "))
    return {name: value for name, _, value in pairs}
