"""Machines on this one: each a namespace with its own address, files and processes, and sshd if wanted (needs root)."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.rigs.processes import wait_until

SUBNET = "10.83.7"
GATEWAY = f"{SUBNET}.1"  # of the bridge: moto answers here
VENV = Path(sys.prefix)


def do(*command: str | Path, seconds: float = 60) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}"
    return done.stdout


class Bridge:
    """The subnet."""

    def __init__(self) -> None:
        self.name = f"apex{os.getpid() % 10**6}"

    def __enter__(self) -> Bridge:
        do("ip", "link", "add", self.name, "type", "bridge")
        do("ip", "address", "add", f"{GATEWAY}/24", "dev", self.name)
        do("ip", "link", "set", self.name, "up")
        return self

    def __exit__(self, *_: object) -> None:
        do("ip", "link", "delete", self.name)


def overlays(folder: Path) -> str:
    """Returns a script for a mount namespace, after which changes in /etc, /opt, /usr and /var go to the folder."""
    lines = ["set -euo pipefail"]
    for name in ("etc", "opt", "usr", "var"):
        upper, work = folder / name, folder / "work" / name
        options = f"lowerdir=/{name},upperdir={upper},workdir={work}"
        lines += [f"mkdir -p {upper} {work}", f"mount -t overlay overlay -o {options} /{name}"]
    return "\n".join(lines)


def connect(bridge: str, namespace: str, link: str, address: str) -> None:
    """Makes a network namespace with this address on a bridge."""
    do("ip", "netns", "add", namespace)
    do("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    do("ip", "link", "set", link, "master", bridge, "up")
    for command in (f"address add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
        do("ip", "-n", namespace, *command.split())


class Box:
    """A namespace whose process 1 runs a shell script until the box is switched off."""

    def __init__(self, bridge: Bridge, number: int, folder: Path, script: str):
        """`folder`: of the box's own files. `script`: mounts what the box has instead of this machine's, and waits."""
        self.folder, self.address = folder, f"{SUBNET}.{number}"
        self._namespace = f"{bridge.name}b{number}"
        connect(bridge.name, self._namespace, f"{bridge.name}w{number}", self.address)
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(folder / "console.log", "wb") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, *apart, "bash", "-euc", script], stdout=log, stderr=log,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def init(self) -> int:
        """Returns the process id of the script."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        (init,) = wait_until(lambda: children.read_text().split())
        return int(init)

    def prefix(self) -> tuple[str, ...]:
        """Returns words of a command that becomes what follows it, in the box."""
        return ("nsenter", f"--target={self.init()}", "--mount", "--net", "--pid")

    def processes(self) -> list[str]:
        """Returns the command of each Python program in the box."""
        listed = do(*self.prefix(), "bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; echo")
        return [word for word in listed.split() if word.endswith(("/python", "main.py", "/keep"))]

    def is_idle(self) -> bool:
        """Returns whether no Python program runs in the box."""
        return not self.processes()

    def kill_all(self) -> None:
        """Ends every process of the fleet at once, as a power failure does."""
        mine = "grep -lsz ^APEX_JAX_FLEET= /proc/[0-9]*/environ | cut -d / -f 3 | xargs kill -KILL"
        do(*self.prefix(), "bash", "-c", mine)

    def exit_code(self) -> int | None:
        """Returns the exit code of the script; None if it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Waits until the script has ended."""
        self._process.wait(seconds)

    def switch_off(self) -> None:
        self._process.kill()  # --kill-child: its process 1 goes, and so all of its namespace
        self._process.wait()
        subprocess.run(["ip", "netns", "delete", self._namespace], capture_output=True)


def sshd(folder: Path, key: Path) -> str:
    """Returns the script of a box with sshd, whose root has a home of his own, and with it the .venv of these tests."""
    home, config = folder / "home", folder / "sshd_config"
    home.mkdir(parents=True)
    (folder / "passwd").write_text(f"root:x:0:0::{home}:/bin/bash\nsshd:x:105:65534::/run/sshd:/usr/sbin/nologin\n")
    do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host_key")
    config.write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {key}.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        "PermitRootLogin yes\nSetEnv JAX_PLATFORMS=cpu\n"
    )
    return (
        f"mount --bind {shlex.quote(str(folder / 'passwd'))} /etc/passwd; mkdir -p /run/sshd\n"
        f"exec {shutil.which('sshd', path='/usr/sbin:/usr/bin')} -D -e -f {shlex.quote(str(config))}"
    )


def give_venv(folder: Path) -> None:
    """Makes a .venv that `make train` takes for one of its own, from that of these tests: boxes have no internet."""
    (folder / ".venv").mkdir(parents=True)
    for name in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(VENV / name)
    for name in ("created", "requirements.installed"):
        (folder / ".venv" / name).touch()
