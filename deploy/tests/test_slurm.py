"""deploy/slurm: the job's script on stand-ins for Slurm's commands, and on a real Slurm, if it is installed here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from apex_jax.run.metrics import read_metrics
from deploy.tests.boxes import Bridge
from deploy.tests.slurm import Cluster, missing
from deploy.tests.tools import DEPLOY
from tests.rigs.processes import ROOT, checkpoints, values, wait_until

SCRIPT = DEPLOY / "slurm/apex_jax.sbatch"
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "2"}
STAND_INS = {
    # Each start of a role is logged, and ends with the role's next code in CODES; "run" = runs until SIGTERM.
    "python3": """
        [[ $1 == main.py && $2 == --role && " $* " != *" --print-config "* ]] || exec REAL_PYTHON "$@"
        echo "$*" >>log
        trap 'echo "SIGTERM $3" >>log; exit 143' TERM
        starts=$(grep -c "^main.py --role $3" log)
        codes=($(grep "^$3 " <<<"$CODES"))
        while [[ ${codes[starts]:-} == 0 && $(grep -o "^main.py --role [a-z]*" log | sort -u | wc -l) -lt 4 ]]; do
            /bin/sleep 0.05 # no run ends before all roles have started
        done
        [[ ${codes[starts]:-run} == run ]] || exit "${codes[starts]}"
        while :; do /bin/sleep 0.05; done
    """,
    "srun": """
        echo "srun $*" >>log
        echo $$ >step
        while [[ $1 != bash ]]; do shift; done
        SLURM_PROCID=0 exec "$@"
    """,
    "scancel": """
        echo "scancel $*" >>log
        kill -TERM "$(<step)"
    """,
    "scontrol": """
        printf 'node%s\\n' 1 2 3
    """,
    "sleep": """
        exec /bin/sleep 0.05
    """,
}


class Job:
    """The script in a checkout, with stand-ins for Slurm, for sleep, and for roles."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("apex_jax", "configs", "deploy", "main.py"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "bin").mkdir()
        for name, text in STAND_INS.items():
            path = folder / "bin" / name
            path.write_text("#!/bin/bash\n" + text.replace("REAL_PYTHON", sys.executable))
            path.chmod(0o755)

    def start(self, *arguments: str, codes: str = "", **environment: str) -> subprocess.Popen[str]:
        """Starts the script; `codes`: lines "ROLE CODE ..."."""
        others = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            cwd=self.folder,
            env={**others, "PATH": path, "CODES": codes, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, codes: str = "", **environment: str) -> tuple[int, str]:
        """Returns the exit code, and what the script has printed as errors."""
        process = self.start(*arguments, codes=codes, **environment)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def starts(self, role: str) -> list[list[str]]:
        return [line.split() for line in self.log if line.startswith(f"main.py --role {role} ")]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


DONE = "learner 0\nreplay 0\nactor 0\nevaluator 0"


def on_stand_ins(function):
    return pytest.mark.deploy(pytest.mark.quick(function))


@on_stand_ins
@pytest.mark.parametrize(("environment", "line"), [
    ({}, "error: there is no job: run sbatch deploy/slurm/apex_jax.sbatch, followed by arguments of main.py"),
    ({**JOB, "SLURM_JOB_NUM_NODES": "1"}, "error: one node needs no fleet: "),
    ({**JOB, "SLURM_HET_SIZE": "3"}, "error: the job has 3 components: "),
])  # fmt: skip
def test_job_that_is_no_fleet_is_refused_in_one_line(job: Job, environment: dict[str, str], line: str) -> None:
    code, errors = job.run(**environment)
    assert (code, job.log) == (2, [])
    assert errors.startswith(line)
    assert errors.count("\n") == 1


@on_stand_ins
@pytest.mark.parametrize("argument", ["seed=-1", "actor.processes=3", "--role=actor"])
def test_wrong_argument_ends_the_job_before_anything_starts(job: Job, argument: str) -> None:
    code, errors = job.run("--config", "catch", argument, **JOB)
    assert (code, job.log, errors.count("\n")) == (2, [], 1)
    assert not (job.folder / "runs").exists()


