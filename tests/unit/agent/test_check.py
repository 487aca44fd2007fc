"""An algorithm is chosen by name or by the actions; one of a user, or a network, is checked before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.registry import ALGORITHMS, Entry, check_user_code, make_algorithm, resolved
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.host.errors import UsageError
from apex_jax.run.metrics import is_tag
from apex_jax.types import ActionSpec
from tests.rigs.agents import CONTINUOUS
from tests.rigs.links import SPEC

Checked = Callable[..., None]

NETWORK = """
import flax.linen as nn
class Network(nn.Module):
    config: object
    num_actions: int
    dtype: object
    @nn.compact
    def __call__(self, x):
        return {result}
class Narrow(nn.Module):
    config: object
    num_actions: int
"""
ALGORITHM = """
from apex_jax.agent.dqn import make_dqn
def make(config, spec, dtype):
    agent = make_dqn(config, spec, dtype)
    return {result}
def takes_nothing():
    pass
"""
RESIDUAL = "network.name=examples.residual_network:ResidualNetwork"
RIGHT = "nn.Dense(self.num_actions)(x.reshape(len(x), -1))"
UPDATE = "agent._replace(update=lambda *given: (given[0], agent.update(*given)[1]._replace({changes})))"


def config_of(*settings: str) -> Config:
    return load("configs/cartpole.yaml", settings)


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Returns a function that writes the module `mine` and checks a configuration that names a part of it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def check(source: str, *settings: str) -> None:
        (tmp_path / "mine.py").write_text(source)
        config = config_of(*settings)
        check_user_code(config, describe(config).spec, is_tag)

    return check


@pytest.mark.parametrize(("name", "result", "message"), [
    ("Network", "nn.Dense(7)(x.reshape(len(x), -1))", r"greedy returned q-values float32\[3,7\], .*line 3\)"),
    ("Network", "self.missing", r"AttributeError: .*missing.*mine.py, line 9\)"),
    ("Network", "x.reshape(-1, 5)", r"TypeError: .*mine.py, line 9\)"),
    ("Narrow", RIGHT, r"TypeError: .*arguments.*mine.py, line 10\)"),  # not made with the arguments of a q-network
])  # fmt: skip
def test_network_that_cannot_be_made_or_has_wrong_shapes_is_refused(
    checked: Checked, name: str, result: str, message: str
) -> None:
    with pytest.raises(UsageError, match=rf"^network.name=mine:{name}: {message}$"):
        checked(NETWORK.format(result=result), f"network.name=mine:{name}")


@pytest.mark.parametrize(("result", "message"), [
    ("None", r"TypeError: returned NoneType, not an Algorithm \(.*mine.py, line 3\)"),
    ("1 / 0", r"ZeroDivisionError: .*mine.py, line 5\)"),
    ("agent._replace(exploration=lambda size: [0.1])", r"exploration returned float64\[1\], must be float32\[3\] .*"),
    (UPDATE.format(changes="priorities=given[3][0]"), r"update returned priorities float32\[3\], must be .*"),
    (UPDATE.format(changes="metrics={'own/x': given[3]}"), r"update returned the metric own/x float32\[2,3\], must .*"),
    (UPDATE.format(changes="metrics={'bonus': given[3][:, 0]}"), r"update .* metric bonus, must be own/bonus .*"),
    ("agent._replace(update=lambda *given: (1.0, agent.update(*given)[1]))", r"update returned the state .*"),
    ("agent._replace(act=lambda p, x, *rest: agent.act(p, x[:2], *rest))", r"\w+Error: .*mine.py, line 5\)"),
])  # fmt: skip
def test_algorithm_whose_functions_break_their_promise_is_refused(checked: Checked, result: str, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^algorithm.name=mine:make: {message}$"):
        checked(ALGORITHM.format(result=result), "algorithm.name=mine:make")


@pytest.mark.parametrize(("name", "source", "message"), [
    ("mine:other", ALGORITHM, "mine.py has no function or class other; "),
    ("nowhere:make", ALGORITHM, "there is no module nowhere; start in its folder"),
    ("mine:make", "import nothing_there", r"ModuleNotFoundError: .*nothing_there.*mine.py, line 1\)"),
    ("mine:make", "\n\ndef make(:", r"SyntaxError: .*mine.py, line 3\)"),
    ("mine:takes_nothing", ALGORITHM, r"TypeError: .*takes_nothing.*mine.py, line 6\)"),
])  # fmt: skip
def test_code_that_cannot_be_imported_or_called_is_refused(
    checked: Checked, name: str, source: str, message: str
) -> None:
    with pytest.raises(UsageError, match=f"^algorithm.name={name}: .*{message}"):
        checked(source.replace("{result}", "agent"), f"algorithm.name={name}")


def test_dpg_takes_two_networks() -> None:
    config = load("configs/pendulum.yaml", ["network.name=apex_jax.agent.networks:Policy,Critic"])
    check_user_code(config, describe(config).spec)
    config = load("configs/pendulum.yaml", ["network.name=apex_jax.agent.networks:Policy"])
    with pytest.raises(UsageError, match="must be MODULE:CLASS,CLASS, in place of Policy,Critic"):
        check_user_code(config, describe(config).spec)


@pytest.mark.parametrize("settings", [
    ("algorithm.name=examples.hl_gauss:make", "algorithm.settings={bins: 11}"),
    ("algorithm.name=examples.soft_q_learning:make",),
    ("algorithm.name=examples.random_network_distillation:make", RESIDUAL),
])  # fmt: skip
def test_examples_pass(settings: tuple[str, ...]) -> None:
    config = config_of(*settings)
    check_user_code(config, describe(config).spec)


# Its choice -----------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize(("setting", "value"), [("munchausen", True), ("quantiles", 8), ("atoms", 9)])
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
