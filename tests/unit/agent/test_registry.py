"""An algorithm is chosen by its name or by the actions of the environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.registry import ALGORITHMS, Entry, make_algorithm, resolved
from apex_jax.config import Config
from apex_jax.host.errors import UsageError
from apex_jax.types import ActionSpec
from tests.rigs.agents import CONTINUOUS
from tests.rigs.links import SPEC


@pytest.mark.parametrize(("name", "action", "allowed"), [
    ("ppo", SPEC.action, "auto, dqn"), ("ppo", CONTINUOUS, "auto, dpg"), ("dpg", SPEC.action, "auto, dqn"),
    ("dqn", CONTINUOUS, "auto, dpg"),
])  # fmt: skip
def test_algorithm_without_the_actions_of_the_task_is_refused_with_the_right_ones(
    name: str, action: ActionSpec, allowed: str
) -> None:
    config = Config()
    config = config.replace(algorithm=replace(config.algorithm, name=name))
    with pytest.raises(UsageError, match=rf"^algorithm\.name={name}: .*Pong-v5.* {allowed}, MODULE:FUNCTION$"):
        make_algorithm(config, SPEC._replace(action=action))


@pytest.mark.parametrize("name", ["auto", "dpg"])
@pytest.mark.parametrize(("setting", "value"), [("munchausen", True), ("value_rescaling", True), ("quantiles", 8)])
def test_option_of_dqn_is_refused_with_dpg(name: str, setting: str, value: Any) -> None:
    config = Config()
    config = config.replace(algorithm=replace(config.algorithm, name=name, **{setting: value}))
    with pytest.raises(UsageError, match=rf"^algorithm\.{setting}=\w+: "):
        make_algorithm(config, SPEC._replace(action=CONTINUOUS))


def test_auto_is_the_algorithm_for_the_actions_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(name: str) -> Callable[..., Any]:
        return lambda *_: Algorithm(*cast(Any, [name] * 5))

    monkeypatch.setitem(ALGORITHMS, "dqn", Entry(named("dqn"), "int32"))
    monkeypatch.setitem(ALGORITHMS, "dpg", Entry(named("dpg"), "float32"))
    chosen: list[Any] = [
        make_algorithm(Config(), SPEC._replace(action=action)).init for action in (SPEC.action, CONTINUOUS)
    ]
    assert chosen == ["dqn", "dpg"]
    assert resolved(Config(), SPEC).algorithm.name == "dqn"


def test_runs_that_differ_in_seed_and_learning_rate_share_their_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()

    def make(*arguments: Any) -> Algorithm:
        made.append(arguments)
        return Algorithm(*cast(Any, [lambda *arguments: arguments[-1]] * 5))

    monkeypatch.setitem(ALGORITHMS, "dqn", Entry(make, "int32"))

    def step_size(learning_rate: float, **settings: Any) -> Any:
        config = Config(learner=replace(Config().learner, learning_rate=learning_rate, **settings), seed=len(made))
        algorithm: Any = make_algorithm(config, SPEC)
        return algorithm.update(None, None, None, None, 0.5)

    assert (step_size(0.5), step_size(0.25)) == (0.25, 0.125)
    assert [config.learner.learning_rate for config, *_ in made] == [1.0]
    step_size(0.25, optimizer="adam")
    assert len(made) == 2
