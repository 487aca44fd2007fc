"""Warnings of the live view: each wrong thing is told with the key to change, and a run that is well has none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from apex_jax.config import ActorConfig, AlgorithmConfig, Config, EnvironmentConfig, LearnerConfig, ReplayConfig
from apex_jax.operations.diagnosis import ENDLESS_SECONDS, PATIENCE_SECONDS, SILENCE_SECONDS, Diagnosis
from apex_jax.operations.progress import ProgressReader
from apex_jax.run.metrics import MetricsWriter

CONFIG = Config(
    actor=ActorConfig(processes=1),
    learner=LearnerConfig(learning_rate=0.01),
    replay=ReplayConfig(samples_per_insert=4.0),
    run_directory="runs/x",
)
WELL: dict[str, float] = {
    "losses/q_values": -1.5,
    "learner/wait_seconds_share": 0.5,
    "actor/wait_seconds_share": 0.5,
    "replay/dropped_stale_priority": 9.0,
    "replay/dropped_malformed": 0.0,
}


def told(values: dict[str, float], config: Config = CONFIG, learning: bool = True, silent: float = 0.0) -> str:
    """Returns what is told once it has lasted."""
    diagnosis = Diagnosis(config)
    diagnosis.warnings(0.0, WELL | values, learning, silent)
    return "\n".join(diagnosis.warnings(PATIENCE_SECONDS, WELL | values, learning, silent))


def test_episodes_of_a_users_environment_that_never_end_name_the_limits() -> None:
    config = dataclasses.replace(CONFIG, environment=EnvironmentConfig(task="gymnasium:my_file:MyEnv"))
    for values, is_endless in ((WELL, True), (WELL | {"charts/episodic_return": 1.0}, False)):
        diagnosis = Diagnosis(config)
        assert not diagnosis.warnings(0.0, values, True, 0.0)
        found = "".join(diagnosis.warnings(ENDLESS_SECONDS, values, True, 0.0))
        assert ("evaluator.max_episode_frames (now 108,000)" in found) == is_endless


def test_healthy_run_has_no_warnings() -> None:
    assert told({}) == ""
    assert Diagnosis(CONFIG).warnings(0.0, {}, False, 0.0) == ()


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        (
            {"losses/q_values": -151.0},
            "q-values of -151 exceed the 100 that rewards allow, so learning diverges:"
            " lower learner.learning_rate (now 0.01) or set algorithm.loss=huber",
        ),
        (
            {"learner/wait_seconds_share": 0.75},
            "the learner waits for batches 75% of the time:"
            " raise replay.samples_per_insert (now 4), or actor.processes",
        ),
        (
            {"replay/dropped_bad_checksum": 1200.0},
            "1,200 messages were refused (bad checksum): see the logs of the roles",
        ),
        (
            {"actor/weights_age_seconds": 31.0},
            "actors act with weights 31 s old, though the learner sends new ones every 1 s:"
            " see actor-0.log in runs/x/logs, and addresses.weights and learner.publish_interval_seconds",
        ),
        (
            {"learner/checkpoint_age_seconds": 720.0},
            "no checkpoint has been saved for 12 minutes: make room in runs/x, see learner.log",
        ),
    ],
)
def test_warning_names_the_key_to_change(values: dict[str, float], warning: str) -> None:
    assert told(values) == warning


@pytest.mark.parametrize(("interval", "age"), [(1.0, 30.0), (60.0, 600.0)])
def test_old_weights_are_reported_after_many_publishing_intervals_while_updates_are_made(
    interval: float, age: float
) -> None:
    config = CONFIG.replace(learner=LearnerConfig(publish_interval_seconds=interval))
    assert told({"actor/weights_age_seconds": age}, config) == ""
    assert "actors act with weights" in told({"actor/weights_age_seconds": age + 1}, config)
    assert told({"actor/weights_age_seconds": age + 1}, config, learning=False) == ""


def test_warning_does_not_name_a_ratio_that_is_not_set() -> None:
    free = CONFIG.replace(replay=ReplayConfig(samples_per_insert=0.0))
    text = told({"learner/wait_seconds_share": 0.9}, free)
    assert text == "the learner waits for batches 90% of the time: raise actor.processes"


def test_waiting_actors_are_reported_unless_the_ratio_makes_them_wait() -> None:
    waits = {"actor/wait_seconds_share": 0.75}
    assert told(waits) == ""
    assert told(waits, CONFIG.replace(replay=ReplayConfig(samples_per_insert=0.0))) == (
        "actors wait for the replay server 75% of the time: give it a core of its own, or lower actor.processes"
    )


def test_drops_that_the_configuration_allows_are_not_reported() -> None:
    drops = {"replay/dropped_overflow": 7.0}
    assert "7 messages were refused (overflow)" in told(drops)
    assert told(drops, CONFIG.replace(actor=ActorConfig(overflow="drop"))) == ""


def test_huber_loss_is_not_advised_if_it_is_set() -> None:
    huber = CONFIG.replace(algorithm=AlgorithmConfig(loss="huber"))
    assert told({"losses/q_values": 200.0}, huber).endswith("diverges: lower learner.learning_rate (now 0.01)")


def test_rewards_that_are_not_clipped_or_discounted_allow_any_q_value() -> None:
    for config in (
        CONFIG.replace(environment=EnvironmentConfig(reward_clip=0.0)),
        CONFIG.replace(algorithm=AlgorithmConfig(discount=1.0)),
    ):
        assert told({"losses/q_values": 1e6}, config) == ""


def test_waiting_is_reported_only_if_it_lasts() -> None:
    diagnosis, waits = Diagnosis(CONFIG), WELL | {"learner/wait_seconds_share": 0.9}
    assert diagnosis.warnings(0.0, waits, True, 0.0) == ()
    assert diagnosis.warnings(PATIENCE_SECONDS / 2, WELL, True, 0.0) == ()
    assert diagnosis.warnings(PATIENCE_SECONDS, waits, True, 0.0) == ()
    assert len(diagnosis.warnings(2 * PATIENCE_SECONDS, waits, True, 0.0)) == 1
    assert told({"learner/wait_seconds_share": 0.9}, learning=False) == ""  # it waits for the replay to fill


def test_missing_frames_are_reported() -> None:
    assert told({}, silent=SILENCE_SECONDS - 1) == ""
    assert told({}, silent=SILENCE_SECONDS).startswith("no new experience comes: no frame for 30 s; see actor-0.log")
    assert told({}, learning=False, silent=45).startswith("the replay does not fill: no frame for 45 s")
    seldom = CONFIG.replace(metrics_interval_seconds=60.0)
    assert told({}, seldom, silent=179) == "", "frames are counted once a minute"
    assert "no frame for 180 s" in told({}, seldom, silent=180)


def test_learner_that_stays_idle_although_the_replay_is_filled_is_reported() -> None:
    filled = {"replay/size_transitions": float(CONFIG.replay.min_size_to_sample)}
    first = Diagnosis(CONFIG)
    assert first.warnings(0.0, filled, False, 10 * SILENCE_SECONDS) == (), "actors wait while the learner compiles"
    assert told(filled, learning=False, silent=10 * SILENCE_SECONDS) == (
        "the replay has been full enough for a minute, but learning has not begun: it compiles, or learner.batch_size"
        " (now 512) is too large for this machine; see learner.log in runs/x/logs"
    )


FREE = CONFIG.replace(replay=ReplayConfig(capacity_transitions=5000), actor=ActorConfig(processes=3))


def told_over_a_minute(drawn: float, stored: float, config: Config = FREE, silent: float = 0.0) -> str:
    """Returns what is told after a minute in which so many transitions were drawn and stored; the actors wait."""
    diagnosis, batch = Diagnosis(config), config.learner.batch_size
    values = WELL | {"learner/wait_seconds_share": 0.0, "actor/wait_seconds_share": 0.99}
    values |= {"charts/updates_per_second": 0.13, "learner/updates": 100.0, "ledger/stored": 70_000.0}
    assert diagnosis.warnings(0.0, values, True, 0.0) == ()
    values |= {"learner/updates": 100.0 + drawn / batch, "ledger/stored": 70_000.0 + stored}
    return "\n".join(diagnosis.warnings(PATIENCE_SECONDS, values, True, silent))


@pytest.mark.parametrize("silent", [0.0, 2 * SILENCE_SECONDS])
def test_learner_slower_than_its_actors_is_reported_with_the_keys_that_limit_actors(silent: float) -> None:
    assert told_over_a_minute(drawn=8 * 512, stored=205_000, silent=silent) == (
        "the learner is outrun: it draws 0.02 transitions for each one that is stored, at 0.13 updates per second:"
        " set replay.samples_per_insert (now 0), which makes actors wait for the learner, or lower actor.processes"
        " (now 3), actor.environments (now 32), learner.batch_size (now 512), or raise replay.capacity_transitions"
        " (now 5,000)"
    )


def test_learner_with_the_replay_ratio_of_the_paper_is_not_reported_as_slow() -> None:
    assert "outrun" not in told_over_a_minute(drawn=0.78 * 100_000, stored=100_000)
    assert "outrun" not in told_over_a_minute(drawn=100, stored=100_000, config=CONFIG), "its ratio is as asked for"
    assert "outrun" not in told_over_a_minute(drawn=100, stored=0)


def test_actors_that_wait_for_a_slow_learner_are_reported_with_the_keys_that_make_it_faster() -> None:
    assert told_over_a_minute(drawn=512, stored=128, config=CONFIG, silent=45.0) == (
        "actors wait for the learner, no frame for 45 s: it makes 0.13 updates per second:"
        " lower learner.batch_size (now 512) or replay.samples_per_insert (now 4)"
    )


def test_diagnosis_gets_the_values_that_the_progress_reader_reads(tmp_path: Path) -> None:
    now = 1000.0
    reader = ProgressReader(str(tmp_path), CONFIG, lambda: now)
    (tmp_path / "metrics").mkdir()

    def write(name: str, step: int, **values: Any) -> None:
        tags = {tag.replace("__", "/"): value for tag, value in values.items()}
        with open(tmp_path / "metrics" / f"{name}.jsonl", "a") as file:
            file.write(json.dumps({"time": now, "seconds": now, "step": step} | tags) + "\n")

    write("learner", 0, charts__updates_per_second=0.0)
    now += 2 * SILENCE_SECONDS
    assert reader.read().warnings == ()  # no actor has come up yet
    write("actor-0", 0)
    now += SILENCE_SECONDS / 2
    assert reader.read().warnings == ()
    now += SILENCE_SECONDS
    assert "the replay does not fill" in reader.read().warnings[0]
    write("replay", 4000)
    assert reader.read().warnings == ()
    write("learner", 4000, losses__q_values=1e4)
    assert "diverges" in reader.read().warnings[0]
    write("learner", 4000, losses__q_values=None)
    assert "diverges" in reader.read().warnings[0]
    write("learner", 4000, losses__q_values=0.5)
    assert reader.read().warnings == ()


def test_failed_copy_of_any_process_is_reported(tmp_path: Path) -> None:
    reader = ProgressReader(str(tmp_path), CONFIG)
    for name, age in (("replay", 9_000.0), ("learner", 10.0)):  # the learner's comes later, and is well
        MetricsWriter(str(tmp_path), name).write(0, {"storage/copy_age_seconds": age})
    assert "the run has not been copied for 150 minutes: see learner.log and replay.log" in reader.read().warnings[0]


def test_old_weights_of_any_actor_are_reported(tmp_path: Path) -> None:
    config = CONFIG.replace(actor=ActorConfig(processes=2))
    reader = ProgressReader(str(tmp_path), config)
    MetricsWriter(str(tmp_path), "learner").write(0, {"charts/updates_per_second": 5.0})
    for name, age in (("actor-0", 100.0), ("actor-1", 0.5)):  # the second's comes later, and is well
        MetricsWriter(str(tmp_path), name).write(0, {"actor/weights_age_seconds": age})
    assert "actors act with weights 100 s old" in reader.read().warnings[0]
