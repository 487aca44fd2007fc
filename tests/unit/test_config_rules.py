"""Keys that must fit each other: what does not is refused with the values as they are typed."""

from __future__ import annotations

import contextlib

import pytest

from apex_jax.config import ActorConfig, AddressConfig, Config, EnvironmentConfig, NetworkConfig
from apex_jax.config.load import load
from apex_jax.config.rules import check
from apex_jax.environments.environment import segment_spec
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS
from apex_jax.segment_codec import max_slots


@pytest.mark.parametrize(("file", "settings", "parts"), [
    ("catch.yaml", ["run_directory=~/runs/x"], ["run_directory=~/runs/x", "in place of ~"]),
    ("paper.yaml", ["network.channels=[32,64]"],
     ["network.channels=[32, 64]", "network.kernel_sizes=[8, 4, 3]", "network.strides=[4, 2, 1]"]),
    ("atari.yaml", ["actor.segment_slots=4096", "environment.frame_size=210"],
     ["actor.segment_slots=4096", "at most 757", "environment.frame_size=210", "32 MiB"]),
])  # fmt: skip
def test_setting_that_does_not_fit_the_others_is_refused_with_their_values(
    file: str, settings: list[str], parts: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        load(CONFIGS / file, settings)
    assert [part for part in parts if part not in str(caught.value)] == []


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


@pytest.mark.parametrize("servers", [2, 3, 4])
def test_devices_that_do_not_divide_batch_and_servers_are_refused(servers: int) -> None:
    settings = [f"replay.servers={servers}", f"learner.batch_size={510 if servers == 4 else 512}"]
    with pytest.raises(UsageError, match=rf"learner\.devices=4: .*{settings[0]} and {settings[1]}"):
        load(None, ["learner.devices=4", *settings])
    load(None, ["learner.devices=4", "replay.servers=8"])
    load(None, ["learner.devices=0", *settings])  # the learner finds out


TWO = ["replay.servers=2", "addresses.experience=[tcp://a:1,tcp://b:1]", "addresses.sampling=[tcp://a:2,tcp://b:2]"]


def test_several_replay_servers_have_a_list_of_addresses_or_each_its_own() -> None:
    assert load(None, TWO).addresses.experience == ("tcp://a:1", "tcp://b:1")
    own = load(None, ["replay.servers=2", "replay.index=1", "addresses.experience=tcp://*:1"])
    assert own.addresses.experience == ("tcp://*:1",)


@pytest.mark.parametrize(("settings", "words"), [
    (["addresses.sampling=[tcp://a:2,tcp://b:2]"], r"one entry for each of replay\.servers=1"),
    ([*TWO, "addresses.sampling=[tcp://a:1,tcp://b:2]"], "is used twice"),
    ([*TWO, "addresses.sampling=[tcp://a:2,b:2]"], "must start with tcp://"),
    ([*TWO, "addresses.sampling=[]"], "must have one entry"),
    ([*TWO, "replay.index=2"], r"replay\.index=2: must be 0 to 1, with replay\.servers=2"),
    ([*TWO, "replay.columns=x:int8"], r"replay\.servers=2: .*replay\.columns"),
    (["replay.servers=40", "actor.processes=1"], r"replay\.servers=40: must be at most 32"),
    ([*TWO, "replay.capacity_transitions=100", "replay.min_size_to_sample=1"], r"actor\.segment_slots=64 x replay"),
])  # fmt: skip
def test_mistake_with_several_replay_servers_is_one_line(settings: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load(None, settings)
    assert str(caught.value).isprintable()
