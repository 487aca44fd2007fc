"""The container without an engine: its files agree with the program, and a fleet as in compose.yaml trains.

deploy/tests/test_manifests.py reads them with tools of their own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from apex_jax.config.command_line import parse
from apex_jax.operations.storage_copy import LAST_COPY_SECONDS
from apex_jax.process import CONNECTS
from apex_jax.transport.addresses import is_loopback, split
from apex_jax.transport.keys import ROLES, read_publics, read_secret
from apex_jax.transport.security import LINKS
from apex_jax.workers.local import SAVE_SECONDS
from tests.rigs.containers import arguments, context, entrypoint, services, texts_of, tracked_files, volumes
from tests.rigs.ports import free_port
from tests.rigs.processes import ROOT, Program, Programs, checkpoints, leave, values, wait_until

SERVICES = services()
FOLDER = texts_of("WORKDIR")[0]  # of the program in the image
SERVED = {role: [link for link in LINKS if LINKS[link].server == role] for role in ROLES}
USED = {role: [*SERVED[role], *CONNECTS.get(role, ())] for role in ROLES}


def keys_of(role: str) -> set[str]:
    """Returns the files of keys that a role needs."""
    peers = {client for link in SERVED[role] for client in LINKS[link].clients}
    peers |= {LINKS[link].server for link in CONNECTS.get(role, ())}
    return {f"{role}.secret", *(f"{peer}.public" for peer in peers)}


# Dockerfile and .dockerignore ------------------------------------------------------------------------------------


def test_actors_have_run_directories_of_their_own_and_the_others_share_one() -> None:
    folders = {role: volumes(SERVICES[role]).get("/runs") for role in ROLES}
    assert folders == {"replay": "runs", "learner": "runs", "actor": None, "evaluator": "runs"}


def test_learner_on_a_gpu_differs_in_image_and_device_only() -> None:
    [(name, learner)] = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"].items()
    assert (name, set(learner)) == ("learner", {"image", "build", "deploy"})
    assert learner["build"] == {"context": SERVICES["learner"]["build"], "args": {"EXTRA": "gpu"}}


def test_image_has_every_file_that_the_package_is_made_of_and_no_other() -> None:
    paths = [path for path in (ROOT / "apex_jax").rglob("*") if path.suffix in (".py", ".html")]
    package = [str(path.relative_to(ROOT)) for path in (*paths, *(ROOT / "configs").glob("*.yaml"))]
    package += ["pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"]
    package += ["deploy/requirements-host.txt", "deploy/keep", "deploy/healthy"]
    package += [path.name for path in ROOT.glob("requirements*.txt")]
    assert sorted(context(tracked_files())) == sorted(package)


@pytest.mark.parametrize(
    "path",
    [
        ".git/config", ".venv/bin/python", "runs/Pong-v5-1/config.yaml", "keys/actor.secret", "actor.secret",
        "apex_jax/actor.secret", "configs/keys/actor.secret", "apex_jax/__pycache__/main.pyc", "deploy/README.md",
        "tests/conftest.py", ".env",
    ],
)  # fmt: skip
def test_history_environments_runs_and_secrets_never_reach_the_image(path: str) -> None:
    assert context([path, "setup.py"]) == ["setup.py"]


@pytest.mark.parametrize("extra", ["film", "gpu", "export"])
def test_requirements_of_each_extra_are_there_when_dependencies_are_installed(extra: str) -> None:
    copied = texts_of("COPY")[0].split()
    used = [text.replace("${EXTRA}", extra) for text in texts_of("RUN") if "${EXTRA}" in text]
    (files,) = (re.findall(r"-r \"?([\w.-]+)", text) for text in used)
    built_on = [name for file in files for name in re.findall(r"^-r (\S+)", (ROOT / file).read_text(), re.MULTILINE)]
    assert f"requirements-{extra}.txt" in files
    assert {*files, *built_on} <= set(copied)


# compose.yaml ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_program_accepts_the_command_of_each_service(role: str) -> None:
    command = parse(arguments(SERVICES[role]))
    assert command.role == role
    assert command.config.environment.task == parse(()).config.environment.task
    settings = "environment.task=Breakout-v5 seed=3"
    other = services(environment={"APEX_JAX_CONFIG": "atari", "APEX_JAX_SETTINGS": settings})
    config = parse(arguments(other[role])).config
    assert (config.environment.task, config.seed) == ("Breakout-v5", 3)
    assert config.learner == parse(("--config", "atari")).config.learner


@pytest.mark.parametrize("link", LINKS)
def test_clients_of_a_link_name_the_service_that_serves_it_at_its_port(link: str) -> None:
    addresses = {
        role: split(getattr(parse(arguments(SERVICES[role])).config.addresses, link))
        for role in ROLES
        if link in USED[role]
    }
    server = addresses.pop(LINKS[link].server)
    assert server.host == "0.0.0.0"
    assert {(address.host, address.port) for address in addresses.values()} == {(LINKS[link].server, server.port)}
    assert set(addresses) == set(LINKS[link].clients)


@pytest.mark.parametrize("role", ROLES)
def test_service_mounts_the_keys_of_its_role_only_and_cannot_write_them(role: str) -> None:
    mounted = {folder: volume for folder, volume in volumes(SERVICES[role]).items() if "keys" in volume}
    assert mounted == {f"/keys/{role}": f"keys-{role}"}
    assert mounted.items() <= volumes(SERVICES["keys"]).items()
    assert parse(arguments(SERVICES[role])).config.security.keys == f"/keys/{role}"
    assert f"keys-{role}:/keys/{role}:ro" in SERVICES[role]["volumes"]
    assert f"/keys/{role}" in " ".join(texts_of("RUN"))  # whose owner the volume gets


def test_services_have_time_to_save_and_are_restarted_unless_the_run_is_over() -> None:
    for role in ROLES:
        grace = SERVICES[role]["stop_grace_period"]
        assert grace.endswith("s")
        assert int(grace[:-1]) >= SAVE_SECONDS + LAST_COPY_SECONDS
        assert SERVICES[role]["entrypoint"] == [f"{FOLDER}/deploy/keep", "role", *entrypoint()]
        assert "restart" not in SERVICES[role]  # it would restart what must not be


@pytest.mark.parametrize("role", ROLES)
def test_health_is_the_status_of_the_process_which_stays_in_the_container(role: str) -> None:
    address = parse(arguments(SERVICES[role])).config.addresses.status
    assert SERVICES[role]["healthcheck"]["test"] == ["CMD", f"{FOLDER}/deploy/healthy", address]
    assert is_loopback(address)
    assert all("ports" not in service for service in SERVICES.values())


# The services as processes ---------------------------------------------------------------------------------------


def make_keys(folder: Path) -> Path:
    """Runs what the service of the keys runs, with folders of this machine as its volumes; returns their folder."""
    program = folder / "bin" / "apex-jax"
    if not program.exists():
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(ROOT))}/main.py "$@"\n')
        program.chmod(0o755)
        for role in ROLES:
            (folder / "keys" / role).mkdir(parents=True, mode=0o700)
    service = SERVICES["keys"]
    (script,) = service["command"]
    there = script.replace("/tmp/keys", "made").replace("/keys", str(folder / "keys")).replace("made", f"{folder}/made")
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    subprocess.run([*service["entrypoint"], there], env=environment, check=True, capture_output=True, timeout=60)
    return folder / "keys"


def test_each_role_gets_its_secret_and_the_public_keys_of_its_peers_once(tmp_path: Path) -> None:
    folder = make_keys(tmp_path)
    made = {path: path.read_bytes() for path in folder.rglob("*.*")}
    for role in ROLES:
        assert {path.name for path in made if path.parent.name == role} == keys_of(role)
        assert read_secret(str(folder / role), role)
        assert (folder / role / f"{role}.secret").stat().st_mode & 0o777 == 0o600
    assert read_publics(str(folder / "replay"), "actor") == read_publics(str(tmp_path / "made"), "actor")
    assert make_keys(tmp_path) == folder
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == made


class Composed:
    """The services of compose.yaml as processes of this machine, on ports that are free."""

    def __init__(self, programs: Programs, folder: Path, settings: str):
        self._programs, self._folder = programs, folder
        self._services = services(environment={"APEX_JAX_CONFIG": "catch", "APEX_JAX_SETTINGS": settings})
        self._keys = make_keys(folder)
        self._ports: dict[str, int] = {}
        self.status: list[str] = []
        self.running: list[Program] = []

    def start(self, role: str, number: int = 1) -> Program:
        service = self._services[role]
        own = "runs" if "/runs" in volumes(service) else f"runs-{role}-{number}"
        words = [self._here(word, f"{role}-{number}") for word in arguments(service)]
        self.status += [word.partition("=")[2] for word in words if word.startswith("addresses.status=")]
        program = self._programs.start(*words, f"run_directory={self._folder / own}")
        self.running.append(program)
        return program

    def _here(self, word: str, process: str) -> str:
        """Returns an argument with the keys' folder, and the address of a link or of a status page, on this machine."""
        word = word.replace("/keys/", f"{self._keys}/")
        found = re.fullmatch(r"(addresses\.(\w+)=)tcp://[\w.]+:\d+", word)
        if not found:
            return word
        place = f"status of {process}" if found[2] == "status" else found[2]
        return f"{found[1]}tcp://127.0.0.1:{self._ports.setdefault(place, free_port())}"


