"""A key of the configuration: a dataclass field that carries its help text and limits."""

from __future__ import annotations

import dataclasses

from apex_jax.config_key import Key, key


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of one key."""

    size: int = key(8, "how many there are", "segments", 1, 64)


def test_field_has_the_default_and_carries_text_unit_and_limits() -> None:
    [field] = dataclasses.fields(Group)
    assert Group().size == 8
    assert field.metadata["key"] == Key("how many there are", "segments", 1, 64)
