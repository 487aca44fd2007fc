"""Faults of the learner: at most one checkpoint interval is lost, and the loss is logged."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import zmq

from apex_jax.config import Config
from apex_jax.environments.environment import segment_spec
from apex_jax.links.weights_client import Weights, WeightsClient
from apex_jax.process import SAME_REQUEST_SECONDS
from apex_jax.run.checkpoint import Checkpointer
from apex_jax.transport.sockets import LocalLinks
from apex_jax.workers.learner import open_learner
from apex_jax.workers.role import RoleContext
from tests.rigs.learner_runs import ENDLESS, Fleet, bits, config_of, error_lines, fresh_state, restored, save_checkpoint
from tests.rigs.processes import ROOT, Programs, catch, checkpoints, free_tcp_addresses, values, wait_until

pytestmark = pytest.mark.timeout(480)


# Killed and stopped -----------------------------------------------------------------------------------------------


def test_fault_06_resumed_learner_equals_its_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    state, progress = save_checkpoint(tmp_path, updates=4000)
    links = LocalLinks()
    context = zmq.Context()
    addresses = Config().addresses.__class__((links.experience,), (links.sampling,), links.weights)
    config = config_of(tmp_path).replace(addresses=addresses)
    with open_learner(RoleContext(config, context, "learner"), segment_spec(config)) as learner:
        assert bits(learner.state) == bits(state)
        jax.tree.map(lambda ours, saved: None, learner.state, state)  # which raises where their structures differ
        assert (learner.counters.updates, learner.counters.environment_steps) == (
            progress.updates,
            progress.environment_steps,
        )
        assert learner.counters.elapsed_seconds() >= progress.elapsed_seconds
        assert learner.weights.version >= progress.weights_version
    context.term()
    links.close()


@pytest.mark.slow
def test_fault_06_a_killed_learner_resumes_and_neither_updates_nor_weights_go_back(
    programs: Programs, tmp_path: Path
) -> None:
    fleet = Fleet(programs, tmp_path / "run")
    context, config = zmq.Context(), config_of(tmp_path)
    client = WeightsClient(
        context, fleet.weights_address, fresh_state(config).online_params, config.weights_compatibility_key
    )
    try:
        first = fleet.start("learner")
        first.wait_until(
            lambda: (
                (client.fetch_after(client.newest) or client.newest)
                and checkpoints(fleet.directory)
                and checkpoints(fleet.directory)[-1] > 0
            )
        )
        first.send(signal.SIGKILL)
        assert first.exit_code() == -signal.SIGKILL
        before = client.newest
        assert before is not None
        fleet.replay.send(signal.SIGSTOP)  # nothing can be learned before the weights have been compared
        [*_, held] = checkpoints(fleet.directory)
        found = restored(fleet.directory)
        assert found is not None
        lines = len(fleet.updates())
        second = fleet.start("learner")
        second.wait_until(lambda: weights_of(client).learner_peer_id != before.learner_peer_id)
        after = weights_of(client)
        assert after.version > before.version
        assert after.updates == held, "the weights of the checkpoint's moment, and of no other"
        assert bits(after.params) == bits(found[0].online_params)
        fleet.replay.send(signal.SIGCONT)
        second.wait_until(lambda: len(fleet.updates()) > lines and fleet.updates()[-1] > held)
        assert min(fleet.updates()[lines:]) >= held
        assert fleet.updates()[lines:] == sorted(fleet.updates()[lines:])
        assert f"resuming from the checkpoint at {held} updates" in second.stderr
    finally:
        client.close()
        context.term()


def weights_of(client: WeightsClient) -> Weights:
    client.fetch_after(client.newest)
    assert client.newest is not None
    return client.newest


@pytest.mark.slow
def test_fault_07_sigterm_saves_what_was_learned_and_exits_143(programs: Programs, tmp_path: Path) -> None:
    fleet = Fleet(programs, tmp_path / "run", "learner.checkpoint_interval_seconds=1000000")
    learner = fleet.start("learner", "learner.checkpoint_interval_seconds=1000000")
    learner.wait_until(lambda: fleet.updates() and fleet.updates()[-1] > 0)
    assert checkpoints(fleet.directory) == []
    known = fleet.updates()[-1]
    learner.send(signal.SIGTERM)
    assert learner.exit_code(30) == 143
    [saved] = checkpoints(fleet.directory)
    assert saved >= known
    found = restored(fleet.directory)
    assert found is not None
    assert found[1].updates == int(found[0].updates) == saved
    assert "Traceback" not in learner.stderr


HANGS = """
import time
from apex_jax.run import checkpoint
from apex_jax.workers.run_counters import RunCounters
def hang(step):
    print("saving", flush=True)
    time.sleep(600)
checkpoint.write_checksums = hang
def learn(counters, best_return):
    counters.updates = 2
    print("learning", flush=True)
