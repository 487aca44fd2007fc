"""Dockerfile, compose.yaml and deploy/kubernetes: read by their own tools, and the pods' commands by the program."""

from __future__ import annotations

import subprocess
from typing import Any, NamedTuple

import pytest
import yaml

from apex_jax.config import Config
from apex_jax.config.command_line import parse
from apex_jax.transport.addresses import split
from apex_jax.transport.keys import ROLES
from apex_jax.transport.security import LINKS
from deploy.tests.test_scripts import say, tool
from deploy.tests.tools import DEPLOY
from tests.rigs.processes import ROOT
from tests.system.test_container import USED, keys_of

pytestmark = [pytest.mark.deploy, pytest.mark.quick]

ITEMS: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "kubernetes/fleet.yaml").read_text())["items"]
PODS = {item["metadata"]["name"]: item["spec"]["template"]["spec"] for item in ITEMS if item["kind"] == "Job"}
SETTINGS = next(item["data"] for item in ITEMS if item["kind"] == "ConfigMap")


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


def test_roles_get_their_own_keys_and_each_others_addresses() -> None:
    started = {role: on_kubernetes(role) for role in ROLES}
    for role, (config, keys) in started.items():
        assert keys == keys_of(role)
        for link in USED[role]:
            ours = split(getattr(config.addresses, link))
            server = split(getattr(started[LINKS[link].server].config.addresses, link))
            is_server = LINKS[link].server == role
            assert (ours.host, ours.port) == ("*" if is_server else LINKS[link].server, server.port)


def test_dockerfile_is_clean() -> None:
    assert say(tool("hadolint"), "--no-color", "Dockerfile") == (0, "")


@pytest.mark.parametrize("file", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_file_has_the_keys_and_values_of_the_specification_only(file: str) -> None:
    compose = pytest.importorskip("compose_spec")  # it reads no merges of YAML (<<), so they are resolved before
    compose.PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load((ROOT / file).read_text())))


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_manifests_follow_the_schemas_of_a_version_of_kubernetes(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for item in ITEMS:
        validate(item, version, strict=True)


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
