"""An algorithm is chosen by its name, or by the actions of the environment."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from apex_jax.agent.registry import ALGORITHMS, Entry, make_algorithm, resolved
from apex_jax.config import Config
from apex_jax.environments.environment import segment_spec
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS
from apex_jax.settings import load
from apex_jax.types import ActionSpec
from tests.rigs.agents import CONTINUOUS
from tests.rigs.links import SPEC


@pytest.mark.parametrize(
    ("name", "action"),
    [("ppo", ActionSpec.discrete(2)), ("ppo", CONTINUOUS), ("dpg", ActionSpec.discrete(2)), ("dqn", CONTINUOUS)],
)
def test_algorithm_without_the_actions_of_the_task_is_refused_with_the_right_ones(
    name: str, action: ActionSpec
) -> None:
    allowed = ", ".join(["auto", *(known for known, entry in ALGORITHMS.items() if entry.action_dtype == action.dtype)])
    config = Config()
    config = config.replace(algorithm=replace(config.algorithm, name=name))
    with pytest.raises(UsageError, match=rf"^algorithm\.name={name}: for the actions of Pong-v5 .* one of {allowed}$"):
        make_algorithm(config, SPEC._replace(action=action))


@pytest.mark.parametrize(
    ("file", "task", "name", "allowed"),
    [("walker.yaml", "WalkerWalk-v1", "dqn", "auto, dpg"), ("pong_cpu.yaml", "Pong-v5", "dpg", "auto, dqn")],
)
def test_real_task_with_an_algorithm_for_other_actions_is_refused_in_one_line(
    file: str, task: str, name: str, allowed: str
) -> None:
    config = load(CONFIGS / file, [f"algorithm.name={name}"])
    error = f"algorithm.name={name}: for the actions of {task} it must be one of {allowed}"
    with pytest.raises(UsageError, match=f"^{re.escape(error)}$"):
        make_algorithm(config, segment_spec(config))


@pytest.mark.parametrize("name", ["auto", "dpg"])
@pytest.mark.parametrize(("setting", "value"), [("munchausen", True), ("value_rescaling", True), ("quantiles", 8)])
def test_option_of_dqn_is_refused_with_dpg(name: str, setting: str, value: Any) -> None:
    config = Config()
    config = config.replace(algorithm=replace(config.algorithm, name=name, **{setting: value}))
    with pytest.raises(UsageError, match=rf"^algorithm\.{setting}=\w+: is an option of DQN, not of DPG; leave it out$"):
        make_algorithm(config, SPEC._replace(action=CONTINUOUS))


def test_auto_is_the_algorithm_for_the_actions_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(name: str) -> Callable[..., Any]:
        return lambda *_: name

    monkeypatch.setitem(ALGORITHMS, "dqn", Entry(named("dqn"), "int32"))
    monkeypatch.setitem(ALGORITHMS, "dpg", Entry(named("dpg"), "float32"))
    chosen: list[Any] = [make_algorithm(Config(), SPEC._replace(action=action)) for action in (SPEC.action, CONTINUOUS)]
    assert chosen == ["dqn", "dpg"]
    assert resolved(Config(), SPEC).algorithm.name == "dqn"
