"""A real Slurm cluster on this machine: munged, slurmctld, and nodes in namespaces of their own (needs root)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import IO

from deploy.tests.boxes import GATEWAY, SUBNET, Bridge, connect
from tests.rigs.processes import ROOT, wait_until

NODES = {f"node{i}": f"{SUBNET}.{10 + i}" for i in (1, 2, 3)}
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "nsenter", "ip")
LOST_SECONDS = 10  # after which a node that does not answer is down, instead of Slurm's 300
REQUEUE_SECONDS = 5  # pause before a requeued job may start again, instead of Slurm's 120
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({gateway})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue}
SlurmctldPort=26817
SlurmdPort=26818
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
ReturnToService=2
SlurmdTimeout={lost}
"""


def missing() -> str:
    """Returns what this machine lacks for a cluster; empty if nothing."""
    if os.geteuid() != 0:
        return "needs root: nodes are namespaces"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(absent)} not installed (Debian: apt install slurm-wlm munge)" if absent else ""


class Cluster:
    """The daemons; a node is a network, mount, process and host name namespace, and shares the file system."""

    def __init__(self, folder: Path, bridge: Bridge):
        self._folder, self._bridge = folder, bridge
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "JAX_PLATFORMS": "cpu"}

    def __enter__(self) -> Cluster:
        folder, host = self._folder, socket.gethostname().partition(".")[0]
        (folder / "state").mkdir()
        names = ["127.0.0.1 localhost", f"{GATEWAY} {host}", *(f"{address} {node}" for node, address in NODES.items())]
        (folder / "hosts").write_text("\n".join(names) + "\n")
        cores = os.cpu_count()
        lines = [f"NodeName={node} NodeAddr={address} CPUs={cores}" for node, address in NODES.items()]
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        text = CONFIGURATION.format(
            host=host, gateway=GATEWAY, folder=folder, lost=LOST_SECONDS, requeue=REQUEUE_SECONDS
        )
        (folder / "slurm.conf").write_text(text + "\n".join(lines) + "\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{name}={folder}/munge.{suffix}" for name, suffix in (
            ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"),
        )]  # fmt: skip
        self._start("munged", "munged", "--foreground", "--force", *files)
        wait_until((folder / "munge.socket").exists, 20)
        self._start("slurmctld", "slurmctld", "-D", "-i", "-f", str(folder / "slurm.conf"))
        for node in NODES:
            connect(self._bridge.name, self._namespace(node), f"{self._bridge.name}s{node[-1]}", NODES[node])
            self.boot(node)
        wait_until(lambda: self.run("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(NODES), 60)
        return self

    def __exit__(self, *_: object) -> None:
        for name, process in reversed(self._processes.items()):
            if name in NODES:
                self.kill(name)
                subprocess.run(["ip", "netns", "delete", self._namespace(name)], capture_output=True)
            else:
                process.send_signal(signal.SIGTERM)
                process.wait(20)

    def boot(self, node: str) -> None:
        """Starts a node's slurmd as the process 1 of its namespaces."""
        slurmd = f"exec slurmd -D -N {node} -f {self._folder}/slurm.conf"
        prepare = f"hostname {node} && mount --bind {self._folder}/hosts /etc/hosts"
        # Not `ip netns exec`, which mounts another /sys, without the cgroups that slurmd looks for.
        within = ["nsenter", f"--net=/run/netns/{self._namespace(node)}"]
        apart = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        self._start(node, *within, *apart, "bash", "-c", f"{prepare} && {slurmd}")

    def kill(self, node: str) -> None:
        """Kills a node with all its processes, as a power failure does."""
        process = self._processes[node]
        process.kill()  # --kill-child: its process 1 goes, and so all of its namespace
        process.wait()

    def run(self, *command: str) -> str:
        """Runs a command of Slurm as a user does, in the root of the checkout; returns its output."""
        done = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Returns the fields of a job, such as JobState and ExitCode."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait_for_state(self, number: str, state: str, seconds: float = 180) -> dict[str, str]:
        """Waits until a job has a state; returns its fields."""
        until = time.monotonic() + seconds
        while (fields := self.job(number))["JobState"] != state:
            assert time.monotonic() < until, f"{fields}\n{self.log()}"
            time.sleep(0.5)
        return fields

    def log(self) -> str:
        """Returns the last lines of all daemons."""
        logs = sorted(self._folder.glob("*.out"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def _namespace(self, node: str) -> str:
        return f"{self._bridge.name}{node}"

    def _start(self, name: str, *command: str) -> None:
        output: IO[bytes]
        with open(self._folder / f"{name}.out", "ab") as output:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment
            )
