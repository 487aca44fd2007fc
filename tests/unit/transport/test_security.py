"""Keys are private files; which links they protect, and whose keys a server accepts while its lists change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from apex_jax.config import AddressConfig, Config, SecurityConfig
from apex_jax.host.errors import UsageError
from apex_jax.transport import keys
from apex_jax.transport.security import AllowList, security_of

REMOTE = AddressConfig("tcp://10.0.0.7:5550", "tcp://10.0.0.7:5551", "tcp://10.0.0.8:5552")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A new pair of keys for each role."""
    keys.create(tmp_path / "keys")
    return tmp_path / "keys"


def config_of(directory: Path | str = "", addresses: AddressConfig = REMOTE, insecure: bool = False) -> Config:
    return Config(security=SecurityConfig(str(directory), insecure), addresses=addresses)


# The files ------------------------------------------------------------------------------------------------------


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_each_role_gets_a_key_pair_with_a_private_secret(
    tmp_path: Path, umask: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    before = os.umask(umask)
    try:
        assert keys.run(["create", str(folder)]) == 0
    finally:
        os.umask(before)
    printed = capsys.readouterr().out
    assert mode_of(folder) == 0o700
    assert len(list(folder.iterdir())) == 2 * len(keys.ROLES)
    publics = set()
    for role in keys.ROLES:
        secret, [public] = keys.read_secret(str(folder), role), keys.read_publics(str(folder), role)
        assert zmq.curve_public(secret) == public
        assert mode_of(folder / f"{role}.secret") == 0o600
        assert mode_of(folder / f"{role}.public") == 0o644
        assert role in printed
        assert secret.decode() not in printed
        publics.add(public)
    assert len(publics) == len(keys.ROLES)


def test_no_key_is_ever_overwritten(directory: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(UsageError, match="nothing is overwritten"):
        keys.create(directory)
    with pytest.raises(UsageError, match="No such file or directory"):
        keys.create(directory.parent / "no" / "keys")
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert [path.name for path in directory.parent.iterdir()] == ["keys"]


def test_secret_readable_by_others_is_refused_with_the_fixing_command(directory: Path) -> None:
    secret = directory / "actor.secret"
    for mode in (0o640, 0o604, 0o620):
        secret.chmod(mode)
        with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600 {secret}"):
            keys.read_secret(str(directory), "actor")
    secret.chmod(0o400)
    assert keys.read_secret(str(directory), "actor")


def test_secret_of_root_may_be_readable_by_a_group_of_the_process_as_kubernetes_mounts_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = directory / "actor.secret"
    if os.geteuid() != 0:
        pytest.skip("needs root, whose file it is")
    os.chown(secret, 0, 10001)
    secret.chmod(0o440)
    with pytest.raises(UsageError, match="or set APEX_JAX_ACTOR_SECRET instead"):
        keys.read_secret(str(directory), "actor")
    monkeypatch.setattr(os, "getgroups", lambda: [10001])
    assert keys.read_secret(str(directory), "actor")
    for mode in (0o444, 0o460):
        secret.chmod(mode)
        with pytest.raises(UsageError, match="lets others read"):
            keys.read_secret(str(directory), "actor")


@pytest.mark.parametrize("text", [b"", b"short\n", b"'" * 40, b"#" * 40, b"\xff" * 40, b"a" * 41, bytes(40)])
def test_invalid_key_is_refused_without_showing_a_secret(directory: Path, text: bytes) -> None:
    (directory / "actor.public").write_bytes(text)
    (directory / "actor.secret").write_bytes(text)
    with pytest.raises(UsageError, match=r"actor\.public: .*40 Z85 characters"):
        keys.read_publics(str(directory), "actor")
    with pytest.raises(UsageError, match=r"actor\.secret: .*40 Z85 characters") as caught:
        keys.read_secret(str(directory), "actor")
    assert not text.strip() or repr(text.decode(errors="replace")) not in str(caught.value)


@pytest.mark.parametrize("arguments", [[], ["create"], ["make", "x"], ["create", "x", "--secret=y"]])
def test_unknown_command_is_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="keys --help"):
        keys.run(arguments)


# Who may enter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "peers"), [
    ("actor", ("replay", "learner")),
    ("evaluator", ("learner",)),
    ("learner", ("replay", "actor", "evaluator")),
    ("replay", ("actor", "learner")),
])  # fmt: skip
def test_a_host_needs_only_the_secret_of_its_role_and_the_publics_of_its_peers(
    directory: Path, role: str, peers: tuple[str, ...]
) -> None:
    needed = {f"{role}.secret", *(f"{peer}.public" for peer in peers)}
    for path in directory.iterdir():
        if path.name not in needed:
            path.unlink()
    security_of(config_of(directory), role)
    for name in needed:
        (directory / name).rename(directory / "away")
        with pytest.raises(UsageError, match=f"{name}: No such file or directory"):
            security_of(config_of(directory), role)
        (directory / "away").rename(directory / name)


