"""Specification of the keys: how they are made, what is refused, and which role may connect to where."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from apex_jax.config import AddressConfig, Config, SecurityConfig
from apex_jax.errors import UsageError
from apex_jax.transport import keys, keys_command, security
from apex_jax.transport.addresses import is_loopback
from apex_jax.transport.security import AllowList, security_of
from tests.processes import Programs

REMOTE = AddressConfig("tcp://10.0.0.7:5550", "tcp://10.0.0.7:5551", "tcp://10.0.0.8:5552")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    keys.create(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with Programs(tmp_path) as programs:
        yield programs


def config_of(directory: Path | str = "", addresses: AddressConfig = REMOTE, insecure: bool = False) -> Config:
    return Config(security=SecurityConfig(str(directory), insecure), addresses=addresses)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Making them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_each_role_gets_a_pair_whose_secret_only_its_owner_reads(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        keys.create(tmp_path / "keys")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "keys") == 0o700
    assert len(list((tmp_path / "keys").iterdir())) == 2 * len(keys.ROLES)
    publics = set()
    for role in keys.ROLES:
        secret, [public] = (
            keys.read_secret(str(tmp_path / "keys"), role),
            keys.read_publics(str(tmp_path / "keys"), role),
        )
        assert zmq.curve_public(secret) == public
        assert mode_of(tmp_path / "keys" / f"{role}.secret") == 0o600
        assert mode_of(tmp_path / "keys" / f"{role}.public") == 0o644
        publics.add(public)
    assert len(publics) == len(keys.ROLES)


def test_no_key_is_ever_overwritten(directory: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(UsageError, match="nothing is overwritten"):
        keys.create(directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert [path.name for path in directory.parent.iterdir()] == ["keys"]


def test_a_set_that_cannot_be_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = iter([zmq.curve_keypair(), zmq.curve_keypair()])
    monkeypatch.setattr("apex_jax.transport.keys.zmq.curve_keypair", lambda: next(pairs))
    with pytest.raises(StopIteration):
        keys.create(tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_in_three_lines_what_goes_where(programs: Programs, tmp_path: Path) -> None:
    first = programs.start("keys", "create", str(tmp_path / "keys"))
    assert (first.exit_code(), first.stderr) == (0, "")
    assert len(first.stdout.splitlines()) == 3
    assert "<role>.secret only to the hosts of that role" in first.stdout
    second = programs.start("keys", "create", str(tmp_path / "keys"))
    assert (second.exit_code(), second.stdout) == (2, "")
    assert second.stderr == (
        f"error: {tmp_path}/keys: Directory not empty; nothing is overwritten: give a folder that does not exist\n"
    )


@pytest.mark.parametrize("arguments", [[], ["create"], ["make", "x"], ["create", "x", "--secret=y"]])
def test_a_command_that_is_not_understood_is_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="keys --help"):
        keys_command.run(arguments)


def test_a_folder_that_does_not_exist_cannot_hold_the_keys(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        keys.create(tmp_path / "no" / "keys")


# Reading them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "files"), [
    ("actor", {"actor.secret", "replay.public", "learner.public"}),
    ("evaluator", {"evaluator.secret", "learner.public"}),
    ("learner", {"learner.secret", "replay.public", "actor.public", "evaluator.public"}),
    ("replay", {"replay.secret", "actor.public", "learner.public"}),
])  # fmt: skip
def test_a_host_needs_only_the_secret_of_its_role_and_the_publics_of_its_peers(
    directory: Path, role: str, files: set[str]
) -> None:
    for path in directory.iterdir():
        if path.name not in files:
            path.unlink()
    security_of(config_of(directory), role)
    for name in files:
        (directory / name).rename(directory / "away")
        with pytest.raises(UsageError, match=f"{name}: No such file or directory"):
            security_of(config_of(directory), role)
        (directory / "away").rename(directory / name)


def test_a_secret_that_others_can_read_is_refused_with_the_command_that_helps(directory: Path) -> None:
    secret = directory / "actor.secret"
    for mode in (0o640, 0o604, 0o620):
        secret.chmod(mode)
        with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600 {secret}"):
            keys.read_secret(str(directory), "actor")
    secret.chmod(0o400)
    assert keys.read_secret(str(directory), "actor")


@pytest.mark.parametrize("text", [b"", b"\n", b"short\n", b"'" * 40, b"#" * 40, b"\xff" * 40, b"a" * 41, bytes(40)])
def test_what_is_no_key_is_refused_and_a_secret_is_not_shown(directory: Path, text: bytes) -> None:
    (directory / "actor.public").write_bytes(text)
    (directory / "actor.secret").write_bytes(text)
    with pytest.raises(UsageError, match=r"actor\.public: .*40 Z85 characters"):
        keys.read_publics(str(directory), "actor")
    with pytest.raises(UsageError, match=r"actor\.secret: holds no secret key; .*40 Z85 characters") as caught:
        keys.read_secret(str(directory), "actor")
    assert not text.strip() or repr(text.decode(errors="replace")) not in str(caught.value)


def test_a_public_key_of_another_secret_is_refused(directory: Path, tmp_path: Path) -> None:
    keys.create(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "actor.public", directory)
    with pytest.raises(UsageError, match=r"actor\.public: no key in it belongs to actor\.secret"):
        security_of(config_of(directory), "actor")


def test_of_several_public_keys_all_are_let_in_and_the_first_is_expected(directory: Path) -> None:
    old, new = (zmq.curve_keypair()[0] for _ in range(2))
    own = keys.read_publics(str(directory), "replay")[0]
    (directory / "replay.public").write_bytes(new + b"\n" + old + b"\n" + own + b"\n")
    assert keys.read_publics(str(directory), "replay") == (new, old, own)
    assert security_of(config_of(directory), "actor").servers["experience"] == new
    security_of(config_of(directory), "replay")


def test_the_environment_stands_for_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_list_is_read_anew_for_each_client(directory: Path) -> None:
    allowed, newcomer = AllowList(str(directory), ("actor", "evaluator")), zmq.curve_keypair()[0]
    public = directory / "actor.public"
    before = public.read_bytes()
    assert not allowed.callback("experience", newcomer)
    public.write_bytes(before + newcomer + b"\n")
    assert allowed.callback("experience", newcomer)
    public.write_bytes(before)
    assert not allowed.callback("experience", newcomer)
    assert allowed.callback("experience", before.strip())


def test_revoking_the_last_key_of_a_role_lets_nobody_of_it_in_and_its_neighbours_as_before(directory: Path) -> None:
    allowed = AllowList(str(directory), ("actor", "evaluator"))
    actor, evaluator = (keys.read_publics(str(directory), role)[0] for role in ("actor", "evaluator"))
    assert allowed.callback("weights", actor)
    (directory / "actor.public").write_bytes(b"")
    assert not allowed.callback("weights", actor)
    assert allowed.callback("weights", evaluator)
    assert allowed.defects == {}  # an empty list is a list


def test_server_starts_with_an_empty_list_of_clients_and_warns(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "actor.public").write_bytes(b"")
    assert security_of(config_of(directory), "replay").has_keys
    assert "actor.public holds no key: no actor is let in until one is added" in caplog.text


@pytest.mark.parametrize("damage", ["deleted", "half an edit", "unreadable", "fifo", "folder"])
def test_while_a_list_cannot_be_read_nobody_new_of_its_role_is_let_in_which_is_logged_once(
    directory: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = AllowList(str(directory), ("actor", "evaluator"))
    actor, evaluator = (keys.read_publics(str(directory), role)[0] for role in ("actor", "evaluator"))
    public = directory / "actor.public"
    public.unlink()
    if damage == "half an edit":
        public.write_bytes(actor + b"\n" + actor[:7])
    elif damage == "unreadable":
        public.symlink_to(public)
    elif damage == "fifo":  # nobody ever writes to it
        os.mkfifo(public)
    elif damage == "folder":
        public.mkdir()
    for _ in range(3):
        assert not allowed.callback("weights", actor)
        assert allowed.callback("weights", evaluator)
    assert list(allowed.defects) == ["actor"]
    assert caplog.text.count("until the list can be read, no new actor is let in") == 1
    public.rmdir() if damage == "folder" else public.unlink(missing_ok=True)
    public.write_bytes(actor)
    assert allowed.callback("weights", actor)
    assert allowed.defects == {}


def test_list_on_a_dead_mount_lets_nobody_new_in_and_stops_no_thread_but_its_reader(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, actor = AllowList(str(directory), ("actor",)), keys.read_publics(str(directory), "actor")[0]
    mount, read = threading.Event(), keys.read_allowed
    monkeypatch.setattr(security, "READ_SECONDS", 0.05)
    monkeypatch.setattr(keys, "read_allowed", lambda *where: mount.wait() and read(*where))
    for _ in range(100):  # each returns; only the first of them waits
        assert not allowed.callback("experience", actor)
    [reader] = [thread for thread in threading.enumerate() if thread.name == "key lists"]
    assert reader.daemon  # keeps no process alive
    assert list(allowed.defects) == ["actor"]
    mount.set()
    reader.join(10)
    assert allowed.callback("experience", actor)
    assert allowed.defects == {}


# Where they are needed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "stays"), [
    ("tcp://127.0.0.1:5550", True),
    ("tcp://127.8.9.10:5550", True),
    ("tcp://[::1]:5550", True),
    ("tcp://[::ffff:127.0.0.1]:5550", True),
    ("tcp://localhost:5550", True),
    ("tcp://[::ffff:10.0.0.7]:5550", False),
    ("tcp://*:5550", False),
    ("tcp://0.0.0.0:5550", False),
    ("tcp://[::]:5550", False),
    ("tcp://eth0:5550", False),
    ("tcp://10.0.0.7:5550", False),
    ("tcp://localhost.example.org:5550", False),
    ("tcp://127.0.0.1.example.org:5550", False),
    ("tcp://10.0.0.7:0;127.0.0.1:5550", False),
])  # fmt: skip
def test_what_can_be_reached_from_elsewhere_needs_keys(address: str, stays: bool) -> None:
    assert is_loopback(address) == stays


@pytest.mark.parametrize("role", keys.ROLES)
def test_without_keys_an_address_beyond_this_machine_is_refused_unless_that_is_asked_for(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="apex_jax")
    with pytest.raises(UsageError, match=r"addresses\.\w+=tcp://10\..*keys create DIR.*security\.insecure=true"):
        security_of(config_of(), role)
    assert caplog.text == ""
    assert not security_of(config_of(insecure=True), role).has_keys
    assert "INSECURE: tcp://10." in caplog.text


def test_addresses_that_a_role_does_not_use_are_none_of_its_business(directory: Path) -> None:
    evaluator = AddressConfig("tcp://*:5550", "tcp://*:5551", "ipc:///run/weights")
    assert not security_of(config_of(addresses=evaluator), "evaluator").has_keys
    replay = AddressConfig("ipc:///run/experience", "tcp://127.0.0.1:5551", "tcp://10.0.0.8:5552")
    assert not security_of(config_of(addresses=replay), "replay").has_keys


def test_links_within_a_machine_need_no_keys_even_where_some_are_named() -> None:
    links = AddressConfig("ipc:///run/a", "ipc:///run/b", "ipc:///run/c")
    assert not security_of(config_of("/no/such/folder", links), "replay").has_keys


def test_loopback_is_encrypted_too_where_there_are_keys(directory: Path) -> None:
    assert security_of(config_of(directory, AddressConfig()), "actor").has_keys
