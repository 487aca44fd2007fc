"""What a process may use of a machine: containers limit cores and memory through control groups of two versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apex_jax.host import machine


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores; returns the folder in which its control groups are mounted."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUP", tmp_path / "cgroup")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_without_control_groups_every_core_and_all_memory_is_usable(groups: Path) -> None:
    assert machine.usable_cores() == 8
    assert machine.usable_memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("3200000 100000", 8)],
)
def test_cores_are_those_of_the_quota_rounded_up(groups: Path, quota: str, cores: int) -> None:
    write(groups / "cgroup", "0::/slurm/job")
    write(groups / "slurm" / "job" / "cpu.max", quota)
    assert machine.usable_cores() == cores


def test_quota_of_a_group_above_applies_too(groups: Path) -> None:
    write(groups / "cgroup", "0::/slurm/job")
    write(groups / "slurm" / "job" / "cpu.max", "max 100000")
    write(groups / "slurm" / "cpu.max", "300000 100000")
    assert machine.usable_cores() == 3


def test_container_that_sees_its_own_group_as_the_root_is_limited(groups: Path) -> None:
    write(groups / "cgroup", "0::/docker/0123")  # the host's path: not mounted in the container
    write(groups / "cpu.max", "200000 100000")
    write(groups / "memory.max", str(2**29))
    assert machine.usable_cores() == 2
    assert machine.usable_memory_bytes() == 2**29


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 3)])
def test_quota_of_control_groups_of_version_1(groups: Path, quota: str, cores: int) -> None:
    write(groups / "cgroup", "4:memory:/docker\n2:cpu,cpuacct:/docker\n1:name=systemd:/\n0::/")
    write(groups / "cpu" / "docker" / "cpu.cfs_quota_us", quota)
    write(groups / "cpu" / "docker" / "cpu.cfs_period_us", "100000")
    assert machine.usable_cores() == cores


def test_memory_limit_of_control_groups_of_version_1(groups: Path) -> None:
    write(groups / "cgroup", "4:memory:/docker")
    write(groups / "memory" / "docker" / "memory.limit_in_bytes", str(2**29))
    write(groups / "memory" / "memory.limit_in_bytes", str(2**63 - 4096))
    assert machine.usable_memory_bytes() == 2**29


@pytest.mark.parametrize(("limit", "is_lower"), [("max", False), (str(2**29), True), (str(2**60), False)])
def test_memory_is_that_of_the_machine_or_of_the_container_if_that_is_less(
    groups: Path, limit: str, is_lower: bool
) -> None:
    of_machine = machine.usable_memory_bytes()
    write(groups / "cgroup", "0::/slurm/job")
    write(groups / "slurm" / "job" / "memory.max", limit)
    assert machine.usable_memory_bytes() == (2**29 if is_lower else of_machine)


@pytest.mark.parametrize("text", ["", "garbage", "x y", "0::/a\n:::\n9"])
def test_unreadable_limits_limit_nothing(groups: Path, text: str) -> None:
    write(groups / "cgroup", text)
    write(groups / "cpu.max", text)
    write(groups / "memory.max", text)
    assert machine.usable_cores() == 8
    assert machine.usable_memory_bytes() > 2**30
