"""The scripts that make images: provision.sh for real, the others with stand-ins."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.tests.test_scripts import PROVISION, SMOKE_TEST, say
from deploy.tests.tools import COMMIT, DEPLOY

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

# In a mount namespace, whose changes nobody else sees.
OVERLAY = """
set -euo pipefail
mount -t tmpfs -o size=6g none "$1/room"
for folder in etc opt var usr; do
    upper=$1/room/$folder/upper work=$1/room/$folder/work
    mkdir -p "$upper" "$work"
    mount -t overlay overlay -o "lowerdir=/$folder,upperdir=$upper,workdir=$work" "/$folder"
done
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount namespace")
def test_provision_installs_a_version_that_runs_and_a_second_time_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    commit = say("git", "rev-parse", "HEAD")[1].strip()
    archive = tmp_path / "apex-jax.tar.gz"
    assert say("git", "archive", "--format=tar.gz", "-o", str(archive), commit)[0] == 0
    repository = tmp_path / "repository"
    assert say("git", "clone", "-q", "--bare", ".", str(repository))[0] == 0
    provision = f"bash {PROVISION} --source {archive} --commit {commit}"
    script = f"""{OVERLAY}
made() {{ # with the time of each change
    find /opt/apex-jax /etc /var/lib/apex-jax /var/log/apex-jax -printf '%p %l %m %U %G %s %T@\\n' | sort
}}
{provision}
made >$1/first
{provision}
made >$1/second
diff $1/first $1/second
test "$(readlink /opt/apex-jax/current)" = /opt/apex-jax/versions/{commit}
test "$(stat -c '%a %U' /etc/apex-jax/keys)" = '700 apex-jax'
test -f /etc/systemd/system/apex-jax@.service
bash {SMOKE_TEST}
! bash {PROVISION} --source {archive} --commit {COMMIT}
(cd {repository} && ! bash {PROVISION} --source . --commit {COMMIT}) 2>&1 | grep -q "^error: {repository} has no commit"

opens_gpu=/etc/systemd/system/apex-jax@learner.service.d/gpu.conf
test ! -e $opens_gpu
touch /opt/apex-jax/current/.venv/installed-requirements-gpu.txt # several gigabytes
{provision} --gpu && test -e $opens_gpu
{provision} && test ! -e $opens_gpu

log=/var/log/apex-jax/actor.log
echo "a line" >$log # as root, as systemd opens it
logrotate --force --state $1/logrotate /etc/logrotate.d/apex-jax
test ! -s $log && test "$(cat $log.1)" = "a line"
"""
    code, said = say("unshare", "--mount", "bash", "-c", script, "provision", str(tmp_path), seconds=850)
    assert code == 0, said
    assert f"commit {commit} is installed" in said
    assert "smoke test passed" in said
    assert f"is of commit {commit}, not of {COMMIT}" in said


def programs(folder: Path, **lines: str) -> str:
    """Makes stand-ins for programs; returns the PATH that finds them first."""
    folder.mkdir(exist_ok=True)
    for name, line in lines.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    return f"PATH={folder}:{os.environ['PATH']}"


class Tried(NamedTuple):
    """The commands that the test of an image ran by systemd."""

    properties: list[str]
    command: list[str]


NOT_HARDENING = {
    "Type", "RemainAfterExit", "EnvironmentFile", "ExecStart", "ExecStopPost", "StandardOutput", "StandardError",
    "Restart", "RestartSec", "RestartPreventExitStatus", "SuccessExitStatus", "TimeoutStartSec", "WatchdogSec",
    "NotifyAccess", "KillSignal", "KillMode", "TimeoutStopSec",
}  # fmt: skip


def hardening(*files: str) -> list[str]:
    """Returns the lines of units that say what their process may do."""
    text = "".join((DEPLOY / "systemd" / file).read_text().partition("[Service]")[2] for file in files)
    lines = re.findall(r"^\w+=.*$", re.sub(r"\[Install\]\n(\w+=.*\n)*", "", text), re.MULTILINE)
    return [line for line in lines if line.partition("=")[0] not in NOT_HARDENING]


