"""Hosts of a fleet on this machine: each a network namespace with its own address, files and processes."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from pathlib import Path

from deploy.tests.boxes import Box, Bridge, do, overlays
from deploy.tests.tools import CREDENTIALS, DEPLOY, aws
from tests.rigs.processes import ROOT

DOMAIN = "apex-jax.internal"
NAMED = ("replay", "learner")  # by which others find a host


class Host(Box):
    """One instance: from its boot to its end."""

    def __init__(self, folder: Path, number: int, name: str, bridge: Bridge, timer_seconds: float):
        """`name`: its role."""
        self.name = self.role = name
        init = shlex.join([sys.executable, "-m", "deploy.tests.init", str(folder), str(timer_seconds)])
        super().__init__(bridge, number, folder, f"cd {shlex.quote(str(ROOT))}; exec {init}")

    @property
    def run_directory(self) -> Path:
        return self.folder / "own/var/lib/apex-jax/run-1"

    def log(self, characters: int = 10**6) -> str:
        """Returns the host's logs, at most the last `characters` of each."""
        paths = [self.folder / "console.log", *sorted((self.folder / "own/var/log").rglob("*.log"))]
        return "\n".join(
            f"== {self.name} {path.name}\n{path.read_text()[-characters:]}" for path in paths if path.exists()
        )

    def run(self, *command: str) -> str:
        """Runs a command on the host; returns its output."""
        return do(*self.prefix(), *command)

    def secret_key(self) -> str:
        """Returns the role's secret key on the host; empty if there is none."""
        path = self.folder / f"own/etc/apex-jax/keys/{self.role}.secret"
        return path.read_text() if path.exists() else ""

    def shut_down(self) -> None:
        """Stops the units of the instance, then the instance."""
        os.kill(self.init(), signal.SIGTERM)
        self.wait(130)
        self.switch_off()


class Hosts:
    """Starts hosts from user data, keeps their names up to date, and ends all of them."""

    def __init__(
        self, folder: Path, image: Path, user_data: dict[str, str], url: str, bridge: Bridge, timer_seconds: float = 10
    ):
        """`timer_seconds`: interval of all timers, instead of that in their files."""
        self._timer_seconds = timer_seconds
        self._folder, self._image, self._user_data, self._url, self._bridge = folder, image, user_data, url, bridge
        self._discovery = aws(url, "servicediscovery")
        self._number = 10
        self.all: list[Host] = []
        self._ended = threading.Event()

    def __enter__(self) -> Hosts:
        namespace = self._discovery.create_private_dns_namespace(Name=DOMAIN, Vpc="vpc-12345678")
        operation = self._discovery.get_operation(OperationId=namespace["OperationId"])["Operation"]
        records = {"DnsRecords": [{"Type": "A", "TTL": 10}]}
        self._services = {
            name: self._discovery.create_service(
                Name=name, NamespaceId=operation["Targets"]["NAMESPACE"], DnsConfig=records
            )["Service"]["Id"]
            for name in NAMED
        }
        self._resolver = threading.Thread(target=self._resolve)
        self._resolver.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._resolver.join()
        for host in self.all:
            host.switch_off()

    def start(self, name: str) -> Host:
        """Starts a host with a new address. `name`: its role, or that of a further replay server."""
        self._number += 1
        folder = self._folder / f"{self._number}-{name}"
        folder.mkdir()
        (folder / "image").symlink_to(self._image)
        no_gpu = self._user_data[name].replace("learner.device=gpu", "learner.device=cpu")
        (folder / "user-data").write_text(no_gpu)
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        environment = {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": self._url,
            "APEX_JAX_SERVICE_ID": self._services.get(name, ""),
            "APEX_JAX_RETRY_SECONDS": "1",
            "JAX_PLATFORMS": "cpu",
        }
        (folder / "extra-environment").write_text("".join(f'{key}="{value}"\n' for key, value in environment.items()))
        self.all.append(Host(folder, self._number, name, self._bridge, self._timer_seconds))
        return self.all[-1]

    def replace(self, host: Host) -> Host:
        """Kills the instance; its group starts another."""
        self.lose(host)
        return self.start(host.name)

    def lose(self, host: Host) -> None:
        """Kills the instance; its group starts none yet."""
        host.switch_off()
        self.all.remove(host)

    def _resolve(self) -> None:
        """Imitates the private zone: the newest registration of each name, in every host's /etc/hosts."""
        while not self._ended.wait(0.5):
            lines = ["127.0.0.1 localhost"]
            for name, service in self._services.items():
                if instances := self._discovery.list_instances(ServiceId=service)["Instances"]:
                    lines.append(f"{instances[-1]['Attributes']['AWS_INSTANCE_IPV4']} {name}.{DOMAIN}")
            for host in list(self.all):
                with open(host.folder / "hosts", "r+") as file:  # in place: it is mounted
                    file.write("\n".join(lines) + "\n")
                    file.truncate()


def make_image(folder: Path) -> Path:
    """Runs provision.sh on this checkout's commit; returns the changes in /etc, /opt, /usr and /var."""
    image, archive = folder / "image", folder / "apex-jax.tar.gz"
    do("git", "-C", ROOT, "archive", "--format=tar.gz", "-o", archive, "HEAD")
    script = f"{overlays(image)}\nbash {DEPLOY / 'provision.sh'} {archive}"
    do("unshare", "--mount", "bash", "-c", script, seconds=900)
    return image


def stored(url: str, bucket: str) -> set[str]:
    """Returns the names of all that lies in a bucket."""
    pages = aws(url, "s3").get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return {one["Key"] for page in pages for one in page.get("Contents", [])}
