"""Process 1 of a host in a namespace; imitates the parts of cloud-init and systemd that this project uses.

    python -m deploy.tests.init FOLDER TIMER_SECONDS

FOLDER holds user-data, extra-environment (what only the test's host has: where its AWS is), hosts (its /etc/hosts) and
image/ (what provision.sh has changed). Overlays make the host's own /etc, /opt, /usr and /var of it. User data is
carried out; units start as their files say: user, environment, working directory, command line, output, restart.
Hardening is not imitated. SIGTERM is a shutdown; SIGKILL is the end of the instance, and of all its processes with it.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

FOLDERS = ("etc", "opt", "usr", "var")
UNITS = Path("/etc/systemd/system")
REQUESTS = Path("/var/tmp/systemctl")  # where the stand-in for systemctl leaves what it is asked
SYSTEMCTL = f"""#!/bin/sh
if [ "$1" = show ]; then cat "{REQUESTS}.$2"; exit; fi
echo "$@" >>{REQUESTS}
"""


class Unit:
    """One .service file, and its process."""

    def __init__(self, name: str):
        self.name = name
        template, _, instance = name.partition("@")
        path = UNITS / (f"{template}@.service" if instance else name)
        self._role = instance.removesuffix(".service")
        self._settings = re.findall(r"^([A-Za-z]+)=(.*)$", path.read_text(), re.MULTILINE)
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = "not started"

    def values(self, key: str) -> list[str]:
        return [value.replace("%i", self._role) for found, value in self._settings if found == key]

    def value(self, key: str, default: str = "") -> str:
        return [default, *self.values(key)][-1]

    def run(self) -> None:
        """Runs the unit until it has ended for good."""
        if self.value("Type") == "oneshot":
            while self.execute("ExecStart") != 0 and self.value("Restart") == "on-failure":
                time.sleep(1.0)
            return
        while not self._stopping.is_set():
            code = self.execute("ExecStartPre") or self.execute("ExecStart")
            self.execute("ExecStopPost")
            print(f"{self.name} has ended: {self._ended}", flush=True)
            shown = f"ActiveState=inactive\nExecMainCode=1\nExecMainStatus={code}\n"
            Path(f"{REQUESTS}.{self.name}").write_text(shown)
            successes, final = (
                {"0", *self.value(key).split()} for key in ("SuccessExitStatus", "RestartPreventExitStatus")
            )
            if str(code) in successes or (str(code) in final and code != 0):
                break
            self._stopping.wait(float(self.value("RestartSec", "1")))

    def stop(self) -> None:
        self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(getattr(signal, self.value("KillSignal", "SIGTERM")))

    def execute(self, key: str) -> int:
        """Runs the command line of a key, if there is one; returns its exit code, as a shell would show it."""
        code = 0
        for line in self.values(key):
            environment = self.environment()
            output = self.value("StandardOutput").removeprefix("append:") or f"/var/log/{self.name}.log"
            with open(output, "ab") as log:
                process = subprocess.Popen(
                    words(line.lstrip("-+!"), environment),
                    cwd=self.value("WorkingDirectory", "/"),
                    env={"PATH": os.environ["PATH"], **environment},
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    umask=int(self.value("UMask", "022"), 8),
                    **identity(self.value("User", "root")),
                )
            if key == "ExecStart":
                self._process = process
                if self._stopping.is_set():
                    self.stop()
            code = process.wait()
            if key == "ExecStart":
                self._ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            code = 128 - code if code < 0 else code
            if code and not line.startswith("-"):
                return code
        return code

    def environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in self.values("EnvironmentFile"):
            found |= dict(re.findall(r'^(\w+)="(.*)"$', Path(path).read_text(), re.MULTILINE))
        return found


def words(line: str, environment: dict[str, str]) -> list[str]:
    """Splits a command line as systemd does: $NAME alone becomes many words, ${NAME} stays within its own."""
    found: list[str] = []
    for word in shlex.split(line):
        if re.fullmatch(r"\$\w+", word):
            found += environment.get(word[1:], "").split()
        else:
            found.append(re.sub(r"\$\{(\w+)\}", lambda match: environment.get(match[1], ""), word))
    return found


def identity(user: str) -> dict[str, Any]:
    """Returns the arguments of Popen that make the process this user's."""
    if user == "root":
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


class Init:
    """Starts and restarts units as they are asked for, and ends them at shutdown."""

    def __init__(self, timer_seconds: float) -> None:
        self._timer_seconds = timer_seconds
        self._started: dict[str, tuple[Unit, threading.Thread]] = {}
        self._ending = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._ending.set())

    def run(self) -> None:
        done = 0
        while not self._ending.is_set():
            lines = REQUESTS.read_text().splitlines() if REQUESTS.exists() else []
            for line in lines[done:]:
                action, *rest = line.split()
                names = [word for word in rest if not word.startswith("--")]
                for name in names:
                    {"enable": self.start, "restart": self.restart}[action](name)
            done = len(lines)
            self._ending.wait(0.1)
        for name in list(self._started):
            self._end(name)

    def start(self, name: str) -> None:
        if name.endswith(".timer"):
            threading.Thread(target=self._repeat, args=(name.replace(".timer", ".service"),), daemon=True).start()
            return
        unit = Unit(name)
        thread = threading.Thread(target=self._after_required, args=(unit,))
        self._started[name] = (unit, thread)
        thread.start()

    def restart(self, name: str) -> None:
        """Restarts the unit and the units that require it."""
        for one in [one for one, (unit, _) in self._started.items() if name in (one, *unit.values("Requires"))]:
            self._end(one)
            self.start(one)

    def _end(self, name: str) -> None:
        unit, thread = self._started[name]
        unit.stop()
        thread.join(float(unit.value("TimeoutStopSec", "90")))

    def _after_required(self, unit: Unit) -> None:
        for required in unit.values("Requires"):
            Unit(required).run()
        unit.run()

    def _repeat(self, name: str) -> None:
        while not self._ending.wait(self._timer_seconds):
            Unit(name).run()


def mount(folder: Path) -> None:
    """Mounts separate /etc, /opt, /usr and /var in this mount namespace."""
    for name in FOLDERS:
        upper, work, image = folder / "own" / name, folder / "work" / name, folder / "image" / name
        upper.mkdir(parents=True)
        work.mkdir(parents=True)
        options = f"lowerdir={image}:/{name},upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, f"/{name}"], check=True)
    subprocess.run(["mount", "--bind", folder / "hosts", "/etc/hosts"], check=True)


def carry_out(user_data: Path, extra_environment: str) -> None:
    """Imitates cloud-init: writes files and runs commands."""
    import yaml

    data = yaml.safe_load(user_data.read_text())
    for file in data["write_files"]:
        path = Path(file["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        more = extra_environment if path.name == "environment" else ""
        path.write_text(file["content"] + more)
        path.chmod(int(file["permissions"], 8))
        subprocess.run(["chown", file["owner"], path], check=True)
    systemctl = Path("/usr/bin/systemctl")
    systemctl.unlink()
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    for command in data["runcmd"]:
        if os.path.exists(command[0]) or command[0] == "systemctl":  # there is no log agent
            subprocess.run(command, check=True)


def main() -> None:
    folder = Path(sys.argv[1])
    mount(folder)
    init = Init(float(sys.argv[2]))
    carry_out(folder / "user-data", (folder / "extra-environment").read_text())
    init.run()


if __name__ == "__main__":
    main()