@on_stand_ins
def test_roles_start_with_the_arguments_the_addresses_of_the_job_and_keys(job: Job) -> None:
    assert job.run("--config", "catch", "seed=3", codes=DONE, **JOB) == (0, "")
    (step,) = (line for line in job.log if line.startswith("srun "))
    assert "--exclude=node1 --nodes=2 --ntasks=4 --ntasks-per-node=2 " in step
    settings = {role: dict(word.split("=", 1) for word in job.starts(role)[0] if "=" in word)
                for role in ("replay", "learner", "evaluator", "actor")}  # fmt: skip
    replay, learner, actor = settings["replay"], settings["learner"], settings["actor"]
    for given in settings.values():
        assert (given["seed"], given["actor.processes"]) == ("3", "4")
        assert given["security.keys"] == "runs/Catch-v0-3/keys-7"
    assert replay["addresses.experience"].replace("*", "node1") == actor["addresses.experience"]
    assert replay["addresses.sampling"].replace("*", "node1") == learner["addresses.sampling"]
    assert learner["addresses.weights"].replace("*", "node1") == actor["addresses.weights"]
    assert actor["addresses.weights"] == settings["evaluator"]["addresses.weights"]
    assert job.starts("actor")[0][-2:] == ["--name", "actor-0"]
    assert not (job.folder / "runs/Catch-v0-3/keys-7").exists(), "keys go with the job"


@on_stand_ins
def test_actors_of_a_heterogeneous_job_are_its_second_component(job: Job) -> None:
    second = {"SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-3]", "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4(x3)"}
    cpus = {"SLURM_HET_SIZE": "2", "SLURM_CPUS_PER_TASK_HET_GROUP_1": "5"}
    assert job.run("--config", "catch", codes=DONE, **JOB, **second, **cpus) == (0, "")
    (step,) = (line for line in job.log if line.startswith("srun "))
    assert "srun --het-group=1 --nodes=3 --ntasks=12 --ntasks-per-node=4 --cpus-per-task=5 " in step


@on_stand_ins
def test_port_that_another_program_uses_is_left_out(job: Job) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", 20022))  # where job 7 begins to look
        other.listen()
        assert job.run("--config", "catch", codes=DONE, **JOB)[0] == 0
    ports = {port for role in ("replay", "learner") for port in re.findall(r":(\d+)", " ".join(job.starts(role)[0]))}
    assert len(ports) == 3
    assert "20022" not in ports


@on_stand_ins
@pytest.mark.parametrize(("codes", "code", "starts"), [("3", 3, 1), ("2", 2, 1), ("1 1 1 1 1 1 1", 1, 6)])
def test_role_that_cannot_go_on_ends_the_job_with_its_code(job: Job, codes: str, code: int, starts: int) -> None:
    ended, errors = job.run("--config", "catch", codes=f"replay {codes}", **JOB)
    assert (ended, len(job.starts("replay"))) == (code, starts)
    assert f"replay ended with exit code {code}: the job ends" in errors
    assert "SIGTERM learner" in job.log


@on_stand_ins
def test_sigterm_reaches_each_role_once_and_ends_the_job_with_143(job: Job) -> None:
    process = job.start("--config", "catch", codes="", **JOB)
    wait_until(lambda: all(job.starts(role) for role in ("replay", "learner", "evaluator", "actor")), 60)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert sorted(line for line in job.log if line.startswith("SIGTERM")) == [
        f"SIGTERM {role}" for role in ("actor", "evaluator", "learner", "replay")
    ]
    assert "scancel --signal=TERM 7" in job.log


# On a real Slurm -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacks := missing():
        pytest.skip(lacks)
    with Bridge() as bridge, Cluster(tmp_path_factory.mktemp("slurm"), bridge) as cluster:
        yield cluster


class Run:
    """A job of the script on the cluster, with Catch."""

    def __init__(self, cluster: Cluster, folder: Path, nodes: Sequence[str], *settings: str):
        """`nodes`: options of sbatch."""
        self.cluster, self.directory, self._log = cluster, folder / "run", folder / "job.log"
        often = ("metrics_interval_seconds=0.5", "evaluator.interval_seconds=1")
        options = ("--parsable", f"--output={self._log}", *nodes)
        run = ("--config", "catch", f"run_directory={self.directory}", "actor.environments=8", *often, *settings)
        self.job = cluster.run("sbatch", *options, str(SCRIPT), *run).strip()

    def newest(self, name: str, tag: str, since: float = 0.0) -> float:
        """Returns the newest value of a tag that a process has written since then; -1 if there is none."""
        try:
            lines = read_metrics(self.directory / "metrics" / f"{name}.jsonl")
        except FileNotFoundError:
            return -1.0
        found = [line[tag] for line in lines if line.get(tag) is not None and line["time"] > since]
        return float(found[-1]) if found else -1.0

    def wait(self, tag: str, least: float, since: float, name: str = "learner") -> None:
        """Waits until a process has written a tag of at least this value since then."""
        until = time.monotonic() + 240
        while self.newest(name, tag, since) < least:
            log = self._log.read_text() if self._log.exists() else ""
            state = self.cluster.job(self.job)["JobState"]
            assert state not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), f"ended early: {state}\n{log}"
            assert time.monotonic() < until, f"{name} {tag}\n{log}\n{self.cluster.log()}"
            time.sleep(0.5)


