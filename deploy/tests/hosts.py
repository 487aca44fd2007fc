"""Hosts of a fleet on this machine: each a network namespace with its own address, files and processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deploy.tests.tools import CREDENTIALS, DEPLOY, aws
from tests.rigs.processes import ROOT

SUBNET = "10.83.7"
GATEWAY = f"{SUBNET}.1"  # of the bridge: moto and the metadata service answer here
DOMAIN = "apex-jax.internal"
NAMED = ("replay", "replay-1", "learner")  # by which others find a host


def do(*command: str | Path, seconds: float = 60) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}"
    return done.stdout


class Bridge:
    """The subnet, and the metadata service with each host's address."""

    def __init__(self) -> None:
        self.name = f"apex{os.getpid() % 10**6}"

    def __enter__(self) -> Bridge:
        do("ip", "link", "add", self.name, "type", "bridge")
        do("ip", "address", "add", f"{GATEWAY}/24", "dev", self.name)
        do("ip", "link", "set", self.name, "up")

        class Metadata(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._say(200, "token")

            def do_GET(self) -> None:
                if self.path.endswith("/local-ipv4"):
                    self._say(200, self.client_address[0])
                else:
                    self._say(404, "")

            def _say(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Sends nothing."""

        self._server = ThreadingHTTPServer((GATEWAY, 0), Metadata)
        self.metadata_url = f"http://{GATEWAY}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        do("ip", "link", "delete", self.name)


def connect(bridge: str, namespace: str, link: str, address: str) -> None:
    """Makes a network namespace with this address on a bridge."""
    do("ip", "netns", "add", namespace)
    do("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    do("ip", "link", "set", link, "master", bridge, "up")
    for command in (f"address add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
        do("ip", "-n", namespace, *command.split())


class Host:
    """One instance: from its boot to its end."""

    def __init__(self, folder: Path, number: int, name: str, bridge: str, timer_seconds: float):
        """`name`: its role, or that of a further replay server."""
        self.name, self.role, self.address = name, name.partition("-")[0], f"{SUBNET}.{number}"
        self._timer_seconds = timer_seconds
        self.folder = folder
        self._namespace = f"{bridge}n{number}"
        self._link = f"{bridge}v{number}"
        self._bridge = bridge
        self._process: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        name = self._namespace
        connect(self._bridge, name, self._link, self.address)
        with open(self.folder / "console.log", "wb") as console:
            apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            init = [sys.executable, "-m", "deploy.tests.init", str(self.folder), str(self._timer_seconds)]
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", name, *apart, *init],
                cwd=ROOT,
                stdout=console,
                stderr=console,
                stdin=subprocess.DEVNULL,
            )

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
        """Runs a command in a shell on the host; returns its output."""
        assert self._process is not None
        (init,) = do("pgrep", "-P", str(self._process.pid)).split()
        return do("nsenter", f"--target={init}", "--mount", "--net", "--pid", *command)

    def secret_key(self) -> str:
        """Returns the role's secret key on the host; empty if there is none."""
        path = self.folder / f"own/etc/apex-jax/keys/{self.role}.secret"
        return path.read_text() if path.exists() else ""

    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def shut_down(self, seconds: float = 130) -> None:
        """Stops the units of the instance, then the instance."""
        assert self._process is not None
        for pid in do("pgrep", "-P", str(self._process.pid)).split():
            os.kill(int(pid), signal.SIGTERM)
        self._process.wait(seconds)
        self._remove()

    def die(self) -> None:
        """Terminates the instance with its files."""
        if self._process is not None:
            self._process.kill()  # --kill-child: its process 1 goes, and so all of its namespace
            self._process.wait()
        self._remove()

    def _remove(self) -> None:
        subprocess.run(["ip", "link", "delete", self._link], capture_output=True)
        subprocess.run(["ip", "netns", "delete", self._namespace], capture_output=True)
        self._process = None


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
            host.die()

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
            "APEX_JAX_METADATA_URL": self._bridge.metadata_url,
            "APEX_JAX_SERVICE_ID": self._services.get(name, ""),
            "APEX_JAX_RETRY_SECONDS": "1",
            "JAX_PLATFORMS": "cpu",
        }
        (folder / "extra-environment").write_text("".join(f'{key}="{value}"\n' for key, value in environment.items()))
        host = Host(folder, self._number, name, self._bridge.name, self._timer_seconds)
        self.all.append(host)
        host.boot()
        return host

    def replace(self, host: Host) -> Host:
        """Kills the instance; its group starts another."""
        self.lose(host)
        return self.start(host.name)

    def lose(self, host: Host) -> None:
        """Kills the instance; its group starts none yet."""
        host.die()
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
    image, work = folder / "image", folder / "image-work"
    script = ["set -euo pipefail"]
    for name in ("etc", "opt", "usr", "var"):
        (image / name).mkdir(parents=True)
        (work / name).mkdir(parents=True)
        options = f"lowerdir=/{name},upperdir={image / name},workdir={work / name}"
        script.append(f"mount -t overlay overlay -o {options} /{name}")
    archive = folder / "apex-jax.tar.gz"
    commit = do("git", "-C", ROOT, "rev-parse", "HEAD").strip()
    do("git", "-C", ROOT, "archive", "--format=tar.gz", "-o", archive, commit)
    script.append(f"bash {DEPLOY / 'provision.sh'} --source {archive} --commit {commit}")
    do("unshare", "--mount", "bash", "-c", "\n".join(script), seconds=900)
    shutil.rmtree(work, ignore_errors=True)
    return image


def stored(url: str, bucket: str) -> set[str]:
    """Returns the names of all that lies in a bucket."""
    pages = aws(url, "s3").get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return {one["Key"] for page in pages for one in page.get("Contents", [])}
