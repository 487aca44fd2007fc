"""The groups about processes and copies: by default, a run stays on its machine."""

from __future__ import annotations

from apex_jax.config import Config
from apex_jax.config_services import AddressConfig, SecurityConfig, StorageConfig, server_name


def test_by_default_a_run_stays_on_its_machine() -> None:
    config = Config()
    links = [address for link in ("experience", "sampling", "weights") for address in config.addresses.of_link(link)]
    assert all(address.startswith("tcp://127.0.0.1:") for address in links)
    assert len(set(links)) == len(links)
    assert config.addresses.status == config.storage.url == config.security.keys == ""
    assert (config.addresses, config.security, config.storage) == (AddressConfig(), SecurityConfig(), StorageConfig())


def test_replay_server_binds_its_own_address_of_a_list_or_the_only_one() -> None:
    of_all, own = AddressConfig(experience=("ipc://a", "ipc://b")), AddressConfig(experience=("ipc://a",))
    assert [of_all.of_server("experience", index) for index in range(2)] == ["ipc://a", "ipc://b"]
    assert [own.of_server("experience", index) for index in range(2)] == ["ipc://a", "ipc://a"]


def test_first_replay_server_has_the_name_of_the_only_one() -> None:
    assert [server_name(index) for index in range(3)] == ["replay", "replay-1", "replay-2"]
