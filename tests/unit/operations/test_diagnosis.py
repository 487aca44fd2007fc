"""Warnings of the live view: each problem is reported with the key to change, and a healthy run has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apex_jax.config import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    EnvironmentConfig,
    LearnerConfig,
    MetricsConfig,
    ReplayConfig,
)
from apex_jax.operations.diagnosis import ENDLESS_SECONDS, PATIENCE_SECONDS, REFUSED_SECONDS, SILENCE_SECONDS, Diagnosis
from apex_jax.operations.progress import ProgressReader
from apex_jax.run.metrics import MetricsWriter

CONFIG = Config(
    actor=ActorConfig(processes=1),
    learner=LearnerConfig(learning_rate=0.01),
    replay=ReplayConfig(samples_per_insert=4.0),
    run_directory="runs/x",
)
FREE = CONFIG.replace(replay=ReplayConfig(capacity_transitions=5000), actor=ActorConfig(processes=3))  # of any ratio
USERS_TASK = CONFIG.replace(environment=EnvironmentConfig(task="gymnasium:my_file:MyEnv"))
MISSES = CONFIG.replace(metrics=MetricsConfig(info=("level",)))
WELL: dict[str, float] = {
    "losses/q_values": -1.5,
    "learner/wait_seconds_share": 0.5,
    "actor/wait_seconds_share": 0.5,
    "replay/dropped_stale_priority": 9.0,
    "replay/dropped_malformed": 0.0,
    "ledger/stored": 9.0,
}
FILLED = {"replay/size_transitions": float(CONFIG.replay.min_size_to_sample)}


def warnings_of(
    values: dict[str, float], config: Config = CONFIG, learning: bool = True, silent: float = 0.0
) -> tuple[str, ...]:
    """Returns the warnings once the state has lasted, in which messages go on being refused."""
    diagnosis = Diagnosis(config)
    before = {tag: number - 1 if tag.startswith("replay/dropped_") else number for tag, number in values.items()}
    diagnosis.warnings(0.0, WELL | before, learning, silent)
    return diagnosis.warnings(ENDLESS_SECONDS, WELL | values, learning, silent)


@pytest.mark.parametrize(("config", "state", "parts"), [
    (CONFIG, ({"losses/q_values": -151.0},), ["-151 exceed the 100", "learning_rate (now 0.01)", "loss=huber"]),
    (CONFIG, ({"learner/wait_seconds_share": 0.75},), ["75%", "samples_per_insert (now 4)", "actor.processes"]),
    (FREE, ({"learner/wait_seconds_share": 0.9},), ["90%", "raise actor.processes"]),
    (FREE, ({"actor/wait_seconds_share": 0.75},), ["75%", "lower actor.processes"]),
    (CONFIG, ({"replay/dropped_bad_checksum": 1200.0},), ["1,200", "bad checksum"]),
    (CONFIG, ({"replay/dropped_overflow": 7.0},), ["7 ", "overflow"]),
    (CONFIG, ({"actor/weights_age_seconds": 31.0},), ["31 s", "runs/x/logs", "learner.publish_interval_seconds"]),
    (CONFIG, ({"learner/checkpoint_age_seconds": 720.0},), ["12 minutes", "runs/x", "learner.log"]),
    (CONFIG, ({}, True, SILENCE_SECONDS), ["no frame for 30 s", "actor-0.log"]),
    (CONFIG, ({}, False, 45.0), ["replay does not fill", "no frame for 45 s"]),
    (CONFIG, (FILLED, False, 10 * SILENCE_SECONDS), ["learner.batch_size (now 512)", "learner.log in runs/x/logs"]),
    (USERS_TASK, ({},), ["no episode has ended", "evaluator.max_episode_frames (now 108,000)"]),
    (MISSES, ({"charts/episodic_return": 1.0},), ["the number level in its info", "metrics.info (now level)"]),
])  # fmt: skip
def test_problem_is_one_warning_with_the_key_to_change(config: Config, state: Any, parts: list[str]) -> None:
    values, *rest = state
    [warning] = warnings_of(values, config, *rest)
    assert [part for part in parts if part not in warning] == []


@pytest.mark.parametrize(("config", "state"), [
    (CONFIG, ({},)),
    (CONFIG, ({"actor/wait_seconds_share": 0.75},)),  # the ratio makes them wait
    (CONFIG, ({"learner/wait_seconds_share": 0.9}, False)),  # it waits for the replay to fill
    (CONFIG, ({}, True, SILENCE_SECONDS - 1)),
    (CONFIG.replace(metrics_interval_seconds=60.0), ({}, True, 179.0)),  # frames are counted once a minute
    (CONFIG, ({"actor/weights_age_seconds": 30.0},)),
    (CONFIG, ({"actor/weights_age_seconds": 31.0}, False)),
    (CONFIG, ({"actor/weights_age_seconds": 31.0, "charts/updates_per_second": 0.0},)),
    (CONFIG.replace(learner=LearnerConfig(publish_interval_seconds=60.0)), ({"actor/weights_age_seconds": 600.0},)),
    (CONFIG.replace(actor=ActorConfig(overflow="drop")), ({"replay/dropped_overflow": 7.0},)),
    (CONFIG.replace(environment=EnvironmentConfig(reward_clip=0.0)), ({"losses/q_values": 1e6},)),
    (CONFIG.replace(algorithm=AlgorithmConfig(discount=1.0)), ({"losses/q_values": 1e6},)),
    (USERS_TASK, ({"charts/episodic_return": 1.0},)),
])  # fmt: skip
def test_healthy_run_has_no_warning(config: Config, state: Any) -> None:
    values, *rest = state
    assert warnings_of(values, config, *rest) == ()


def test_waiting_is_reported_only_if_it_lasts() -> None:
    diagnosis, waits = Diagnosis(CONFIG), WELL | {"learner/wait_seconds_share": 0.9}
    assert diagnosis.warnings(0.0, waits, True, 0.0) == ()
    assert diagnosis.warnings(PATIENCE_SECONDS / 2, WELL, True, 0.0) == ()
    assert diagnosis.warnings(PATIENCE_SECONDS, waits, True, 0.0) == ()
    assert len(diagnosis.warnings(2 * PATIENCE_SECONDS, waits, True, 0.0)) == 1
    assert Diagnosis(CONFIG).warnings(0.0, FILLED, False, 10 * SILENCE_SECONDS) == (), "the learner may compile"
    assert Diagnosis(USERS_TASK).warnings(0.0, WELL, True, 0.0) == (), "an episode may be long"
    old = WELL | {"actor/weights_age_seconds": 50.0}
    assert Diagnosis(CONFIG).warnings(0.0, old, True, 0.0) == (), "the learner may just have compiled"


def test_refused_messages_are_reported_until_none_has_been_refused_for_a_while() -> None:
    diagnosis, refused = Diagnosis(CONFIG), WELL | {"replay/dropped_failed_handshake": 5.0}
    assert len(diagnosis.warnings(0.0, refused, True, 0.0)) == 1
    assert len(diagnosis.warnings(REFUSED_SECONDS - 1, refused, True, 0.0)) == 1
    assert diagnosis.warnings(REFUSED_SECONDS, refused, True, 0.0) == ()
    assert len(diagnosis.warnings(200.0, refused | {"replay/dropped_failed_handshake": 6.0}, True, 0.0)) == 1


def warnings_over_a_minute(drawn: float, stored: float, config: Config = FREE, silent: float = 0.0) -> str:
    """Returns the warnings after a minute in which so many transitions were drawn and stored; the actors wait."""
    diagnosis, batch = Diagnosis(config), config.learner.batch_size
    values = WELL | {"learner/wait_seconds_share": 0.0, "actor/wait_seconds_share": 0.99}
    values |= {"charts/updates_per_second": 0.13, "learner/updates": 100.0, "ledger/stored": 70_000.0}
    assert diagnosis.warnings(0.0, values, True, 0.0) == ()
    values |= {"learner/updates": 100.0 + drawn / batch, "ledger/stored": 70_000.0 + stored}
    return "\n".join(diagnosis.warnings(PATIENCE_SECONDS, values, True, silent))


@pytest.mark.parametrize("silent", [0.0, 2 * SILENCE_SECONDS])
def test_learner_slower_than_its_actors_is_reported_with_the_keys_that_limit_actors(silent: float) -> None:
    warning = warnings_over_a_minute(drawn=8 * 512, stored=205_000, silent=silent)
    assert "\n" not in warning
    keys = "samples_per_insert (now 0), actor.processes (now 3), actor.environments (now 32), batch_size (now 512)"
    for part in ("draws 0.02 ", "0.13 updates", "capacity_transitions (now 5,000)", *keys.split(", ")):
        assert part in warning


def test_learner_with_the_replay_ratio_of_the_paper_is_not_reported_as_slow() -> None:
    assert "outrun" not in warnings_over_a_minute(drawn=0.78 * 100_000, stored=100_000)
    assert "outrun" not in warnings_over_a_minute(drawn=100, stored=100_000, config=CONFIG), "its ratio is as asked for"
    assert "outrun" not in warnings_over_a_minute(drawn=100, stored=0)


def test_actors_that_wait_for_a_slow_learner_are_reported_with_the_keys_that_make_it_faster() -> None:
    warning = warnings_over_a_minute(drawn=512, stored=128, config=CONFIG, silent=45.0)
    assert "\n" not in warning
    for part in ("no frame for 45 s", "0.13 updates", "learner.batch_size (now 512)", "samples_per_insert (now 4)"):
        assert part in warning


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


@pytest.mark.parametrize(("tag", "first", "second", "text"), [
    ("storage/copy_age_seconds", ("replay", 9_000.0), ("learner", 10.0), "not been copied for 150 minutes"),
    ("actor/weights_age_seconds", ("actor-0", 100.0), ("actor-1", 0.5), "actors act with weights 100 s old"),
])  # fmt: skip
def test_problem_of_any_process_is_reported(
    tmp_path: Path, tag: str, first: tuple[str, float], second: tuple[str, float], text: str
) -> None:
    now = [0.0]
    reader = ProgressReader(str(tmp_path), CONFIG.replace(actor=ActorConfig(processes=2)), clock=lambda: now[0])
    MetricsWriter(str(tmp_path), "learner").write(0, {"charts/updates_per_second": 5.0})
    for name, age in (first, second):  # the second comes later, and is well
        MetricsWriter(str(tmp_path), name).write(0, {tag: age})
    reader.read()
    now[0] = PATIENCE_SECONDS
    assert any(text in warning for warning in reader.read().warnings)