def test_all_of_several_public_keys_are_accepted_and_the_first_is_expected_of_servers(directory: Path) -> None:
    old, new = (zmq.curve_keypair()[0] for _ in range(2))
    own = keys.read_publics(str(directory), "replay")[0]
    (directory / "replay.public").write_bytes(new + b"\n" + old + b"\n" + own + b"\n")
    assert keys.read_publics(str(directory), "replay") == (new, old, own)
    assert security_of(config_of(directory), "actor").servers["experience"] == new
    security_of(config_of(directory), "replay")


def test_environment_variables_replace_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = keys.read_secret(str(directory), "actor")
    monkeypatch.setenv("APEX_JAX_ACTOR_SECRET", secret.decode())
    with pytest.raises(UsageError, match="APEX_JAX_REPLAY_PUBLIC is not set"):
        security_of(config_of(), "actor")
    for role in ("replay", "learner"):
        monkeypatch.setenv(f"APEX_JAX_{role.upper()}_PUBLIC", keys.read_publics(str(directory), role)[0].decode())
    security = security_of(config_of(), "actor")
    assert security.secret == secret
    assert set(security.servers) == {"experience", "weights"}
    assert secret.decode() not in repr(security)
    monkeypatch.setenv("APEX_JAX_ACTOR_SECRET", "nonsense")
    with pytest.raises(UsageError, match="APEX_JAX_ACTOR_SECRET: holds no secret key"):
        security_of(config_of(), "actor")


def test_list_of_keys_is_read_again_for_each_client(directory: Path) -> None:
    allowed, newcomer = AllowList(str(directory), ("actor", "evaluator")), zmq.curve_keypair()[0]
    actor, evaluator = (keys.read_publics(str(directory), role)[0] for role in ("actor", "evaluator"))
    for listed in ((actor,), (actor, newcomer), (newcomer,), ()):  # an empty list is a list
        (directory / "actor.public").write_bytes(b"\n".join(listed))
        assert allowed.callback("weights", actor) == (actor in listed)
        assert allowed.callback("weights", newcomer) == (newcomer in listed)
        assert allowed.callback("weights", evaluator), "another role's"
        assert allowed.defects == {}


def test_server_starts_with_an_empty_list_of_clients_and_warns(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "actor.public").write_bytes(b"")
    assert security_of(config_of(directory), "replay").has_keys
    assert "actor.public holds no key" in caplog.text


@pytest.mark.parametrize("damage", ["deleted", "half an edit", "unreadable", "folder"])
def test_unreadable_list_locks_out_new_clients_of_its_role_and_is_logged_once(
    directory: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = AllowList(str(directory), ("actor", "evaluator"))
    actor, evaluator = (keys.read_publics(str(directory), role)[0] for role in ("actor", "evaluator"))
    public = directory / "actor.public"
    public.unlink()
    make = {
        "half an edit": lambda: public.write_bytes(actor + b"\n" + actor[:7]),
        "unreadable": lambda: public.symlink_to(public),
        "folder": public.mkdir,
    }
    make.get(damage, lambda: None)()
    for _ in range(3):
        assert not allowed.callback("weights", actor)
        assert allowed.callback("weights", evaluator)
    assert list(allowed.defects) == ["actor"]
    assert caplog.text.count("no new actor is let in") == 1
    public.rmdir() if damage == "folder" else public.unlink(missing_ok=True)
    public.write_bytes(actor)
    assert allowed.callback("weights", actor)
    assert allowed.defects == {}


@pytest.mark.parametrize("role", keys.ROLES)
def test_address_beyond_this_machine_without_keys_is_refused_unless_insecure(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="apex_jax")
    with pytest.raises(UsageError, match=r"addresses\.\w+=tcp://10\..*keys create DIR.*security\.insecure=true"):
        security_of(config_of(), role)
    assert caplog.text == ""
    assert not security_of(config_of(insecure=True), role).has_keys
    assert "INSECURE: tcp://10." in caplog.text


@pytest.mark.parametrize(("role", "addresses"), [
    ("evaluator", AddressConfig("tcp://*:5550", "tcp://*:5551", "ipc:///run/weights")),
    ("replay", AddressConfig("ipc:///run/experience", "tcp://127.0.0.1:5551", "tcp://10.0.0.8:5552")),
])  # fmt: skip
def test_addresses_that_a_role_does_not_use_need_no_keys(role: str, addresses: AddressConfig) -> None:
    assert not security_of(config_of(addresses=addresses), role).has_keys


def test_loopback_is_encrypted_if_keys_are_configured_and_local_links_are_not(directory: Path) -> None:
    assert security_of(config_of(directory, AddressConfig()), "actor").has_keys
    links = AddressConfig("ipc:///run/a", "ipc:///run/b", "ipc:///run/c")
    assert not security_of(config_of("/no/such/folder", links), "replay").has_keys
