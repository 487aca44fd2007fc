"""Keys that must fit each other: what does not is refused with the values as they are typed."""

from __future__ import annotations

import contextlib
import re

import pytest

from apex_jax.config import ActorConfig, AddressConfig, Config, EnvironmentConfig, NetworkConfig
from apex_jax.config_rules import check
from apex_jax.environments.environment import segment_spec
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS
from apex_jax.segment_codec import max_slots
from apex_jax.settings import load


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
        (
            "atari.yaml",
            "actor.segment_slots=4096 environment.frame_size=210",
            "actor.segment_slots=4096: must be at most 757, with environment.frame_size=210, because a segment is sent"
            " in one message of at most 32 MiB; lower either",
        ),
    ],
)
def test_setting_that_does_not_fit_the_others_is_refused(file: str, setting: str, error: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(error)}$"):
        load(CONFIGS / file, setting.split(" "))


@pytest.mark.parametrize("frame_size", [91, 128, 210])
def test_largest_segment_of_a_frame_size_can_just_be_sent(frame_size: int) -> None:
    config = Config(environment=EnvironmentConfig(frame_size=frame_size), network=NetworkConfig(unseen_pixels=True))
    most = max_slots(segment_spec(config))
    for slots, is_right in ((most, True), (most + 1, False)):
        candidate = config.replace(actor=ActorConfig(segment_slots=slots))
        with contextlib.nullcontext() if is_right else pytest.raises(UsageError, match=f"must be at most {most}, with"):
            check(candidate)


def test_items_fill_all_but_one_slot_of_a_segment_whatever_the_game_stacks() -> None:
    settings = ["replay.columns=x:int8", "replay.capacity_transitions=180", "actor.segment_slots=64"]
    load(None, [*settings, "replay.min_size_to_sample=126"])
    with pytest.raises(UsageError, match="min_size_to_sample=127: must be at most 126"):
        load(None, [*settings, "replay.min_size_to_sample=127"])
    load(None, [*settings, "replay.min_size_to_sample=1", "environment.frame_size=204", "actor.segment_slots=180"])


@pytest.mark.parametrize("address", ["http://127.0.0.1:80", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:5550"])
def test_status_address_is_checked_like_the_others(address: str) -> None:
    with pytest.raises(UsageError, match=r"addresses\.\w+=.*must|is used twice"):
        check(Config(addresses=AddressConfig(status=address)))


@pytest.mark.parametrize(
    "settings", ["replay.servers=3", "replay.servers=4 learner.batch_size=510", "replay.servers=2"]
)
def test_devices_that_do_not_divide_batch_and_servers_are_refused(settings: str) -> None:
    with pytest.raises(
        UsageError, match=r"learner\.devices=4: must divide replay\.servers=. and learner\.batch_size=5"
    ):
        load(None, ["learner.devices=4", *settings.split()])
    load(None, ["learner.devices=4", "replay.servers=8"])
    load(None, ["learner.devices=0", *settings.split()])  # the learner finds out


TWO = ["replay.servers=2", "addresses.experience=[tcp://a:1,tcp://b:1]", "addresses.sampling=[tcp://a:2,tcp://b:2]"]


def test_several_replay_servers_have_a_list_of_addresses_or_each_its_own() -> None:
    assert load(None, TWO).addresses.experience == ("tcp://a:1", "tcp://b:1")
    own = load(None, ["replay.servers=2", "replay.index=1", "addresses.experience=tcp://*:1"])
    assert own.addresses.experience == ("tcp://*:1",)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["addresses.sampling=[tcp://a:2,tcp://b:2]"], r"must have one entry for each of replay\.servers=1"),
        ([*TWO, "addresses.sampling=[tcp://a:1,tcp://b:2]"], "is used twice"),
        ([*TWO, "addresses.sampling=[tcp://a:2,b:2]"], "must start with tcp://"),
        ([*TWO, "addresses.sampling=[]"], "must have one entry"),
        ([*TWO, "replay.index=2"], r"replay\.index=2: must be 0 to 1, with replay\.servers=2"),
        ([*TWO, "replay.columns=x:int8"], r"replay\.servers=2: must be 1 with replay\.columns"),
        (
            ["replay.servers=40", "actor.processes=1"],
            r"replay\.servers=40: must be at most 32, the environments of the fleet",
        ),
        ([*TWO, "replay.capacity_transitions=100", "replay.min_size_to_sample=1"], r"actor\.segment_slots=64 x replay"),
    ],
)
def test_mistake_with_several_replay_servers_is_one_line(settings: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        load(None, settings)
    assert str(caught.value).isprintable()
