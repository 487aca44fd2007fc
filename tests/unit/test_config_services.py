"""The groups about processes and copies: by default, a run stays on its machine."""

from __future__ import annotations

from dataclasses import asdict

from apex_jax.config import Config
from apex_jax.config_services import AddressConfig, SecurityConfig, StorageConfig


def test_by_default_a_run_stays_on_its_machine() -> None:
    config = Config()
    links = [address for name, address in asdict(config.addresses).items() if name != "status"]
    assert all(address.startswith("tcp://127.0.0.1:") for address in links)
    assert len(set(links)) == len(links)
    assert config.addresses.status == config.storage.url == config.security.keys == ""
    assert (config.addresses, config.security, config.storage) == (AddressConfig(), SecurityConfig(), StorageConfig())