def smoke_test(folder: Path, gpu_answer: int = 0) -> tuple[int, str, list[str]]:
    """Runs the test of an image with stand-ins for all programs; returns exit code, last line, and the calls."""
    units, called, root = DEPLOY / "systemd", folder / "called", folder / "root"
    role = f"{units}/apex-jax@.service"
    path = programs(
        folder / "bin",
        systemctl=f"""[ "$1" = cat ] || {{ echo systemctl "$@" >>{called}; exit; }}
case $2 in
    apex-jax@learner.service) cat {role} {units}/apex-jax@learner.service.d/gpu.conf ;;
    apex-jax@*) cat {role} ;;
    *) cat {units}/"$2" ;;
esac""",
        systemd_run=f'''for word in systemd-run "$@"; do echo "$word"; done >>{called}
case "$*" in *JAX_PLATFORMS=cuda*) exit {gpu_answer} ;; esac
while [ "${{1#--}}" != "$1" ]; do shift; done
exec "$@"''',
        nvidia_smi=f"echo nvidia-smi >>{called}",
        runuser='shift 3; exec "$@"',
        chown="",
        install='for last; do :; done; touch "$last"',
    )
    for place in ("run/systemd/system", "opt/apex-jax/current/.venv/bin", "etc/apex-jax/keys", "var/lib/apex-jax"):
        (root / place).mkdir(parents=True)
    making = 'for word; do case $word in run_directory=*) mkdir -p "${word#*=}/checkpoints/1" ;; esac; done'
    programs(root / "opt/apex-jax/current/.venv/bin", python=making)
    script = re.sub(r"/(opt/apex-jax|run/systemd|etc/apex-jax|var/lib/apex-jax)", rf"{root}/\1", SMOKE_TEST.read_text())
    code, said = say("env", path, "bash", "-c", script, "smoke_test", "--gpu")
    left = [path for place in ("etc/apex-jax/keys", "var/lib/apex-jax") for path in (root / place).iterdir()]
    assert left == []
    return code, said.splitlines()[-1] if said else "", called.read_text().splitlines()


def tried(called: list[str]) -> list[Tried]:
    """Returns the commands that systemd has run, in order."""
    found: list[Tried] = []
    for line in called:
        if line == "systemd-run":
            found.append(Tried([], []))
        elif line.startswith("--property="):
            found[-1].properties.append(line.removeprefix("--property="))
        elif found and not line.startswith("--"):
            found[-1].command.append(line)
    return found


def test_image_is_tried_under_the_hardening_of_each_unit(tmp_path: Path) -> None:
    code, said, called = smoke_test(tmp_path)
    assert (code, said) == (0, "smoke test passed")
    services = {path.name for path in (DEPLOY / "systemd").glob("*.service")}
    assert len(services) == 5
    for files in (*((name,) for name in services), ("apex-jax@.service", "apex-jax@learner.service.d/gpu.conf")):
        commands = [one.command for one in tried(called) if one.properties == hardening(*files)]
        assert commands, f"nothing is run as {files} would run it"
        assert all(commands)
    assert "systemctl stop apex-jax@actor.service" in called  # as a spot notice does
    assert {"User=apex-jax", "NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectKernelModules=yes"} <= {
        *hardening("apex-jax@.service")
    }


def test_gpu_of_an_image_is_tried_under_the_hardening_of_the_learner(tmp_path: Path) -> None:
    _, _, called = smoke_test(tmp_path)
    properties = tried(called)[0].properties
    assert [one for one in properties if one.startswith("PrivateDevices=")] == [
        "PrivateDevices=yes",
        "PrivateDevices=no",
    ]
    assert "ExecStartPre=+/usr/bin/nvidia-modprobe -c 0 -u" in properties
    before = called[: called.index("nvidia-smi")]  # which makes the devices, too
    assert len(tried(before)) == 1


def test_image_whose_gpu_fails_is_not_kept(tmp_path: Path) -> None:
    code, said, _ = smoke_test(tmp_path, gpu_answer=1)
    assert (code, said) == (1, "")


def test_agent_is_restarted_until_packer_has_connected(tmp_path: Path) -> None:
    path = programs(
        tmp_path,
        sleep='test "$1" = 90',
        pgrep=f'echo x >>{tmp_path}/asked; test "$(wc -l <{tmp_path}/asked)" = 3',
        systemctl=f'echo "$@" >>{tmp_path}/told; exit 5',  # one of the two is not there
    )
    assert say("env", path, "bash", str(DEPLOY / "packer/wake_agent.sh")) == (0, "")
    units = ["snap.amazon-ssm-agent.amazon-ssm-agent.service", "amazon-ssm-agent.service"]
    assert (tmp_path / "told").read_text().splitlines() == [f"try-restart {unit}" for unit in units * 2]