RunCounters.limit_reached = learn
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_fault_08_a_second_signal_during_the_save_ends_it_and_the_last_checkpoint_is_kept(
    programs: Programs, tmp_path: Path, number: signal.Signals
) -> None:
    state, progress = save_checkpoint(tmp_path)
    learner = programs.start("--role", "learner", *catch(tmp_path, *free_tcp_addresses()), lines=HANGS)
    learner.wait_until(lambda: "learning" in learner.stdout)
    learner.send(number)
    learner.wait_until(lambda: "saving" in learner.stdout)
    time.sleep(SAME_REQUEST_SECONDS)  # sooner, it would be the first once more
    learner.send(number)
    assert learner.exit_code(30) == 128 + number
    found = restored(tmp_path)
    assert found is not None
    assert bits(found[0]) == bits(state)
    assert found[1] == progress
    assert [path.name for path in (tmp_path / "checkpoints").glob(".saving*")] == [".saving-2"]
    Checkpointer(str(tmp_path)).close()
    assert not list((tmp_path / "checkpoints").glob(".saving*")), "the next start removes what was half saved"


SAVES = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from apex_jax.run.checkpoint import Checkpointer, Progress
checkpointer = Checkpointer(sys.argv[2], kept=2)
updates = max(checkpointer.steps, default=0)
while True:
    updates += 1
    state = {"a": np.full(200_000, updates, np.float32), "b": {"c": np.full(1000, updates, np.int32)}}
    checkpointer.save(state, Progress(updates, 0, 0.0, 0, "x", "y"))
    checkpointer.wait()
    print(updates, flush=True)
"""


def kill_amid_saves(directory: Path, rng: random.Random) -> tuple[int, int]:
    """Saves continuously in a process that is killed at a random moment; every reported save must exist.

    Returns the number of the checkpoint that is, and how many the kill has left half written.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES, str(ROOT), str(directory)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = int(process.stdout.readline())
        threading.Event().wait(rng.random() * 0.4)
        wait_until(lambda: halves(directory))  # at once, but for the moment between two saves
    finally:
        process.kill()
    said = int([str(said), *process.stdout.read().split()][-1])
    process.wait()
    process.stdout.close()
    left = len(halves(directory))
    checkpointer = Checkpointer(str(directory))
    like = {"a": np.zeros(200_000, np.float32), "b": {"c": np.zeros(1000, np.int32)}}
    found = checkpointer.restore_newest(like, "x", "y")
    checkpointer.close()
    assert found is not None
    assert said <= found[1].updates <= said + 1
    assert (found[0]["a"] == found[1].updates).all()
    assert (found[0]["b"]["c"] == found[1].updates).all()
    names = [path.name for path in (directory / "checkpoints").iterdir()]
    assert [name for name in names if not name.isdecimal()] == [".lock"], (
        "what is half written, or half deleted, is gone"
    )
    return found[1].updates, left


def halves(directory: Path) -> list[Path]:
    return list((directory / "checkpoints").glob(".saving*"))


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_fault_09_kill_during_a_save_leaves_the_previous_checkpoint_and_no_half_one(tmp_path: Path, kills: int) -> None:
    rng = random.Random(kills)
    saved, left = zip(*(kill_amid_saves(tmp_path, rng) for _ in range(kills)), strict=True)
    assert sorted(set(saved)) == [*saved], "each goes on from the one before"
    assert sum(left) > 0, "kills that met no save show nothing"


# Two learners -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_37_a_second_learner_on_the_same_directory_is_refused_at_once(programs: Programs, tmp_path: Path) -> None:
    first = programs.start("--role", "learner", *catch(tmp_path / "run", *free_tcp_addresses()))
    first.wait_until(lambda: "joining the replay server" in first.stderr)
    second = programs.start("--role", "learner", "--name", "second", *catch(tmp_path / "run", *free_tcp_addresses()))
    assert second.exit_code() == 1
    [error] = error_lines(second)
    assert f"another learner saves in {tmp_path / 'run' / 'checkpoints'}: stop it" in error
    assert first.process.poll() is None
    first.send(signal.SIGKILL)
    first.exit_code()
    third = programs.start("--role", "learner", *catch(tmp_path / "run", *free_tcp_addresses()))
    third.wait_until(lambda: "joining the replay server" in third.stderr)


@pytest.mark.slow
def test_fault_37_learner_frozen_for_long_gives_up_once_it_was_replaced(programs: Programs, tmp_path: Path) -> None:
    def learned() -> list[float]:
        return values(tmp_path / "other", "second", "learner/updates")

    fleet = Fleet(programs, tmp_path / "run")
    frozen = fleet.start("learner")
    frozen.wait_until(lambda: fleet.updates() and fleet.updates()[-1] > 0)
    frozen.send(signal.SIGSTOP)
    addresses = [*fleet.addresses[:2], free_tcp_addresses()[2]]
    second = programs.start("--role", "learner", "--name", "second", *catch(tmp_path / "other", *addresses, ENDLESS))
    second.wait_until(lambda: any(learned()))
    frozen.send(signal.SIGCONT)
    assert frozen.exit_code(90) == 1
    [error] = error_lines(frozen)
    assert (
        "another learner draws from this replay server, or one did that was killed in the last 10 s; stop it" in error
    )
    assert "Traceback" not in frozen.stderr
    known = learned()[-1]
    second.wait_until(lambda: learned()[-1] > known)
