"""What `Config` derives from its keys, that each is documented with an allowed default, and which fit each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from envpool.registration import registry

from apex_jax.config import ActorConfig, Config, EnvironmentConfig, LearnerConfig
from apex_jax.config.load import SETTINGS, Setting, load
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_key_is_documented_and_has_an_allowed_default(setting: Setting) -> None:
    key, default = setting.key, setting.default
    assert len(key.text) > 5
    if key.choices:
        assert default in key.choices
    if key.low is not None and key.high is not None:
        numbers = default if isinstance(default, tuple) else (default,)
        assert all(key.low <= number <= key.high for number in numbers)


def test_directory_is_named_after_game_and_seed_unless_it_is_given() -> None:
    config = Config(seed=3, environment=EnvironmentConfig(task="Boxing-v5"))
    assert config.directory == "runs/Boxing-v5-3"
    assert config.replace(run_directory="elsewhere").directory == "elsewhere"


def test_directory_and_compatibility_of_items_follow_their_columns_and_not_the_game() -> None:
    config = load(None, ["replay.columns=x:int8, y:float32[2]"])
    assert config.directory == "runs/replay-1"
    assert config.compatibility_key == "columns=x:int8,y:float32[2] segment_slots=64"
    assert load(None, ["replay.columns=x:int8,y:float32[2]"]).compatibility_key == config.compatibility_key


def test_ladder_is_as_long_as_all_environments_of_this_machine_unless_the_fleet_has_more() -> None:
    config = Config(actor=ActorConfig(processes=3, environments=8))
    assert config.ladder_size == 24
    assert config.replace(actor=ActorConfig(processes=3, environments=8, ladder_size=360)).ladder_size == 360
    fleet = Config(actor=ActorConfig(environments=8))  # in which no local run chooses actor.processes
    assert fleet.ladder_size == 8


def test_atari_games_are_distinguished_from_gym_mujoco_by_their_names_alone() -> None:
    mujoco = "Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum InvertedPendulum Pusher Reacher"
    mujoco_v5 = {f"{name}-v5" for name in [*mujoco.split(), "Swimmer", "Walker2d"]}
    atari = {name for name, (module, *_) in registry.specs.items() if module == "envpool.atari"}
    assert len(atari) > 100
    assert {name for name in registry.specs if name.endswith("-v5")} == atari | mujoco_v5
    assert {name for name in registry.specs if EnvironmentConfig(task=name).is_atari} == atari


@pytest.mark.parametrize(
    ("batch_size", "asked", "on_cpu", "updates"),
    [(32, 0, True, 8), (1, 0, True, 8), (64, 0, True, 4), (512, 0, True, 1), (512, 0, False, 8), (512, 3, True, 3)],
)
def test_number_of_updates_per_call_is_configured_or_chosen_for_the_device(
    batch_size: int, asked: int, on_cpu: bool, updates: int
) -> None:
    config = LearnerConfig(batch_size=batch_size, updates_per_call=asked)
    assert config.updates_of_a_call(on_cpu) == updates


def test_by_default_a_run_stays_on_its_machine() -> None:
    config = Config()
    links = [getattr(config.addresses, link) for link in ("experience", "sampling", "weights")]
    assert all(address.startswith("tcp://127.0.0.1:") for address in links)
    assert len(set(links)) == len(links)
    assert config.addresses.status == config.storage.url == config.security.keys == ""


@pytest.mark.parametrize(("settings", "atoms"), [
    ((), 51), (("environment.task=CartPole-v1",), 51), (("environment.task=gymnasium:CartPole-v1",), 51),
    (("environment.task=Acrobot-v1",), 0), (("environment.task=gymnasium:a:CartPole-v1",), 0),
    (("network.name=a:B",), 0), (("algorithm.name=a:b",), 0), (("algorithm.atoms=9", "algorithm.name=a:b"), 9),
])  # fmt: skip
def test_atoms_of_a_file_are_for_its_task_network_and_algorithm(settings: tuple[str, ...], atoms: int) -> None:
    assert load(CONFIGS / "cartpole.yaml", settings).algorithm.atoms == atoms


# Keys that must fit each other ----------------------------------------------------------------------------------


def test_items_fill_all_but_one_slot_of_a_segment_whatever_the_game_stacks() -> None:
    settings = ["replay.columns=x:int8", "replay.capacity_transitions=180", "actor.segment_slots=64"]
    load(None, [*settings, "replay.min_size_to_sample=126"])
    with pytest.raises(UsageError, match="min_size_to_sample=127: must be at most 126"):
        load(None, [*settings, "replay.min_size_to_sample=127"])
    load(None, [*settings, "replay.min_size_to_sample=1", "environment.frame_size=204", "actor.segment_slots=180"])


def test_files_of_earlier_releases_are_read_if_they_had_one_replay_server_and_one_device(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    lines = "replay: {servers: 1, index: 0}\nlearner: {devices: 1}\naddresses: {experience: [tcp://127.0.0.1:1]}\n"
    file.write_text(lines)
    assert load(file).addresses.experience == "tcp://127.0.0.1:1"
    for setting in ("replay.servers=2", "replay.index=1", "learner.devices=0", "algorithm.value_rescaling=true"):
        with pytest.raises(UsageError, match=rf"{setting}: must be (0|1|false), or left out: nothing else is possible"):
            load(None, [setting])
    with pytest.raises(UsageError, match=r"addresses\.sampling=.*must be text"):
        load(None, ["addresses.sampling=[tcp://a:2,tcp://b:2]"])
