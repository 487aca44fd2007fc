"""The roles of a fleet as its user data starts them: boxes with their own addresses, CURVE, moto for AWS (needs root).

Cloud-init, systemd and the private zone are not imitated: each box reads the environment that Terraform renders,
fetches its keys, and runs its role with `deploy/keep`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from apex_jax.run.metrics import read_metrics
from deploy.tests.boxes import GATEWAY, SUBNET, Box, Bridge
from deploy.tests.tools import CREDENTIALS, aws, moto_server, rendered_user_data
from tests.rigs.processes import ROOT, wait_until

HOSTS = ("replay", "learner", "evaluator", "actor", "actor2")
BUCKET = "fleet-results"
SETTINGS = {  # the run ends after a minute and a half of learning
    "total_minutes": "1.5", "learner.checkpoint_interval_seconds": "2", "storage.interval_seconds": "2",
    "evaluator.interval_seconds": "1", "metrics_interval_seconds": "0.5",
}  # fmt: skip

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.timeout(1200)]


class Fleet(NamedTuple):
    """Boxes by role; actors have two."""

    folder: Path
    bridge: Bridge
    url: str
    user_data: dict[str, str]
    boxes: dict[str, Box]

    def start(self, name: str) -> None:
        """Starts a box with another address, and no files of its own. `name`: its role, or that and a number."""
        started, role = len(list(self.folder.glob("host-*"))), name.rstrip("0123456789")
        folder = self.folder / f"host-{started}-{name}"
        (folder / "keys").mkdir(parents=True)
        (environment,) = (
            file["content"]
            for file in yaml.safe_load(self.user_data[role])["write_files"]
            if file["path"] == "/etc/apex-jax/environment"
        )
        for there, here in (
            ("/etc/apex-jax/keys", f"{folder}/keys"),
            ("/var/lib/apex-jax/run-1", f"{folder}/run-1"),
            ("/var/lib/apex-jax/cache", f"{self.folder}/cache"),
            ("learner.device=gpu", "learner.device=cpu"),
        ):
            environment = environment.replace(there, here)
        addresses = {box: self.boxes[box].address for box in self.boxes} | {name: f"{SUBNET}.{10 + started}"}
        for each in self.folder.glob("host-*"):  # mounted, so changed in place
            names = "".join(f"{address} {box}.apex-jax.internal\n" for box, address in addresses.items())
            (each / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        own = {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": self.url,
            "APEX_JAX_KEYS": f"{folder}/keys",
            "APEX_JAX_SERVICE_ID": "",
        }
        lines = [*environment.splitlines(), *(f'{key}="{value}"' for key, value in own.items()), "JAX_PLATFORMS=cpu"]
        (folder / "environment").write_text("\n".join(lines) + "\n")
        python, home = shlex.quote(sys.executable), shlex.quote(str(folder))
        script = (
            f"mount --bind {home}/hosts /etc/hosts; cd {shlex.quote(str(ROOT))}; set -a; . {home}/environment; set +a\n"
            f"{python} -m deploy.host.boot; {python} -m deploy.host.results fetch\n"
            f"deploy/keep {name} {python} main.py --role {role} --config ${{APEX_JAX_CONFIG}} ${{APEX_JAX_SETTINGS}}\n"
            f"{python} -m deploy.host.results copy\n"
        )
        self.boxes[name] = Box(self.bridge, 10 + started, folder, script)

    def updates(self) -> list[float]:
        """Returns how many updates the present learner's host has made, at each report."""
        path = self.boxes["learner"].folder / "run-1/metrics/learner.jsonl"
        lines: list[dict[str, Any]] = read_metrics(path) if path.exists() else []
        return [line["learner/updates"] for line in lines if line.get("learner/updates")]

    def stored(self) -> set[str]:
        """Returns the names of what the run has in the bucket."""
        pages = aws(self.url, "s3").get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return {one["Key"].removeprefix("runs/run-1/") for page in pages for one in page.get("Contents", [])}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    assert os.geteuid() == 0, "boxes are namespaces, which only root can make"
    folder = tmp_path_factory.mktemp("fleet")
    settings = ", ".join(f'"{key}" = "{value}"' for key, value in SETTINGS.items())
    user_data = rendered_user_data(
        folder, 'task = "Catch-v0"', 'config_file = "catch.yaml"', f'bucket = "{BUCKET}"', "actor_hosts = 2",
        "actor_host_environments = 8", "ladder_environments = 16", f"settings = {{ {settings} }}",
    )  # fmt: skip
    with Bridge() as bridge, moto_server(folder, GATEWAY) as url:
        aws(url, "s3").create_bucket(Bucket=BUCKET)
        fleet = Fleet(folder, bridge, url, user_data, {})
        for name in HOSTS:
            fleet.start(name)
        # After the hosts: they wait for their keys.
        environment = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": url}
        push = [sys.executable, "-m", "deploy.push_keys", "apex-jax"]
        subprocess.run(push, cwd=ROOT, env=environment, check=True, timeout=100)
        try:
            yield fleet
        finally:
            for box in fleet.boxes.values():
                box.switch_off()


def test_hosts_find_each_other_by_encrypted_links_and_train(fleet: Fleet) -> None:
    wait_until(lambda: max(fleet.updates(), default=0) > 100, 300)
    assert "links over tcp are encrypted" in (fleet.boxes["learner"].folder / "console.log").read_text()


def test_a_learner_on_a_new_host_goes_on_with_the_copy_in_the_bucket(fleet: Fleet) -> None:
    wait_until(lambda: any(name.endswith("/checksums.json") for name in fleet.stored()), 300)  # a whole copy
    before = fleet.updates()[-1]
    fleet.boxes["learner"].switch_off()
    fleet.start("learner")
    log = fleet.boxes["learner"].folder / "console.log"
    resumed = wait_until(lambda: re.findall(r"resuming from the checkpoint at (\d+) updates", log.read_text()), 300)
    assert int(resumed[0]) > 0
    wait_until(lambda: fleet.updates()[-1] > 2 * before, 300)


def test_all_hosts_end_with_the_run_and_its_results_are_in_the_bucket(fleet: Fleet) -> None:
    for name, box in fleet.boxes.items():
        box.wait(600)
        assert box.exit_code() == 0, f"{name}: {(box.folder / 'console.log').read_text()[-3000:]}"
    kept = {"learner/run_identity", "replay/run_identity", "results/config.yaml", "results/starts.jsonl"}
    assert kept | {f"results/metrics/{role}.jsonl" for role in ("learner", "replay", "evaluator")} <= fleet.stored()
