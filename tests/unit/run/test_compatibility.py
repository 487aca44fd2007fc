"""Which settings differ between two processes, or a process and a file, and the text that describes them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_jax.config.command_line import parse
from apex_jax.run.identity import KEYS, MAX_CHARACTERS, describe_differences, differences

DEFAULT = parse([]).config


@pytest.mark.parametrize(("override", "key", "values"), [
    ("environment.task=Boxing-v5", "environment.task", ("Pong-v5", "Boxing-v5")),
    ("algorithm.discount=0.5", "algorithm.discount", ("0.99", "0.5")),
    ("actor.segment_slots=32", "actor.segment_slots", (str(DEFAULT.actor.segment_slots), "32")),
])  # fmt: skip
def test_setting_that_all_roles_share_is_found_with_both_values(
    override: str, key: str, values: tuple[str, str]
) -> None:
    other = parse([override]).config
    assert differences(DEFAULT.compatibility_key, other.compatibility_key) == {key: values}
    text = describe_differences(DEFAULT.compatibility_key, other.compatibility_key)
    assert text == f"{key}: was {values[0]}, now {values[1]}"


@pytest.mark.parametrize(
    "override", ["seed=7", "learner.learning_rate=1e-5", "actor.environments=4", "total_minutes=9"]
)
def test_setting_that_a_run_may_change_is_no_difference(override: str) -> None:
    other = parse([override]).config
    assert differences(DEFAULT.checkpoint_compatibility_key, other.checkpoint_compatibility_key) == {}


def test_optimizer_is_compared_for_checkpoints_alone() -> None:
    other = parse(["learner.optimizer=rmsprop"]).config
    assert other.weights_compatibility_key == DEFAULT.weights_compatibility_key
    found = differences(DEFAULT.checkpoint_compatibility_key, other.checkpoint_compatibility_key)
    assert list(found) == ["learner.optimizer"]


def test_named_algorithm_and_its_settings_are_compared_for_weights_and_checkpoints() -> None:
    one = parse(["algorithm.name=dqn"]).config
    other = parse(["algorithm.name=mine:make", "algorithm.settings={x: 1}"]).config
    changes = {"algorithm.name": ("dqn", "mine:make"), "algorithm.settings": ("{}", '{"x":1}')}
    assert one.compatibility_key == other.compatibility_key
    for key in ("weights_compatibility_key", "checkpoint_compatibility_key"):
        assert differences(getattr(one, key), getattr(other, key)) == changes
    assert differences(DEFAULT.checkpoint_compatibility_key, one.checkpoint_compatibility_key) == {}, "auto may be dqn"


def test_key_that_an_earlier_release_did_not_have_is_no_difference() -> None:
    assert differences("task=Pong-v5", "task=Pong-v5 n_step=3") == {}


@pytest.mark.parametrize("option", [
    *("network.hidden_units=64", "network.dueling=false", "network.layer_norm=true", "network.torso=impala"),
    *("algorithm.quantiles=8", "algorithm.munchausen=true", "algorithm.atoms=51", "network.name=mine:Net"),
])  # fmt: skip
def test_option_of_the_network_is_compared_for_weights_and_checkpoints(option: str) -> None:
    plain, other = parse(["--config", "pong_cpu"]).config, parse(["--config", "pong_cpu", option]).config
    assert differences(plain.compatibility_key, other.compatibility_key) == {}, "actors and replay do not see it"
    name, _, value = option.partition("=")
    for key in ("weights_compatibility_key", "checkpoint_compatibility_key"):
        found = differences(getattr(plain, key), getattr(other, key))
        assert {name: now for name, (_, now) in found.items()} == {name: value}


@settings(max_examples=25)
@given(before=st.text(), now=st.text())
def test_any_text_of_a_peer_is_shown_on_one_line_of_limited_length(before: str, now: str) -> None:
    text = describe_differences(before, now)
    assert text.isprintable()
    assert len(text) <= MAX_CHARACTERS + 3
    assert set(differences(before, now)) <= set(KEYS)
