"""From a YAML file and key=value texts to a checked Config, and back."""

from __future__ import annotations

import dataclasses
import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_jax.config import Config
from apex_jax.config.keys import JsonObject
from apex_jax.config.load import SETTINGS, Setting, load, to_yaml
from apex_jax.config.rules import check
from apex_jax.environments.environment import describe
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS
from apex_jax.replay.rate_limiter import make_limiter
from apex_jax.transport import wire
from apex_jax.transport.messages import ActorHello
from tests.rigs.usage import message, write


def values_of(setting: Setting) -> st.SearchStrategy[Any]:
    low, high = setting.key.low, setting.key.high
    if setting.kind is bool:
        return st.booleans()
    if setting.key.choices:
        return st.sampled_from(setting.key.choices)
    if setting.kind is str:
        return st.text().filter(lambda text: text.isprintable() and "${" not in text and text[:1] != "~")
    if setting.kind is JsonObject:
        text = st.text(max_size=5).filter(lambda text: text.isprintable() and "$" not in text)
        leaves = st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | text
        objects = st.dictionaries(text, st.recursive(leaves, st.lists, max_leaves=3), max_size=3)
        dumped = objects.map(lambda value: json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False))
        return dumped.map(lambda text: JsonObject(text.replace(" ", "\\u0020")))
    if setting.kind == tuple[str, ...]:
        return st.lists(st.sampled_from(["tensorboard", "jsonl", "math"]), unique=True).map(tuple)
    assert low is not None
    assert high is not None
    if setting.kind is float:
        return st.floats(low, high)
    integers = st.integers(int(low), int(high))
    return integers if setting.kind is int else st.lists(integers, max_size=4).map(tuple)


def replaced(config: Config, name: str, value: Any) -> Config:
    group, _, key = name.rpartition(".")
    if not group:
        return dataclasses.replace(config, **{key: value})
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **{key: value})})


def test_override_replaces_the_file_and_the_file_replaces_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 5\nlearner:\n  batch_size: 64\n")
    config = load(path, ["seed=6"])
    assert (config.seed, config.learner.batch_size, config.learner.prefetch_batches) == (6, 64, 16)


@pytest.mark.parametrize(("override", "value"), [
    ("learner.learning_rate=1e-4", 1e-4),
    ("learner.learning_rate=1", 1.0),
    ("total_updates=1e6", 1_000_000),
    ("total_updates=1_000", 1_000),
    ("environment.settings={b: 1.5, a: [x y, null]}", JsonObject('{"a":["x\\u0020y",null],"b":1.5}')),
    ("algorithm.double_q=false", False),
    ("network.channels=[16, 32.0, 64]", (16, 32, 64)),
    ("run_directory=runs/a=b", "runs/a=b"),
    ("run_directory=", ""),
    ("run_directory='7'", "7"),
    ("run_directory=???", "???"),
    ("addresses.weights=ipc:///run/apex/weights", "ipc:///run/apex/weights"),
])  # fmt: skip
def test_value_is_read_as_the_type_of_its_key(override: str, value: object) -> None:
    found = attrgetter(override.partition("=")[0])(load(None, [override]))
    assert found == value
    assert type(found) is type(value)


def test_group_given_as_a_mapping_leaves_its_other_keys() -> None:
    assert load(None, ["learner={batch_size: 64, optimizer: adam}"]).learner == dataclasses.replace(
        Config().learner, batch_size=64, optimizer="adam"
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_file_is_valid_and_unchanged_by_printing_and_loading(path: Path, tmp_path: Path) -> None:
    config = load(path)
    assert load(write(tmp_path, to_yaml(config))) == config
    assert (config.replay.samples_per_insert == 0) == path.stem.startswith("paper")  # a learner without a limit
    make_limiter(config, describe(config).spec)  # neither side waits for the other for ever


def test_paper_file_sends_every_50_transitions_and_has_360_epsilons() -> None:
    config = load(CONFIGS / "paper.yaml")
    assert config.actor.segment_slots - (config.environment.frame_stack - 1 + config.algorithm.n_step) == 50
    assert config.ladder_size == 360
    assert config.learner == dataclasses.replace(
        Config().learner, publish_interval_seconds=2.9, compute_dtype="float32"
    )
    assert (config.replay, config.network) == (Config().replay, Config().network)


def test_printed_defaults_have_every_key_and_load_unchanged(tmp_path: Path) -> None:
    text = to_yaml(Config())
    assert all(f"{name.rpartition('.')[2]}: " in text for name in SETTINGS)
    assert all(setting.meaning in text for setting in SETTINGS.values())
    assert load(write(tmp_path, text)) == Config()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_valid_config_is_unchanged_by_printing_and_loading(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    config = Config()
    for name in data.draw(st.sets(st.sampled_from(sorted(SETTINGS)), max_size=8)):
        changed = replaced(config, name, data.draw(values_of(SETTINGS[name]), label=name))
        try:
            check(changed)
        except UsageError:
            continue
        config = changed
    assert load(write(tmp_path_factory.getbasetemp(), to_yaml(config))) == config


def test_vector_task_needs_no_room_for_convolutions() -> None:
    small = "environment.frame_size=20"
    assert "does not fit" in message("--config", str(CONFIGS / "paper.yaml"), small)
    assert load(CONFIGS / "paper.yaml", [small, "environment.task=CartPole-v1"]).environment.frame_size == 20


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(SETTINGS)) | st.text(max_size=20), value=st.text(max_size=30))
def test_any_override_gives_a_config_or_a_one_line_error(name: str, value: str) -> None:
    text = ""
    try:
        load(None, [f"{name}={value}"])
    except UsageError as error:
        text = str(error)
    assert text.isprintable()


def test_settings_that_all_roles_share_may_be_long_but_fit_into_a_message() -> None:
    config = load(None, ["environment.settings={a: " + 15_000 * "x" + "}"])
    hello = wire.decode(wire.encode(ActorHello(1, config.compatibility_key, 4)))
    assert isinstance(hello, ActorHello)
    assert hello.compatibility_key == config.compatibility_key
    both = [f"{group}.settings={{a: {16_370 * 'x'}}}" for group in ("environment", "algorithm")]
    with pytest.raises(UsageError, match=r"^environment.settings=.*: must be \d+ bytes shorter, to be sent to other"):
        load(None, both)
