"""deploy/kubernetes: read by the schemas of its engine, and what it starts as processes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from apex_jax.config import Config
from apex_jax.config.command_line import parse
from apex_jax.transport.addresses import split
from apex_jax.transport.keys import ROLES, create
from apex_jax.transport.security import LINKS
from deploy.tests.boxes import Box, Bridge
from deploy.tests.tools import DEPLOY
from tests.rigs.processes import ROOT, checkpoints, values, wait_until
from tests.system.test_container import USED, keys_of

pytestmark = pytest.mark.deploy

ITEMS: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "kubernetes/fleet.yaml").read_text())["items"]
PODS = {item["metadata"]["name"]: item["spec"]["template"]["spec"] for item in ITEMS if item["kind"] == "Job"}
SETTINGS = next(item["data"] for item in ITEMS if item["kind"] == "ConfigMap")
GROUP = 10001  # fsGroup


class Started(NamedTuple):
    """What an engine starts for a role: the program's arguments, and the files in the folder of its keys."""

    config: Config
    keys: set[str]


def words_of(script: str, **environment: str) -> list[str]:
    """Returns the arguments of the program that a script executes at its end."""
    shown = script.replace("chmod 600", ": ").replace("exec ", "printf '%s\\n' ")
    words = subprocess.run(["bash", "-c", shown], env=environment, capture_output=True, text=True, check=True).stdout
    return words[words.index("--role") :].splitlines()


def on_kubernetes(role: str) -> Started:
    (container,), volumes = PODS[role]["containers"], {volume["name"]: volume for volume in PODS[role]["volumes"]}
    command = parse(words_of(container["args"][0], **SETTINGS, POD_NAME="actor-x"))
    assert (command.role, command.config.security.keys) == (role, container["volumeMounts"][1]["mountPath"])
    return Started(command.config, {item["path"] for item in volumes["keys"]["secret"]["items"]})


@pytest.mark.quick
def test_roles_get_their_own_keys_and_each_others_addresses() -> None:
    started = {role: on_kubernetes(role) for role in ROLES}
    for role, (config, keys) in started.items():
        assert keys == keys_of(role)
        for link in USED[role]:
            ours = split(getattr(config.addresses, link))
            server = split(getattr(started[LINKS[link].server].config.addresses, link))
            is_server = LINKS[link].server == role
            assert (ours.host, ours.port) == ("*" if is_server else LINKS[link].server, server.port)


@pytest.mark.quick
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_manifests_follow_the_schemas_of_a_version_of_kubernetes(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for item in ITEMS:
        validate(item, version, strict=True)


@pytest.mark.quick
def test_services_and_probes_reach_what_the_pods_serve() -> None:
    services = {item["metadata"]["name"]: item["spec"] for item in ITEMS if item["kind"] == "Service"}
    for link, (server, _) in LINKS.items():
        (port,) = (port["port"] for port in services[server]["ports"] if port["name"] == link)
        assert port == split(getattr(on_kubernetes(server).config.addresses, link)).port
        assert services[server]["selector"]["role"] == server
    for role, pod in PODS.items():
        (container,) = pod["containers"]
        (port,) = container["ports"]
        assert split(on_kubernetes(role).config.addresses.status).port == port["containerPort"]
        assert container["livenessProbe"]["httpGet"]["port"] == port["name"]


def pod(role: str, number: int, folder: Path, bridge: Bridge, settings: str) -> Box:
    """Starts what a pod starts: its command, environment, keys as a volume with fsGroup has them, and run directory.

    The services' names lead to the pods themselves, and the folder of keys has another path.
    """
    (container,) = PODS[role]["containers"]
    here = folder / f"{role}-{number}"
    (here / "keys").mkdir(parents=True)
    for name in on_kubernetes(role).keys:
        shutil.copy(folder / "secret" / name, here / "keys" / name)
        (here / "keys" / name).chmod(0o440)
        os.chown(here / "keys" / name, 0, GROUP)
    program = here / "apex-jax"
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(ROOT / "main.py")])} "$@"\n')
    program.chmod(0o755)
    given = {"SETTINGS": settings, "POD_NAME": f"actor-{number}", "PATH": f"{here}:{os.environ['PATH']}"}
    environment = [*(f"{name}={value}" for name, value in given.items()), "JAX_PLATFORMS=cpu", f"HOME={folder}"]
    words = [*container["command"], container["args"][0].replace("=/keys", f"={here}/keys")]
    as_pod = shlex.join(["setpriv", f"--groups={GROUP}", "env", "-i", *environment, *words])
    return Box(bridge, number, here, f"mount --bind {folder}/hosts /etc/hosts; cd {here}\nexec {as_pod}")


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    if os.geteuid() != 0:
        pytest.skip("needs root: pods are namespaces")
    with Bridge() as bridge:
        yield bridge


@pytest.mark.timeout(600)
def test_pods_train_answer_probes_and_end_with_the_run(bridge: Bridge, tmp_path: Path) -> None:
    create(tmp_path / "secret")
    settings = "--config catch total_updates=3000 actor.processes=2 metrics_interval_seconds=0.5 actor.environments=8"
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.83.7.31 replay\n10.83.7.32 learner\n")
    with ExitStack() as boxes:
        pods = [
            pod(role, number, tmp_path, bridge, settings)
            for number, role in enumerate(("replay", "learner", "evaluator", "actor", "actor"), 31)
        ]
        for one in pods:
            boxes.callback(one.switch_off)
        probe = PODS["replay"]["containers"][0]["livenessProbe"]["httpGet"]

        def is_healthy(address: str) -> bool:
            try:
                return urllib.request.urlopen(f"http://{address}:8080{probe['path']}", timeout=5).status == 200
            except OSError:
                return False

        wait_until(lambda: all(is_healthy(one.address) for one in pods))
        wait_until(lambda: all(one.exit_code() is not None for one in pods))
        assert [one.exit_code() for one in pods] == [0] * 5
        (run,) = (tmp_path / "learner-32/runs").iterdir()
        assert checkpoints(run)[-1] >= 3000
        assert values(tmp_path / "evaluator-33/runs" / run.name, "evaluator", "eval/updates")[-1] >= 3000
        assert values(tmp_path / "actor-35/runs" / run.name, "actor-35", "step")
