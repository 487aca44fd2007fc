"""The learner on its own: what it refuses to save, and to start with."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
import zmq

from apex_jax.checkpoint import Checkpointer
from apex_jax.command_line import load
from apex_jax.config import AddressConfig, Config, LearnerConfig
from apex_jax.environment import segment_spec
from apex_jax.errors import FatalError, RunError
from apex_jax.process import StopSignal
from apex_jax.transport.params_codec import architecture_of
from apex_jax.transport.sockets import LocalLinks
from apex_jax.workers import learner as module
from apex_jax.workers import saver
from apex_jax.workers.learner import Learner, compute_dtype
from apex_jax.workers.role import RoleContext
from tests.processes import ROOT, wait_until


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    links = LocalLinks()
    addresses = AddressConfig(links.experience, links.sampling, links.weights)
    yield load(ROOT / "configs" / "catch.yaml").replace(addresses=addresses, run_directory=str(tmp_path))
    links.close()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.term()


@pytest.mark.parametrize(
    ("batch_size", "asked", "on_cpu", "updates"),
    [(32, 0, True, 8), (1, 0, True, 8), (64, 0, True, 4), (512, 0, True, 1), (512, 0, False, 8), (512, 3, True, 3)],
)
def test_a_call_makes_as_many_updates_as_asked_for_or_as_suit_the_device(
    batch_size: int, asked: int, on_cpu: bool, updates: int
) -> None:
    config = LearnerConfig(batch_size=batch_size, updates_per_call=asked)
    assert config.updates_of_a_call(on_cpu) == updates


def test_network_that_is_not_finite_is_not_saved(config: Config, context: zmq.Context) -> None:
    learner = Learner(RoleContext(config, context, "learner"), segment_spec(config))
    learner._save()
    state = learner._state
    learner.counters.updates = 7
    learner._state = state._replace(online_params=jax.tree.map(lambda leaf: leaf * np.nan, state.online_params))
    with pytest.raises(
        RunError,
        match=r"network is not finite after about 7 updates: lower learner\.learning_rate.*delete its .*/replay$",
    ):
        learner._save()
    learner.close()
    checkpointer = Checkpointer(config.directory, read_only=True)
    architecture = architecture_of(learner._algorithm.acting_params(learner._state))
    restored = checkpointer.restore_newest(state, config.checkpoint_compatibility_key, architecture)
    assert restored is not None
    assert restored[1].updates == 0
    checkpointer.close()


def test_what_was_learned_is_saved_before_a_refusal_in_the_middle_of_a_run_ends_it(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(RoleContext(config, context, "learner"), segment_spec(config))

    def refuse(timeout_seconds: float) -> None:
        raise RunError("refused by the replay server")

    monkeypatch.setattr(learner._stream, "next", refuse)
    with pytest.raises(RunError, match="refused by the replay server"):
        learner.run()
    assert learner._saver.checkpointer.steps == [], "nothing to save"
    learner.counters.updates = 11
    with pytest.raises(RunError, match="refused by the replay server"):
        learner.run()
    learner.close()
    checkpointer = Checkpointer(config.directory, read_only=True)
    architecture = architecture_of(learner._algorithm.acting_params(learner._state))
    restored = checkpointer.restore_newest(learner._state, config.checkpoint_compatibility_key, architecture)
    assert restored is not None
    assert restored[1].updates == 11
    checkpointer.close()


def test_waiting_counts_also_where_what_was_waited_for_comes(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = RoleContext(config, context, "learner")
    learner, stop = Learner(role, segment_spec(config)), role.stop
    comes = iter(range(5))

    def next_item(timeout_seconds: float) -> object:
        if next(comes, None) is None:
            stop.set()
            return None
        time.sleep(0.02)
        return object()

    monkeypatch.setattr(learner._stream, "next", next_item)
    monkeypatch.setattr(learner, "_consume", lambda item: None)  # leaves nothing in flight
    learner._learn()
    assert learner._metrics.waited_seconds >= 5 * 0.02
    learner.close()


def test_first_checkpoint_comes_soon_after_the_first_update_and_the_next_after_the_usual_interval(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saver.FIRST_CHECKPOINT_SECONDS <= 60
    monkeypatch.setattr(saver, "FIRST_CHECKPOINT_SECONDS", 0.1)
    role = RoleContext(config, context, "learner")
    learner, stop = Learner(role, segment_spec(config)), role.stop
    until = time.monotonic() + 5  # in vain
    seen: list[list[int]] = []

    def next_item(timeout_seconds: float) -> object | None:
        time.sleep(0.01)
        seen.append(learner._saver.checkpointer.steps)
        if len(seen) == 20:
            assert not seen[-1], "nothing had been learned that could be lost"
        if time.monotonic() > until or sum(map(bool, seen)) > 20:
            stop.set()
        return object() if len(seen) > 20 else None

    def learn(_: object) -> None:
        learner.counters.updates += 1

    monkeypatch.setattr(learner._stream, "next", next_item)
    monkeypatch.setattr(learner, "_consume", learn)  # leaves nothing in flight
    learner._learn()
    learner.close()
    assert [step > 0 for step in seen[-1]] == [True]


def test_a_replay_server_that_hears_nothing_of_the_end_is_told_of_and_not_waited_for_for_ever(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FINISH_SECONDS", 0.1)
    learner = Learner(RoleContext(config.replace(total_updates=8), context, "learner"), segment_spec(config))
    learner.counters.updates = 8
    learner.run()  # nobody serves the sampling link
    learner.close()
    assert "the replay server did not receive that the run is over" in caplog.text
    assert learner._saver.checkpointer.saved_updates == 8


def test_nobody_hears_of_the_end_before_it_is_saved(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpointer, "_write", fail)
    monkeypatch.setattr(saver, "LAST_PAUSE_SECONDS", 0.0)
    told: list[object] = []
    learner = Learner(RoleContext(config.replace(total_updates=8), context, "learner"), segment_spec(config))
    monkeypatch.setattr(learner._stream, "finish", told.append)
    monkeypatch.setattr(learner, "_publish", lambda final=False: told.append(final))
    learner.counters.updates = 8
    with pytest.raises(FatalError, match="the last updates are lost"):
        learner.run()
    learner.close()
    assert told == []


def test_environment_steps_add_up_over_replays_and_never_fall(config: Config, context: zmq.Context) -> None:
    learner = Learner(RoleContext(config, context, "learner"), segment_spec(config))
    told = [("a", 100), ("a", 150), ("b", 20), ("a", 130), ("a", 160), ("b", 30)]  # "a" lost 20 steps of its journal
    totals = []
    for replay_id, steps in told:
        learner.counters.count_steps(replay_id, steps)
        totals.append(learner.counters.environment_steps)
    assert totals == [100, 150, 170, 170, 200, 210]
    learner._save()
    learner.close()
    resumed = Learner(RoleContext(config, context, "learner"), segment_spec(config))
    resumed.counters.count_steps("a", 165)
    assert resumed.counters.environment_steps == 215
    resumed.close()


def test_the_step_size_falls_with_the_limit_that_is_nearest(config: Config, context: zmq.Context) -> None:
    falling = dataclasses.replace(config.learner, final_learning_rate_share=0.2, learning_rate_decay_start=0.0)
    config = config.replace(learner=falling, total_updates=1_000, total_environment_frames=8_000, total_minutes=1e6)
    learner = Learner(RoleContext(config, context, "learner"), segment_spec(config))
    shares = []
    for updates, frames in ((0, 0), (500, 0), (500, 6_000), (1_000, 6_000), (1_008, 6_000)):
        learner.counters.updates, learner.counters.environment_steps = updates, frames
        shares.append(learner.counters.learning_rate_share())
    learner.close()
    np.testing.assert_allclose(shares, [1.0, 0.6, 0.4, 0.2, 0.2], atol=1e-6)


def test_the_step_size_is_constant_until_its_decay_starts(config: Config, context: zmq.Context) -> None:
    held = dataclasses.replace(config.learner, final_learning_rate_share=0.2, learning_rate_decay_start=0.6)
    learner = Learner(
        RoleContext(config.replace(learner=held, total_updates=1_000), context, "learner"), segment_spec(config)
    )
    shares = []
    for learner.counters.updates in (0, 600, 700, 800, 1_000, 1_008):
        shares.append(learner.counters.learning_rate_share())
    learner.close()
    np.testing.assert_allclose(shares, [1.0, 1.0, 0.8, 0.6, 0.2, 0.2], atol=1e-6)


def test_the_step_size_stays_where_the_run_has_no_limit(config: Config, context: zmq.Context) -> None:
    falling = dataclasses.replace(config.learner, final_learning_rate_share=0.2)
    config = config.replace(learner=falling, total_updates=0)
    learner = Learner(RoleContext(config, context, "learner"), segment_spec(config))
    learner.counters.updates = 1_000_000
    assert learner.counters.learning_rate_share() == 1.0
    learner.close()


def test_replay_that_does_not_fit_the_device_is_refused_at_the_start(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "device_memory_bytes", lambda: 1_000_000)
    with pytest.raises(FatalError, match=r"takes 0\.\d+ GB of frames.*lower replay\.capacity_transitions to at most"):
        Learner(RoleContext(config, context, "learner"), segment_spec(config))
    small = dataclasses.replace(config.replay, capacity_transitions=2_000)
    Learner(RoleContext(config.replace(replay=small), context, "learner"), segment_spec(config)).close()


def test_disk_that_never_answers_ends_in_a_line_and_not_in_a_hang(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(Checkpointer, "_write", lambda *_: answers.wait(60))
    monkeypatch.setattr(saver, "LAST_SAVE_SECONDS", 0.3)
    learner = Learner(RoleContext(config, context, "learner"), segment_spec(config))
    learner._save()  # at an interval: it is still under way when the run ends
    with pytest.raises(FatalError, match="the last updates are lost: the disk has not answered"):
        learner._saver.save_last(learner._save, StopSignal())
    learner.close()
    assert learner.describe()["checkpoint"]["updates"] == 0
    answers.set()
    learner._saver.checkpointer.close()


@pytest.mark.parametrize("where", ["_restore", "_learn"])
def test_device_that_fails_is_one_line_and_leaves_no_thread(
    config: Config, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    failure = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nand much more")
    monkeypatch.setattr(Learner, where, mock.Mock(side_effect=failure))
    before = threading.active_count()
    with pytest.raises(RunError, match=r"cpu:0 failed: RESOURCE_EXHAUSTED: .* 9 bytes; .*, lower replay\.capacity"):
        module.run(config, "learner", StopSignal())
    assert threading.active_count() == before


def test_a_learner_whose_start_fails_leaves_no_thread(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LearnerMetrics", mock.Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    before = threading.active_count()
    with pytest.raises(OSError, match="Read-only file system"):
        Learner(RoleContext(config, context, "learner"), segment_spec(config))
    assert threading.active_count() == before


def test_what_could_not_be_saved_does_not_count_as_saved(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    learner = Learner(RoleContext(config, context, "learner"), segment_spec(config))
    learner.counters.updates = 5
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_write", fail)
        learner._save()
        wait_until(lambda: not learner._saver.checkpointer.is_saving)
    assert learner.describe()["checkpoint"]["updates"] == 0
    learner._save()
    wait_until(lambda: not learner._saver.checkpointer.is_saving)
    assert learner.describe()["checkpoint"]["updates"] == 5
    learner.close()


@pytest.mark.parametrize("name", ["auto", "float32", "bfloat16"])
def test_activations_are_float32_on_every_device_unless_the_user_asks_for_bfloat16(name: str) -> None:
    config = load(None, [f"learner.compute_dtype={name}"])
    assert compute_dtype(config) == ("bfloat16" if name == "bfloat16" else "float32")
