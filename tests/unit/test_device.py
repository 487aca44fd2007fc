"""What a process computes on and may use of a machine: devices, what it compiled, and the limits of control groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from apex_jax import device
from apex_jax.config import ActorConfig, Config, LearnerConfig
from apex_jax.config.load import load
from apex_jax.device import accelerator_name, choose_device, keep_compiled_programs
from apex_jax.host import machine
from apex_jax.host.errors import FatalError

DEVICES = Config(learner=LearnerConfig(device="gpu"), actor=ActorConfig(device="cpu"))


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environ: dict[str, str] = {}
    monkeypatch.setattr("apex_jax.device.os.environ", environ)
    return environ


@pytest.fixture
def machine_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Has this process find a GPU and JAX's plugin for it, but for the one of both that the machine lacks."""

    def prepare(lacks: str) -> None:
        (tmp_path / "nvidia0").touch()
        monkeypatch.setattr(device, "GPU_FILES", (tmp_path / ("missing" if lacks == "file" else "nvidia0"),))
        plugins = ("no_such_plugin", "no_such_plugin" if lacks == "plugin" else "json")
        monkeypatch.setattr(device, "CUDA_PLUGINS", plugins)

    return prepare


@pytest.mark.parametrize(
    ("role", "platform"),
    [("learner", "cuda"), ("actor", "cpu"), ("replay", "cpu"), ("evaluator", "cpu"), ("local", None)],
)
def test_each_role_uses_the_device_of_the_configuration(
    environ: dict[str, str], role: str, platform: str | None
) -> None:
    choose_device(role, DEVICES)
    assert environ.get("JAX_PLATFORMS") == platform


@pytest.mark.parametrize("role", ["actor", "evaluator", "learner"])
def test_actor_and_evaluator_leave_memory_of_a_shared_gpu_to_the_learner(environ: dict[str, str], role: str) -> None:
    choose_device(role, load(None, ["actor.device=auto"]))
    assert environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") == (None if role == "learner" else "false")


@pytest.mark.parametrize(("learner", "evaluator", "lacks", "platform"), [
    ("auto", "auto", "", None),  # left to JAX, as for the learner
    ("auto", "auto", "file", "cpu"),
    ("auto", "gpu", "file", "cuda"),
    ("gpu", "auto", "file", "cpu"),  # the learner's GPU is that of another machine
    ("cpu", "auto", "", "cpu"),
    ("cpu", "gpu", "", "cuda"),
])  # fmt: skip
def test_evaluator_uses_the_gpu_where_the_learner_does(
    environ: dict[str, str], machine_without: Any, learner: str, evaluator: str, lacks: str, platform: str | None
) -> None:
    machine_without(lacks)
    choose_device("evaluator", load(None, [f"learner.device={learner}", f"evaluator.device={evaluator}"]))
    assert environ.get("JAX_PLATFORMS") == platform


@pytest.mark.parametrize(("platform", "name"), [("cpu", None), ("gpu", "NVIDIA H100")])
def test_name_of_the_accelerator_is_that_of_the_learners_device(
    monkeypatch: pytest.MonkeyPatch, platform: str, name: str | None
) -> None:
    kind = SimpleNamespace(platform=platform, device_kind="NVIDIA H100")
    monkeypatch.setattr(jax, "devices", lambda: [kind] * 8)
    assert accelerator_name() == name