def is_healthy(address: str) -> bool:
    """Returns whether the health check of a service with this address of its status succeeds."""
    command = [str(ROOT / "deploy/healthy"), address]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def up(programs: Programs, folder: Path, settings: str) -> Composed:
    """Starts what `docker compose up --scale actor=2` starts, in the same order."""
    fleet = Composed(programs, folder, f"{settings} metrics_interval_seconds=0.25")
    for role, number in (("replay", 1), ("learner", 1), ("actor", 1), ("actor", 2), ("evaluator", 1)):
        fleet.start(role, number)
    return fleet


@pytest.mark.long
@pytest.mark.timeout(600)
def test_composed_fleet_learns_is_healthy_saves_when_stopped_and_ends_after_the_next_start(
    programs: Programs, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    fleet = up(programs, tmp_path, "total_updates=100000000")

    def has_learned() -> Any:
        return values(runs, "learner", "learner/updates")[-1:] > [100.0]

    fleet.running[0].wait_until(has_learned)
    fleet.running[0].wait_until(lambda: values(runs, "replay", "replay/actors")[-1:] == [2.0])
    wait_until(lambda: all(is_healthy(address) for address in fleet.status))
    leave(reversed(fleet.running))
    (saved,) = checkpoints(runs)[-1:]
    assert saved > 100

    again = up(programs, tmp_path, f"total_updates={saved + 500}")
    assert [program.exit_code() for program in again.running] == [0] * 5
    assert checkpoints(runs)[-1] >= saved + 500
    assert (runs / "evaluations.jsonl").is_file()
