"""provision.sh, and the smoke test of what it has installed, for real."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.tests.boxes import overlays
from deploy.tests.test_scripts import PROVISION, SMOKE_TEST, say

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount namespace")
def test_provision_installs_a_version_that_runs_and_a_second_time_changes_nothing(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    commit = say("git", "rev-parse", "HEAD")[1].strip()
    archive = tmp_path / "apex-jax.tar.gz"
    assert say("git", "archive", "--format=tar.gz", "-o", str(archive), commit)[0] == 0
    provision = f"bash {PROVISION} {archive}"
    script = f"""
mount -t tmpfs -o size=6g none {room} # in a mount namespace, whose changes nobody else sees
{overlays(room)}
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
(! bash {PROVISION} main.py) 2>&1 | grep -q "^error: main.py is not of git archive"

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