def test_compiled_programs_are_kept_in_the_users_cache(environ: dict[str, str], tmp_path: Path) -> None:
    environ["XDG_CACHE_HOME"] = str(tmp_path)
    keep_compiled_programs()
    assert Path(environ["JAX_COMPILATION_CACHE_DIR"]).is_dir()
    assert Path(environ["JAX_COMPILATION_CACHE_DIR"]).parent == tmp_path / "apex_jax"
    other = environ["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "other")
    keep_compiled_programs()
    assert environ["JAX_COMPILATION_CACHE_DIR"] == other


def test_without_a_writable_cache_programs_are_compiled_again(environ: dict[str, str], tmp_path: Path) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    environ["XDG_CACHE_HOME"] = str(no_folder)
    keep_compiled_programs()
    assert not [name for name in environ if name.startswith("JAX")]


@pytest.mark.parametrize(("cores", "gpu", "number", "line"), [
    (1, False, 1, "1 actor process, for 1 core"),
    (2, True, 1, "1 actor process, for 2 cores and a GPU"),
    (16, True, 3, "3 actor processes, for 16 cores and a GPU"),
    (208, True, 8, "8 actor processes, for 208 cores and a GPU"),
])  # fmt: skip
def test_machine_chooses_the_number_of_actors(cores: int, gpu: bool, number: int, line: str) -> None:
    assert device.actor_processes(cores, gpu) == (number, line)


@pytest.mark.parametrize(("setting", "variables", "lacks", "found"), [
    ("learner.device=auto", {}, "", True),
    ("learner.device=auto", {}, "file", False),
    ("learner.device=auto", {}, "plugin", False),
    ("learner.device=auto", {"JAX_PLATFORMS": "cpu"}, "", False),
    ("learner.device=auto", {"JAX_PLATFORMS": "cuda,cpu"}, "", True),
    ("learner.device=auto", {"CUDA_VISIBLE_DEVICES": ""}, "", False),
    ("learner.device=auto", {"CUDA_VISIBLE_DEVICES": "1"}, "", True),
    ("learner.device=gpu", {"JAX_PLATFORMS": "cpu"}, "", True),
    ("learner.device=cpu", {}, "", False),
])  # fmt: skip
def test_gpu_is_found_without_jax(
    environ: dict[str, str], machine_without: Any, setting: str, variables: dict[str, str], lacks: str, found: bool
) -> None:
    environ |= variables
    machine_without(lacks)
    assert device.has_gpu(load(None, [setting])) == found


@pytest.mark.parametrize(("role", "setting", "platforms"), [
    *((role, f"{role}.device=gpu", "") for role in ("learner", "actor", "evaluator")),
    ("learner", "learner.device=auto", "cudda"),
])  # fmt: skip
def test_missing_gpu_or_platform_is_a_one_line_error(
    role: str, setting: str, platforms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("no plugin\nof that name")

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    named = f"JAX_PLATFORMS={platforms}" if platforms else setting
    with pytest.raises(FatalError, match=rf"^{named}: .*\(no plugin\); (install requirements-gpu.txt|unset it)"):
        device.check_device(role, load(None, [setting]))
    device.check_device("replay", load(None, [setting]))
    monkeypatch.delenv("JAX_PLATFORMS")
    device.check_device(role, load(None))


def test_with_a_cpu_quota_jax_starts_as_many_threads_as_the_quota_allows(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(device, "usable_cores", lambda: 2)
    choose_device("learner", DEVICES)
    assert environ["PJRT_NPROC"] == "2"
    environ["PJRT_NPROC"] = "5"  # the user's own choice
    choose_device("learner", DEVICES)
    assert environ["PJRT_NPROC"] == "5"


HALF_GIB = 2**29


@pytest.mark.parametrize(("files", "cores", "memory"), [
    ({}, 8, None),
    *(({"cgroup": "0::/slurm/job", "slurm/job/cpu.max": quota}, cores, None) for quota, cores in (
        ("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("3200000 100000", 8))),
    ({"cgroup": "0::/slurm/job", "slurm/job/cpu.max": "max 100000", "slurm/cpu.max": "300000 100000"}, 3, None),
    # a container sees its own group as the root, and the path of the host, which is not mounted there
    ({"cgroup": "0::/docker/0123", "cpu.max": "200000 100000", "memory.max": str(HALF_GIB)}, 2, HALF_GIB),
    *(({"cgroup": "0::/slurm/job", "slurm/job/memory.max": limit}, 8, memory) for limit, memory in (
        ("max", None), (str(HALF_GIB), HALF_GIB), (str(2**60), None))),
    *(({"cgroup": text, "cpu.max": text, "memory.max": text}, 8, None) for text in (
        "", "garbage", "x y", "0::/a\n:::\n9")),
])  # fmt: skip
def test_usable_cores_and_memory_are_those_of_the_machine_or_of_its_control_groups_if_these_are_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int, memory: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUP", tmp_path / "cgroup")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert machine.usable_cores() == cores
    assert machine.usable_memory_bytes() == (memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
