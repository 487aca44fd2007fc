"""deploy/ssh: what it refuses, and a fleet on three machines, which are namespaces with sshd (needs root)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.tests.boxes import Box, Bridge, do, give_venv, sshd
from deploy.tests.tools import DEPLOY
from tests.rigs.processes import checkpoints, values, wait_until

FLEET = DEPLOY / "ssh/fleet"
HOSTS = {"box1": "[replay, learner, evaluator]", "box2": "[actor]", "box3": "[actor]"}
OFTEN = "metrics_interval_seconds=0.5 evaluator.interval_seconds=1 actor.environments=8"
RUN = "home/apex_jax_fleet/runs/Catch-v0-1"

pytestmark = pytest.mark.deploy


def fleet(file: Path, *action: str) -> tuple[int, str]:
    """Runs the command with the ssh beside the file, if there is one; returns its exit code and output."""
    environment = {**os.environ, "PATH": f"{file.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, str(FLEET), str(file), *action], env=environment, text=True, timeout=400, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def describe(file: Path, settings: str) -> Path:
    hosts = "".join(f"  {name}: {roles}\n" for name, roles in HOSTS.items())
    file.write_text(f"arguments: --config catch {OFTEN} {settings}\nhosts:\n{hosts}")
    return file


@pytest.mark.quick
@pytest.mark.parametrize(("text", "line"), [
    ("hosts: {a: [replay, learner, actor], b: [player]}", "its hosts the roles replay, learner, evaluator, actor"),
    ("hosts: {a: [replay, learner]}", "must have one replay, one learner and at least one actor"),
    ("hosts: {a: [replay, replay, learner, actor]}", "must have one replay, one learner"),
    ("hosts: {a: [replay, learner, actor]}\nuser: me", "it may have the keys hosts, arguments, "),
    ("hosts: {a: [replay, learner, actor]}\nfolder: /", "folder must consist of letters"),
    ("hosts: {-oProxyCommand=x: [replay, learner, actor]}", "no host may begin with -"),
    ("hosts: {a: [replay, learner, actor, evaluator], b: [evaluator]}", "one evaluator at most"),
    ("hosts: {a: [replay, learner, actor]}\ngpu: [b]", "may name hosts of the fleet only, not b"),
    ("hosts: {a: [replay, learner, actor]}\naddresses: {c: 10.0.0.1}", "may name hosts of the fleet only, not c"),
    ("hosts: [", "while parsing"),
    ("", "NoneType"),
])  # fmt: skip
def test_file_that_is_no_fleet_is_refused_in_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "lab.yaml").write_text(text)
    code, said = fleet(tmp_path / "lab.yaml", "start")
    assert code == 2
    assert said.startswith(f"error: {tmp_path}/lab.yaml: ")
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.quick
def test_wrong_argument_is_refused_before_any_host_is_asked(tmp_path: Path) -> None:
    code, said = fleet(describe(tmp_path / "lab.yaml", "seed=-1"), "start")
    assert (code, said.count("\n")) == (2, 1)
    assert "seed=-1" in said


@pytest.mark.quick
def test_hosts_with_one_home_folder_have_folders_of_their_own(tmp_path: Path) -> None:
    text = (DEPLOY / "ssh/on_host").read_text()

    def folder_of(host: str) -> str:
        variables = {**os.environ, "HOME": str(tmp_path), "HOSTNAME": host}
        command = ["bash", "-c", f"{text}\npwd", "on_host", "fleet"]
        return Path(subprocess.check_output(command, env=variables, text=True).strip()).name

    assert [folder_of(host) for host in ("a", "b", "a", "b")] == ["fleet", "fleet-b", "fleet", "fleet-b"]


@pytest.mark.quick
def test_status_hands_options_on_and_names_a_host_that_ssh_cannot_reach(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text('#!/bin/sh\n[ "$1" = -G ] && echo "hostname $2" && exit\nexit 255\n')
    (tmp_path / "ssh").chmod(0o755)
    code, said = fleet(describe(tmp_path / "lab.yaml", ""), "status", "--json")
    assert code == 1, said
    assert all(f"{host}: error: ssh failed, exit code 255" in said for host in HOSTS)
    assert '"ipc://' in said, "a JSON object by address"


FAKE_SSH = """#!/bin/bash
[ "$1" = -G ] && echo "hostname $2" && exit
host=$2; cd {folder}; echo >> "$host.tries"; touch "$host.open"; ls | grep -c 'open$' >> counts
sleep 0.3; rm "$host.open"
[ "$(wc -l < "$host.tries")" -gt {failures} ] && echo stopped || exit {code}
"""


@pytest.mark.quick
@pytest.mark.parametrize(("code", "failures", "tries", "exit_code"), [(255, 2, 3, 0), (255, 3, 3, 1), (1, 1, 1, 1)])
def test_connection_that_failed_is_tried_three_times_and_eight_are_open_at_most(
    tmp_path: Path, code: int, failures: int, tries: int, exit_code: int
) -> None:
    (tmp_path / "ssh").write_text(FAKE_SSH.format(folder=tmp_path, failures=failures, code=code))
    (tmp_path / "ssh").chmod(0o755)
    roles = {"host-0": "[replay, learner]"} | {f"host-{i}": "[actor]" for i in range(1, 12)}
    (tmp_path / "lab.yaml").write_text("hosts:\n" + "".join(f"  {name}: {its}\n" for name, its in roles.items()))
    ended, said = fleet(tmp_path / "lab.yaml", "stop")
    assert ended == exit_code, said
    assert all(f"{host}: {f'error: exit code {code}' if exit_code else 'stopped'}\n" in said for host in roles)
    assert {len((tmp_path / f"{host}.tries").read_text().splitlines()) for host in roles} == {tries}
    assert max(map(int, (tmp_path / "counts").read_text().split())) <= 8


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[dict[str, Box]]:
    if os.geteuid() != 0:
        pytest.skip("needs root: machines are namespaces")
    if shutil.which("sshd", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("sshd is not installed (Debian: apt install openssh-server)")
    key, config = tmp_path / "key", tmp_path / "config"
    do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    with Bridge() as bridge:
        boxes = {}
        try:
            for number, name in enumerate(HOSTS, 21):
                folder = tmp_path / name
                script = sshd(folder, key)
                give_venv(folder / "home/apex_jax_fleet/code")
                boxes[name] = Box(bridge, number, folder, script)
            aliases = "".join(f"Host {name}\n  HostName {box.address}\n" for name, box in boxes.items())
            config.write_text(
                f"{aliases}Host *\n  IdentityFile {key}\n  UserKnownHostsFile {tmp_path}/known\n"
                "  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
            )
            (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
            (tmp_path / "ssh").chmod(0o755)
            yield boxes
        finally:
            for box in boxes.values():
                box.switch_off()


@pytest.mark.timeout(1500)
def test_fleet_of_three_machines_survives_the_loss_of_each_is_stopped_and_resumes_to_its_end(
    lab: dict[str, Box], tmp_path: Path
) -> None:
    file, run = describe(tmp_path / "lab.yaml", "total_updates=0"), lab["box1"].folder / RUN

    def updates() -> float:
        return max(values(run, "learner", "learner/updates"), default=0.0)

    def wait_for_progress() -> None:
        before = updates()
        wait_until(lambda: updates() > before + 100)
        wait_until(lambda: values(run, "replay", "replay/actors")[-1:] == [2.0])

    assert fleet(file, "start")[0] == 0
    keys = lab["box2"].folder / "home/apex_jax_fleet/keys"
    assert [path.name for path in keys.glob("*.secret")] == ["actor.secret"]
    wait_for_progress()
    wait_until(lambda: fleet(file, "status")[0] == 0)
    _, said = fleet(file, "status")
    assert all(name in said for name in ("replay", "learner", "evaluator", "actor-0", "actor-1"))

    for name, box in lab.items():
        before = checkpoints(run)
        box.kill_all()
        wait_until(box.is_idle)  # a killed process ends a moment later
        if name == "box1":
            assert fleet(file, "status")[0] == 1
        code, said = fleet(file, "start")
        started, ran = (3, 2) if name == "box1" else (1, 4)
        assert (code, said.count("is started"), said.count("runs already")) == (0, started, ran)
        wait_for_progress()
        assert checkpoints(run) >= before

    learned = updates()
    code, said = fleet(file, "stop")
    assert (code, sorted(said.splitlines())) == (0, [f"{name}: no role runs" for name in sorted(HOSTS)])
    assert [box.processes() for box in lab.values()] == [[], [], []]
    assert checkpoints(run)[-1] >= learned

    limit = checkpoints(run)[-1] + 500
    assert fleet(describe(file, f"total_updates={limit}"), "start")[0] == 0
    wait_until(lambda: not any(box.processes() for box in lab.values()))
    assert checkpoints(run)[-1] >= limit
    assert "box1: logs/learner.log ends with" in fleet(file, "status")[1]
    assert fleet(file, "start")[0] == 0, "a run that is over ends again, its actors, too"
    wait_until(lambda: not any(box.processes() for box in lab.values()))
    assert values(run, "evaluator", "eval/updates")[-1] >= limit
    logs = [path.read_text() for box in lab.values() for path in (box.folder / "home/apex_jax_fleet/logs").iterdir()]
    assert not any("Traceback" in log for log in logs)
