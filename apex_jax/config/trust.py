"""Settings that name code of the user: a program must not import it only because a run of somebody else names it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from apex_jax.config.key import names_code
from apex_jax.config.keys import Config
from apex_jax.host.errors import UsageError, short_repr


def code_settings(config: Config) -> dict[str, str]:
    """Returns, by key, the settings that make a program import a module, or call it with arguments.

    A program must not do so if only the files of a run, which may be somebody else's, contain the setting.
    """
    environment, found = config.environment, {}
    if environment.has_spaces and (environment.task.count(":") > 1 or environment.settings != "{}"):
        found["environment.task"] = environment.task
    names = {"algorithm.name": config.algorithm.name, "network.name": config.network.name}
    return found | {key: value for key, value in names.items() if names_code(value)}


def check_trusted(
    config: Config, directory: str | os.PathLike[str], given: Mapping[str, Any], groups: tuple[str, ...] = ("",)
) -> None:
    """Raises UsageError if settings of a run name code, and are not in `given`.

    `directory`: of the run, for the message; `given`: the user's settings by key; `groups`: prefixes of keys to check.
    """
    code = {name: value for name, value in code_settings(config).items() if name.startswith(groups)}
    missing = [f"{name}={short_repr(value)}" for name, value in code.items() if given.get(name) != value]
    if missing:
        settings = " ".join(missing)
        what = f"{short_repr(directory)} names {settings}, which would run code with that run's settings"
        raise UsageError(f"{what}; if you trust the run and the code, add {settings} (in Python: code={missing})")