def on_a_real_slurm(function):
    return pytest.mark.deploy(pytest.mark.timeout(900)(function))


def nodes(number: int) -> list[str]:
    return [f"--nodes={number}", "--ntasks-per-node=1", f"--cpus-per-task={os.cpu_count()}"]


@on_a_real_slurm
@pytest.mark.parametrize("options", [nodes(3), [*nodes(1), ":", *nodes(2)]], ids=["one kind", "heterogeneous"])
def test_catch_run_trains_and_the_job_ends_with_0(cluster: Cluster, tmp_path: Path, options: list[str]) -> None:
    run = Run(cluster, tmp_path, options, "total_updates=2000")
    fields = cluster.wait_for_state(run.job, "COMPLETED", 300)
    assert fields["ExitCode"] == "0:0"
    assert checkpoints(run.directory)[-1] == 2000
    assert run.newest("evaluator", "eval/updates") == 2000
    assert values(run.directory, "actor-0", "step")
    assert values(run.directory, "actor-1", "step")
    assert max(values(run.directory, "replay", "ledger/stored")) > 0
    assert list(run.directory.glob("keys-*")) == []


@on_a_real_slurm
def test_role_of_a_killed_step_comes_back_and_so_does_that_of_a_killed_node(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, nodes(2), "total_updates=0", "learner.checkpoint_interval_seconds=1000000")
    run.wait("replay/actors", 1, 0.0, "replay")
    run.wait("learner/updates", 100, 0.0)

    cluster.run("scancel", "--signal=KILL", f"{run.job}.0")
    killed = time.time()
    run.wait("actor/steps_per_second", 1, killed + 5, "actor-0")
    assert cluster.job(run.job)["Restarts"] == "0"

    updates = run.newest("learner", "learner/updates")
    of_the_actor = nodes_of(cluster, run.job)[1]
    cluster.kill(of_the_actor)
    killed = time.time()
    wait_until(lambda: cluster.job(run.job)["Restarts"] == "1", 120)
    cluster.wait_for_state(run.job, "RUNNING")
    saved = checkpoints(run.directory)[-1]
    assert saved >= updates
    run.wait("actor/steps_per_second", 1, killed + 20, "actor-0")
    run.wait("learner/updates", saved + 100, killed + 20)
    assert of_the_actor not in nodes_of(cluster, run.job)

    updates = run.newest("learner", "learner/updates")
    cluster.run("scancel", "--batch", "--signal=TERM", run.job)
    assert cluster.wait_for_state(run.job, "FAILED")["ExitCode"] == "143:0"
    assert checkpoints(run.directory)[-1] >= updates
    cluster.boot(of_the_actor)


@on_a_real_slurm
def test_requeued_job_resumes_and_scancel_saves(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, nodes(2), "total_updates=0", "learner.checkpoint_interval_seconds=1000000")
    run.wait("learner/updates", 100, 0.0)
    updates = run.newest("learner", "learner/updates")
    cluster.run("scontrol", "requeue", run.job)
    wait_until(lambda: (state := cluster.job(run.job))["JobState"] == "RUNNING" and state["Restarts"] == "1", 120)
    saved = checkpoints(run.directory)[-1]
    assert saved >= updates
    started = time.time()
    run.wait("learner/updates", saved + 100, started)
    updates = run.newest("learner", "learner/updates")
    cluster.run("scancel", run.job)
    cluster.wait_for_state(run.job, "CANCELLED")
    wait_until(lambda: checkpoints(run.directory)[-1] >= updates, 60)
    wait_until(lambda: list(run.directory.glob("keys-*")) == [], 60)


def nodes_of(cluster: Cluster, job: str) -> list[str]:
    return cluster.run("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()
