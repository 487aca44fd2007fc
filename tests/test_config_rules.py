"""Keys that must fit each other: what does not is refused with the values as they are typed."""

from __future__ import annotations

import re

import pytest

from apex_jax.command_line import CONFIGS, load
from apex_jax.errors import UsageError


@pytest.mark.parametrize(
    ("file", "setting", "error"),
    [
        (
            "catch.yaml",
            "run_directory=~/runs/x",
            "run_directory=~/runs/x: nothing is looked up or evaluated; write the path itself in place of ~",
        ),
        (
            "paper.yaml",
            "network.channels=[32,64]",
            "network.channels=[32, 64]: must have as many entries as network.kernel_sizes=[8, 4, 3] and"
            " network.strides=[4, 2, 1]",
        ),
    ],
)
def test_setting_that_does_not_fit_the_others_is_refused(file: str, setting: str, error: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(error)}$"):
        load(CONFIGS / file, [setting])
