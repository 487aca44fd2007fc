"""Finds problems of a running run, and names the key to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from apex_jax.config import Config
from apex_jax.run.metrics import EVALUATED_INFO, EVALUATED_RETURN, TRAINING_INFO

PATIENCE_SECONDS = 60.0  # a shorter problem is not reported
REFUSED_SECONDS = 30.0  # for which refused messages are reported after the last one
ENDLESS_SECONDS = 180.0  # of learning without the end of an episode
SILENCE_SECONDS = 30.0  # without a new frame; the longer of this and the next limit applies
SILENCE_LINES = 3  # intervals of the metrics without a new frame
OLD_WEIGHTS_SECONDS = 30.0  # age of an actor's weights; the longer of this and the next limit applies
OLD_WEIGHTS_INTERVALS = 10  # the same age, in publishing intervals
WAITING_SHARE = 0.6  # a process that waits a larger share of its time than this is held up by another one
BUSY_SHARE = 0.1  # a process that waits a smaller share of its time than this is the slow side
# Transitions drawn per transition stored. Below this, most are overwritten before they are drawn; the paper has 0.78.
OUTRUN_RATIO = 0.5
Q_VALUE_SLACK = 1.5  # q-values may exceed the bound of the rewards by this factor before they converge
EXPECTED_DROPS = {
    "replay/dropped_stale_priority",  # the transition was overwritten while the learner learned from it
    "replay/dropped_duplicate_segment",  # resent, since its acknowledgement was lost with a connection or server
}


class Symptom(NamedTuple):
    """A problem at this moment."""

    name: str
    text: str  # the problem and its fix
    patience_seconds: float = 0.0  # how long it must last before it is reported


class Diagnosis:
    """Tracks how long each symptom has lasted."""

    def __init__(self, config: Config):
        self._config = config
        self._since: dict[str, float] = {}
        self._refused: dict[str, tuple[float, float]] = {}  # refused messages by tag, and when they last became more
        self._mark: tuple[float, float, float] | None = None  # time, transitions drawn and stored at the last mark
        self._ratio: float | None = None  # drawn per stored between the last two marks

    def warnings(
        self, now: float, values: Mapping[str, float], learning: bool, silent_seconds: float, ends: bool = False
    ) -> tuple[str, ...]:
        """Returns the warnings at `now` (seconds).

        `values`: the newest value of each metrics tag; `silent_seconds`: time since the number of frames last grew, if
        there are actors; `ends`: whether a limit of the run is reached, after which experience may stop.
        """
        if learning and "learner/updates" in values and "ledger/stored" in values:
            self._measure_ratio(
                now, values["learner/updates"] * self._config.learner.batch_size, values["ledger/stored"]
            )
        symptoms = [
            *_divergence(self._config, values),
            *([] if ends else _flow(self._config, values, learning, silent_seconds, self._ratio)),
            *_old_weights(self._config, values, learning),
            *self._refusals(now, values),
            *_endless(self._config, values, learning),
            *_missing_info(self._config, values),
            *_durability(self._config, values),
        ]
        self._since = {symptom.name: self._since.get(symptom.name, now) for symptom in symptoms}
        return tuple(s.text for s in symptoms if now - self._since[s.name] >= s.patience_seconds)

    def _refusals(self, now: float, values: Mapping[str, float]) -> Iterator[Symptom]:
        """Yields a symptom for each reason for which messages have been refused lately."""
        expected = EXPECTED_DROPS | ({"replay/dropped_overflow"} if self._config.actor.overflow == "drop" else set())
        for tag, number in values.items():
            if not tag.startswith("replay/dropped_") or tag in expected:
                continue
            before, grown_seconds = self._refused.get(tag, (0.0, -math.inf))
            grown_seconds = now if number > before else grown_seconds
            self._refused[tag] = number, grown_seconds
            if now - grown_seconds < REFUSED_SECONDS:
                reason = tag.removeprefix("replay/dropped_").replace("_", " ")
                yield Symptom(tag, f"{number:,.0f} messages were refused ({reason}): see the logs of the roles")

    def _measure_ratio(self, now: float, drawn: float, stored: float) -> None:
        """Measures drawn per stored over at least a minute: an outrun learner draws in bursts, and actors may pause."""
        then, drawn_then, stored_then = self._mark or (now, drawn, stored)
        if self._mark is None or drawn < drawn_then or stored < stored_then:  # a process has been restarted
            self._mark = now, drawn, stored
        elif now - then >= PATIENCE_SECONDS and stored > stored_then:
            self._ratio = (drawn - drawn_then) / (stored - stored_then)
            self._mark = now, drawn, stored


def _divergence(config: Config, values: Mapping[str, float]) -> Iterator[Symptom]:
    q_value, clip, discount = values.get("losses/q_values"), config.environment.reward_clip, config.algorithm.discount
    if q_value is not None and clip > 0 and discount < 1:
        most = clip / (1 - discount)
        if abs(q_value) > Q_VALUE_SLACK * most:
            what = f"q-values of {q_value:,.0f} exceed the {most:,.0f} that rewards allow, so learning diverges"
            yield Symptom("q_values", f"{what}: {config.fix_of_divergence}")


def _flow(
    config: Config, values: Mapping[str, float], learning: bool, silent_seconds: float, ratio: float | None
) -> Iterator[Symptom]:
    filled = values.get("replay/size_transitions", 0.0) >= config.replay.min_size_to_sample
    waits = {who: values.get(f"{who}/wait_seconds_share", 0.0) for who in ("learner", "actor")}
    is_silent = silent_seconds >= max(SILENCE_SECONDS, SILENCE_LINES * config.metrics_interval_seconds)
    target = config.replay.samples_per_insert
    is_outrun = learning and not target and ratio is not None and ratio < OUTRUN_RATIO
    if is_outrun and ratio is not None:
        yield Symptom("outrun", _outrun(config, values, ratio))
    if filled and not learning:  # actors wait for the learner, so missing frames need no warning
        what = "the replay has been full enough for a minute, but learning has not begun"
        slow = f"it compiles, or learner.batch_size (now {config.learner.batch_size}) is too large for this machine"
        yield Symptom("start", f"{what}: {slow}; see {_logs(config, 'learner')}", PATIENCE_SECONDS)
    elif is_silent and learning and waits["actor"] > WAITING_SHARE and waits["learner"] < BUSY_SHARE:
        if not is_outrun:
            yield Symptom("busy", _busy(config, values, silent_seconds))
    elif is_silent:
        what = "no new experience comes" if learning else "the replay does not fill"
        see = _logs(config, "actor-0", "replay")
        yield Symptom("silence", f"{what}: no frame for {silent_seconds:.0f} s; see {see}")
    if not learning or is_outrun:  # the warnings above already cover these cases
        return
    if waits["learner"] > WAITING_SHARE:
        ratio_or = f"replay.samples_per_insert (now {target:g}), or " if target else ""
        what = f"the learner waits for batches {waits['learner']:.0%} of the time"
        yield Symptom("learner", f"{what}: raise {ratio_or}actor.processes", PATIENCE_SECONDS)
    if waits["actor"] > WAITING_SHARE and not target:  # with a target, actors wait for a slower learner by design
        fix = "give it a core of its own, or lower actor.processes"
        what = f"actors wait for the replay server {waits['actor']:.0%} of the time"
        yield Symptom("actor", f"{what}: {fix}", PATIENCE_SECONDS)


def _outrun(config: Config, values: Mapping[str, float], ratio: float) -> str:
    """Returns the warning that actors overwrite the replay before the learner has drawn from it."""
    actor = config.actor
    fewer = f"actor.processes (now {actor.processes})" if actor.processes > 1 else ""
    lower = [fewer, f"actor.environments (now {actor.environments})", _smaller_batches(config)]
    return (
        f"the learner is outrun: it draws {ratio:.2g} transitions for each one that is stored,"
        f" at {values.get('charts/updates_per_second', 0.0):.2g} updates per second:"
        " set replay.samples_per_insert (now 0), which makes actors wait for the learner,"
        f" or lower {', '.join(filter(None, lower))},"
        f" or raise replay.capacity_transitions (now {config.replay.capacity_transitions:,})"
    )


def _busy(config: Config, values: Mapping[str, float], silent_seconds: float) -> str:
    target = config.replay.samples_per_insert
    ratio = f" or replay.samples_per_insert (now {target:g})" if target else ""
    return (
        f"actors wait for the learner, no frame for {silent_seconds:.0f} s: it makes"
        f" {values.get('charts/updates_per_second', 0.0):.2g} updates per second:"
        f" lower {_smaller_batches(config)}{ratio}"
    )


def _smaller_batches(config: Config) -> str:
    return f"learner.batch_size (now {config.learner.batch_size})"


def _old_weights(config: Config, values: Mapping[str, float], learning: bool) -> Iterator[Symptom]:
    age, interval = values.get("actor/weights_age_seconds", 0.0), config.learner.publish_interval_seconds
    updates = values.get("charts/updates_per_second", 1.0) > 0  # without updates there are no newer weights
    if learning and updates and age > max(OLD_WEIGHTS_INTERVALS * interval, OLD_WEIGHTS_SECONDS):
        what = f"actors act with weights {age:,.0f} s old, though the learner sends new ones every {interval:g} s"
        fix = f"see {_logs(config, 'actor-0')}, and addresses.weights and learner.publish_interval_seconds"
        yield Symptom("weights", f"{what}: {fix}", OLD_WEIGHTS_SECONDS)  # they are old after the learner has compiled


def _logs(config: Config, *roles: str) -> str:
    """Returns the place of the messages of these roles: log files, or the output of a run in one process."""
    files = " and ".join(f"{role}.log" for role in roles)
    return f"{files} in {config.directory}/logs" if config.processes == "many" else "the messages of this program"


def _endless(config: Config, values: Mapping[str, float], learning: bool) -> Iterator[Symptom]:
    """Yields a symptom if episodes of a user's environment seem to have no end; EnvPool's tasks have limits."""
    is_due = learning and "ledger/stored" in values and config.environment.has_spaces  # the replay server counts games
    if is_due and not {"charts/episodic_return", EVALUATED_RETURN} & set(values):
        limits = ("environment", config.environment), ("evaluator", config.evaluator)
        keys = " and ".join(f"{name}.max_episode_frames (now {group.max_episode_frames:,})" for name, group in limits)
        yield Symptom("endless", f"no episode has ended yet: if episodes have no end, lower {keys}", ENDLESS_SECONDS)


def _missing_info(config: Config, values: Mapping[str, float]) -> Iterator[Symptom]:
    for name in config.metrics.info:
        tags = {f"{TRAINING_INFO}{name}", f"{EVALUATED_INFO}{name}"}
        if {"charts/episodic_return", EVALUATED_RETURN} & set(values) and not tags & set(values):
            what = f"no game so far had the number {name} in its info at its end"
            yield Symptom(f"info {name}", f"{what}: see metrics.info (now {', '.join(config.metrics.info)})")


def _durability(config: Config, values: Mapping[str, float]) -> Iterator[Symptom]:
    for tag, interval, what, fix in (
        (
            "learner/checkpoint_age_seconds",
            config.learner.checkpoint_interval_seconds,
            "no checkpoint has been saved",
            f"make room in {config.directory}, see {_logs(config, 'learner')}",
        ),
        (
            "storage/copy_age_seconds",
            config.storage.interval_seconds,
            "the run has not been copied",
            f"see {_logs(config, 'learner', 'replay')} for what is wrong with storage.url",
        ),
    ):
        age = values.get(tag, 0.0)
        if age > 2 * interval + PATIENCE_SECONDS:
            yield Symptom(tag, f"{what} for {age / 60:,.0f} minutes: {fix}")
