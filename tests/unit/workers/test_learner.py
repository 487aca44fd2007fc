"""The learner on its own: what it refuses to save and to start with, and what it writes to its metrics."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq

from apex_jax.agent.algorithm import UpdateOutput
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.registry import ALGORITHMS, Entry
from apex_jax.config import AddressConfig, Config
from apex_jax.config.load import load_run
from apex_jax.environments.environment import describe
from apex_jax.host.errors import FatalError, RunError
from apex_jax.links.sampling_client import Batches, SamplingClient
from apex_jax.process import StopSignal
from apex_jax.run import metrics
from apex_jax.run.checkpoint import Checkpointer
from apex_jax.run.checkpoint_files import CheckpointError
from apex_jax.run.metrics import TAGS
from apex_jax.run.provenance import changes_of, read_starts
from apex_jax.segment_codec import encode_segment
from apex_jax.transport.messages import IndexBatches, LearnerHello, LearnerWelcome
from apex_jax.transport.params_codec import architecture_of
from apex_jax.types import Segment, zero_columns
from apex_jax.workers import learner as module
from apex_jax.workers import run_counters
from apex_jax.workers.learner import Learner, LearnerMetrics, learn_and_end, open_learner
from apex_jax.workers.role import RoleContext
from tests.rigs.learner_runs import save_checkpoint
from tests.rigs.links import wait_until
from tests.rigs.live_views import Clock
from tests.rigs.sampling_link import FalseReplay, streamed


def test_network_that_is_not_finite_is_not_saved(config: Config, context: zmq.Context) -> None:
    with open_learner(RoleContext(config, context, "learner"), describe(config)) as learner:
        learner.save()
        state = learner.state
        learner.counters.updates = 7
        learner.state = state._replace(online_params=jax.tree.map(lambda leaf: leaf * np.nan, state.online_params))
        said = r"network is not finite after about 7 updates: lower learner\.learning_rate.*delete its .*/replay$"
        with pytest.raises(RunError, match=said):
            learner.save()
    assert saved_updates(config, learner) == 0


def saved_updates(config: Config, learner: Learner) -> int:
    """Returns the updates behind the newest checkpoint."""
    checkpointer = Checkpointer(config.directory, read_only=True)
    architecture = architecture_of(learner.algorithm.acting_params(learner.state))
    restored = checkpointer.restore_newest(learner.state, config.checkpoint_compatibility_key, architecture)
    assert restored is not None
    return restored[1].updates


def test_learner_saves_before_a_refusal_ends_the_run(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_learner(RoleContext(config, context, "learner"), describe(config)) as learner:

        def refuse(timeout_seconds: float) -> None:
            raise RunError("refused by the replay server")

        monkeypatch.setattr(learner.replay, "next", refuse)
        with pytest.raises(RunError, match="refused by the replay server"):
            learn_and_end(learner, learner.learn)
        assert learner.saver.checkpointer.steps == [], "nothing to save"
        learner.counters.updates = 11
        with pytest.raises(RunError, match="refused by the replay server"):
            learn_and_end(learner, learner.learn)
    assert saved_updates(config, learner) == 11


def test_checkpoint_of_another_algorithm_is_refused_even_if_its_name_was_auto(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_learner(RoleContext(config, context, "learner"), describe(config)) as learner:
        learner.save()
    monkeypatch.setitem(ALGORITHMS, "toy", Entry(make_dqn, "int32"))
    toy = config.replace(algorithm=dataclasses.replace(config.algorithm, name="toy"))
    said = r"a different configuration: algorithm\.name: was dqn, now toy; use"
    is_refused = pytest.raises(CheckpointError, match=said)
    with is_refused, open_learner(RoleContext(toy, context, "learner"), describe(config)):
        pass


def test_settings_are_recorded_at_the_first_start_and_later_once_an_update_was_made_with_them(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FINISH_SECONDS", 0.1)  # nobody serves the sampling link
    monkeypatch.setattr(Learner, "learn", lambda learner: "0 updates")
    for seed in (3, 1):
        module.run(config.replace(seed=seed), "learner", StopSignal())
        assert load_run(config.directory).seed == seed
    save_checkpoint(Path(config.directory), updates=8)
    module.run(config.replace(seed=2), "learner", StopSignal())
    assert load_run(config.directory).seed == 1, "no update was made with other settings"

    def learn(learner: Learner) -> str:
        for _ in range(2):
            learner.in_flight.append((mock.MagicMock(content=batches), output))
            learner.send_priorities()
        return "9 updates"

    batches = mock.MagicMock(spec=Batches)
    output = UpdateOutput(priorities=jnp.ones((1, 1)), metrics={"losses/td_loss": jnp.zeros(1)})
    monkeypatch.setattr(Learner, "learn", learn)
    monkeypatch.setattr(LearnerMetrics, "add", mock.Mock())
    monkeypatch.setattr(SamplingClient, "update_priorities", mock.Mock())
    monkeypatch.setattr(SamplingClient, "consumed", mock.Mock())
    module.run(config.replace(seed=2), "learner", StopSignal())
    assert load_run(config.directory).seed == 2
    assert changes_of(read_starts(config.directory)) == ["seed=1 (was 3)", "seed=2 (was 1)"]


def test_a_disk_that_takes_no_record_does_not_end_learning_and_is_tried_again(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with open_learner(RoleContext(config, context, "learner"), describe(config)) as learner:
        with monkeypatch.context() as patched:
            patched.setattr(module, "write_config", mock.Mock(side_effect=full))
            learner.accept()
            learner.next_metrics = 0.0
            learner.step()
        assert caplog.text.count("cannot record the run") == 1
        assert "No space left" in str(learner.describe()["errors"])
        learner.next_metrics = 0.0
        learner.step()
        assert learner.describe()["errors"] == []
    assert load_run(config.directory) == config.replace(addresses=AddressConfig())
    assert len(read_starts(config.directory)) == 1
    assert Path(config.directory, "interface.json").exists()


def test_segment_whose_returns_the_rewards_do_not_allow_is_not_learned_from(
    config: Config, context: zmq.Context
) -> None:
    environment_spec = describe(config)
    spec = environment_spec.spec
    frames = np.zeros((spec.slots, *spec.frame_shape), spec.frame_dtype)
    columns = zero_columns(spec)
    columns["priority"][spec.frame_stack] = columns["bootstrap_offset"][spec.frame_stack] = 1
    columns["n_step_return"][:] = 1e38
    server = FalseReplay(config.addresses.sampling)
    with open_learner(RoleContext(config, context, "learner"), environment_spec) as learner:
        server.receive(LearnerHello)
        server.send(LearnerWelcome(spec.ring_segments(config.replay.capacity_transitions)))
        server.send(streamed(1, bodies=[encode_segment(Segment(frames, columns), spec)]))
        wait_until(lambda: learner.replay.dropped["bad_return"])
    server.close()


def test_unreachable_replay_server_at_the_end_is_logged_and_not_waited_for_for_ever(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FINISH_SECONDS", 0.1)
    role = RoleContext(config.replace(total_updates=8), context, "learner")
    with open_learner(role, describe(config)) as learner:
        assert learner.describe()["finished"] is False
        learner.counters.updates = 8
        learn_and_end(learner, learner.learn)  # nobody serves the sampling link
        assert learner.describe()["finished"] is True
    assert "the replay server did not receive that the run is over" in caplog.text
    assert learner.saver.checkpointer.saved_updates == 8


def test_end_of_the_run_is_announced_after_the_last_save(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpointer, "_write", fail)
    monkeypatch.setattr(run_counters, "LAST_PAUSE_SECONDS", 0.0)
    told: list[object] = []
    role = RoleContext(config.replace(total_updates=8), context, "learner")
    with open_learner(role, describe(config)) as learner:
        monkeypatch.setattr(learner.replay, "finish", told.append)
        monkeypatch.setattr(learner, "publish", lambda final=False: told.append(final))
        learner.counters.updates = 8
        with pytest.raises(FatalError, match="the last updates are lost"):
            learn_and_end(learner, learner.learn)
        assert learner.describe()["finished"] is False
    assert told == []


def test_replay_that_does_not_fit_the_device_is_refused_at_the_start(
    config: Config, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "device_memory_bytes", lambda: 3_000_000)
    said = r"0\.\d+ GB of frames, each float32\[50\], 200 bytes, of which .*lower replay\.capacity_transitions to some"
    is_refused = pytest.raises(FatalError, match=said)
    with is_refused, open_learner(RoleContext(config, context, "learner"), describe(config)):
        pass
    small = dataclasses.replace(config.replay, capacity_transitions=2_000)
    with open_learner(RoleContext(config.replace(replay=small), context, "learner"), describe(config)):
        pass


@pytest.mark.parametrize("where", [(module, "_restore"), (Learner, "learn")])
def test_device_error_is_one_line_and_leaves_no_thread(
    config: Config, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str]
) -> None:
    failure = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nand much more")
    monkeypatch.setattr(*where, mock.Mock(side_effect=failure))
    before = threading.active_count()
    with pytest.raises(RunError, match=r"cpu:0 failed: RESOURCE_EXHAUSTED: .* 9 bytes; .*, lower replay\.capacity"):
        module.run(config, "learner", StopSignal())
    assert threading.active_count() == before


def batches_of(age_seconds: float, samples_per_insert: float) -> Batches:
    empty = np.zeros((1, 0))
    nothing = np.zeros(0, np.int32), np.zeros(0, np.uint32), np.zeros(0)
    return Batches(empty, empty, IndexBatches(*nothing, "", 0, samples_per_insert, age_seconds))


def output_of(priorities: list[list[float]], **values: list[float]) -> UpdateOutput:
    metrics = {f"losses/{name}": np.array(value) for name, value in values.items()}
    return UpdateOutput(np.array(priorities), metrics)  # type: ignore[arg-type]


def test_each_tag_is_the_mean_of_all_updates_since_the_last_line_and_is_known() -> None:
    learner = LearnerMetrics()
    learner.add(batches_of(2.0, 7.5), output_of([[1.0, 2.0], [3.0, 6.0]], q_values=[1.0, 3.0]))
    learner.add(batches_of(4.0, 8.5), output_of([[0.0, 0.0]], q_values=[8.0]))
    values = learner.take(3)
    assert values["losses/q_values"] == pytest.approx(4.0)
    assert values["losses/priority_mean"] == pytest.approx(2.0)
    assert values["losses/priority_max"] == 6.0
    assert values["replay/sample_age_seconds"] == pytest.approx(3.0)
    assert values["replay/samples_per_insert"] == 8.5, "the newest"
    assert set(values) <= set(TAGS)


def test_line_without_updates_has_only_rates() -> None:
    learner = LearnerMetrics()
    assert set(learner.take(0)) == {"charts/updates_per_second", "learner/updates", "learner/wait_seconds_share"}
    learner.add(batches_of(2.0, 7.5), output_of([[9.0]], q_values=[1.0]))
    learner.take(1)
    learner.add(batches_of(2.0, 7.5), output_of([[1.0]], q_values=[5.0]))
    values = learner.take(2)
    assert (values["losses/q_values"], values["losses/priority_max"]) == (5.0, 1.0)


def test_rates_are_of_the_time_between_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.0)
    monkeypatch.setattr(metrics.RateMeter.__init__, "__defaults__", (clock,))
    learner = LearnerMetrics()
    learner.take(100)
    clock.now, learner.waited_seconds = 10.0, 2.5
    values = learner.take(400)
    assert values["charts/updates_per_second"] == pytest.approx(30.0)
    assert values["learner/wait_seconds_share"] == pytest.approx(0.25)
    clock.now, learner.waited_seconds = 11.0, 9.0
    assert learner.take(400)["learner/wait_seconds_share"] == 1.0, "a wait that began before the last line counts here"
