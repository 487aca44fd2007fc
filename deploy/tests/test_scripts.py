"""Scripts, units and user data: checked by their own tools, and run if this machine can."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.tests.tools import DEPLOY, rendered_user_data
from tests.rigs.processes import ROOT

pytestmark = [pytest.mark.deploy, pytest.mark.quick, pytest.mark.timeout(900)]

PROVISION, SMOKE_TEST = DEPLOY / "provision.sh", DEPLOY / "smoke_test.sh"
SCRIPTS = [
    PROVISION,
    SMOKE_TEST,
    *(DEPLOY / name for name in ("healthy", "keep", "slurm/apex_jax.sbatch", "ssh/on_host")),
]
UNITS = sorted([*(DEPLOY / "systemd").glob("*.service"), *(DEPLOY / "systemd").glob("*.timer")])
ROLES = ("replay", "learner", "actor", "evaluator")


def say(*command: str, seconds: float = 60, cwd: Path = ROOT) -> tuple[int, str]:
    """Runs a command; returns its exit code and output."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, cwd=cwd, check=False
    )
    return done.returncode, done.stdout


def tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed here")
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_clean(script: Path) -> None:
    taste = "--exclude=SC2154,SC2250,SC2292,SC2310,SC2312"  # optional checks that are not followed here
    assert say(tool("shellcheck"), "--enable=all", taste, str(script)) == (0, "")
    assert script.stat().st_mode & 0o100


@pytest.mark.parametrize(("arguments", "line"), [
    ((), "error: the first argument is no file"),
    ((".",), "error: the first argument is no file"),
    (("main.py", "--verbose"), "error: unknown argument --verbose"),
])  # fmt: skip
def test_provision_refuses_invalid_arguments(arguments: tuple[str, ...], line: str) -> None:
    code, said = say("bash", str(PROVISION), *arguments)
    assert code == 2
    assert said.startswith(line)
    assert said.count("\n") == 1


@pytest.fixture(scope="module")
def unit_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root directory with the units and their programs, for systemd-analyze."""
    root = tmp_path_factory.mktemp("root")
    units = root / "etc/systemd/system"
    units.mkdir(parents=True)
    for path in (DEPLOY / "systemd").iterdir():
        if path.is_dir():
            shutil.copytree(path, units / path.name)
        elif path.suffix in (".service", ".timer"):
            known = re.sub("^Restart(Steps|MaxDelaySec)=.*\n", "", path.read_text(), flags=re.MULTILINE)  # since 254
            (units / path.name).write_text(known)
    programs = root / "opt/apex-jax/current/.venv/bin"
    for path in (programs / "python", root / "usr/bin/nvidia-modprobe", root / "bin/sh"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    return root


@pytest.mark.parametrize("role", ROLES)
def test_units_pass_systemd_analyze_verify(unit_root: Path, role: str) -> None:
    analyze = tool("systemd-analyze")
    system = Path("/lib/systemd/system")
    target = unit_root / "lib/systemd/system"
    if not target.exists():
        target.mkdir(parents=True)
        for name in ("network-online.target", "multi-user.target", "timers.target", "sysinit.target", "basic.target"):
            shutil.copy(system / name, target)
    names = [path.name.replace("@.", f"@{role}.") for path in UNITS]
    code, said = say(analyze, "verify", "--man=no", "--recursive-errors=no", f"--root={unit_root}", *names)
    assert (code, [line for line in said.splitlines() if "apex-" in line]) == (0, []), said


def setting(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", (DEPLOY / "systemd" / unit).read_text(), re.MULTILINE)


def test_every_gpu_that_the_driver_has_found_is_opened(tmp_path: Path) -> None:
    _, script = shlex.split(setting("apex-jax@learner.service.d/gpu.conf", "ExecStartPre")[1])[1:]
    for minor, place in enumerate(("0000:31:00.0", "0000:37:00.0")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "information").write_text(
            f"Model: \t NVIDIA L4\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        )
    script = script.replace("/proc/driver/nvidia/gpus", str(tmp_path)).replace("/usr/bin/nvidia-modprobe", "echo")
    assert say("sh", "-c", script) == (0, "-c 0 -c 1\n")


def test_every_program_that_a_unit_starts_is_there() -> None:
    for path in UNITS:
        for module in re.findall(r"-m (deploy\.\S+)", path.read_text()):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), f"{path.name}: {module}"


# --- user data, as Terraform renders it ---


@pytest.fixture(scope="module")
def user_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return rendered_user_data(tmp_path_factory.mktemp("render"), 'bucket = "my-results"', 'settings = { seed = "3" }')


@pytest.mark.terraform
@pytest.mark.parametrize("role", ROLES)
def test_user_data_has_the_settings_that_the_unit_needs(user_data: dict[str, str], role: str) -> None:
    assert user_data[role].startswith("#cloud-config\n")
    data = yaml.safe_load(user_data[role])
    files = {file["path"]: file for file in data["write_files"]}
    assert set(files) == {"/etc/apex-jax/environment", "/opt/aws/amazon-cloudwatch-agent/etc/apex-jax.json"}
    assert files["/etc/apex-jax/environment"]["permissions"] == "0640"
    environment = dict(re.findall(r'^(\w+)="(.*)"$', files["/etc/apex-jax/environment"]["content"], re.MULTILINE))
    assert environment["APEX_JAX_ROLE"] == role
    assert f"{role}.secret" in environment["APEX_JAX_KEY_FILES"].split()
    assert yaml.safe_load(files["/opt/aws/amazon-cloudwatch-agent/etc/apex-jax.json"]["content"])["logs"]
    assert ["systemctl", "enable", "--now", "--no-block", f"apex-jax@{role}.service"] in data["runcmd"]
    *starts, last = data["runcmd"]
    assert "amazon-cloudwatch-agent-ctl" in last[0]  # an agent that hangs keeps no role from starting
    started = {name.replace(f"@{role}", "@") for _, _, _, _, name in starts}
    assert started <= {path.name for path in UNITS}


@pytest.mark.terraform
@pytest.mark.parametrize("role", ROLES)
def test_output_of_every_unit_of_a_host_is_collected(user_data: dict[str, str], role: str) -> None:
    """A host that Session Manager cannot reach can only be diagnosed by this."""
    files = {file["path"]: file["content"] for file in yaml.safe_load(user_data[role])["write_files"]}
    agent = json.loads(files["/opt/aws/amazon-cloudwatch-agent/etc/apex-jax.json"])
    collected = agent["logs"]["logs_collected"]["files"]["collect_list"]
    assert {one["log_group_name"] for one in collected} == {f"/apex-jax/apex-jax/{role}"}
    assert len({one["log_stream_name"] for one in collected}) == len(collected)  # two files in one would mix
    paths = {one["file_path"] for one in collected}
    services = [path.name for path in UNITS if path.suffix == ".service"]
    assert len(services) == 4
    for service in services:
        for key in ("StandardOutput", "StandardError"):
            (output,) = setting(service, key)
            kind, _, path = output.replace("%i", role).partition(":")
            assert kind == "append", service  # what was said before a restart stays
            assert path in paths, service
