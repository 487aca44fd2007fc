"""The summary of a status report: what the process does, how fast, with which peers, and what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from apex_jax.host.errors import short_repr
from apex_jax.operations.diagnosis import EXPECTED_DROPS
from apex_jax.run.metric_files import is_number

MAX_LINES = 6  # of problems, and of the roles of a supervisor
ACTIVITIES = {  # by role: a metric, what the role does while it is positive, and what the role may do while it is 0
    "learner": ("charts/updates_per_second", "learns", "waits for batches, or compiles"),
    "actor": ("actor/steps_per_second", "acts", "waits for the replay server, or compiles"),
    "replay": ("replay/inserts_per_second", "stores segments", "waits for segments"),
}
SPEEDS = {
    "charts/updates_per_second": "updates/s",
    "charts/environment_frames_per_second": "frames/s",
    "replay/inserts_per_second": "transitions/s stored",
    "replay/samples_per_second": "transitions/s drawn",
    "actor/steps_per_second": "steps/s",
}
PROBLEMS = ("learner/failed_checkpoints", "storage/failed_copies", "replay/journal_errors", "ledger/lost_with_replay")


def summary(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (label, text) pairs; the peer may have put anything into its report."""
    states, reports = _dict(content, "roles"), _dict(content, "reports")
    for name, state in list(states.items())[:MAX_LINES]:  # of a supervisor
        rows = dict(_rows(_dict(reports, name)))
        yield short_repr(name), ", ".join(filter(None, (short_repr(state), rows.get("now"), rows.get("speed"))))
    yield from _rows(content)
    problems = list(_problems(content))
    problems += [f"{short_repr(name)}: {problem}" for name in reports for problem in _problems(_dict(reports, name))]
    yield "problems", problems[0] if problems else "none"
    yield from (("", problem) for problem in problems[1:MAX_LINES])
    if len(problems) > MAX_LINES:
        yield "", f"and {len(problems) - MAX_LINES} more, see below"


def as_text(name: str, value: Any) -> str:
    """Returns the value of a report's field of this name, with unit and separators if it is a number."""
    if value is None:
        return "none"
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e18 < value < 1e18:
        return short_repr(value)
    if re.search(r"(^|[./])(pid|versions[./].*|\w*version)$", name):  # an identifier, not a quantity
        return short_repr(value)
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def duration(seconds: Any) -> str:
    """Returns a number of seconds as hours, minutes and seconds; another value as it is."""
    is_sane = isinstance(seconds, int | float) and 0 <= seconds < 1e10
    return str(timedelta(seconds=int(seconds))) if is_sane else short_repr(seconds)


def _rows(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    metrics = _metrics(content)
    if activity := _activity(content):
        yield "now", activity
    speeds = [f"{as_text(tag, float(metrics[tag]))} {unit}" for tag, unit in SPEEDS.items() if tag in metrics]
    if is_number(steps := content.get("steps_per_second")):  # of the evaluator
        speeds.append(f"{as_text('', steps)} steps/s")
    waits = [metrics[tag] for tag in ("learner/wait_seconds_share", "actor/wait_seconds_share") if tag in metrics]
    speeds += [f"waits {share:.0%} of the time" for share in waits]
    if speeds:
        yield "speed", ", ".join(speeds)
    counts = {name: content.get(name) for name in ("updates", "environment_frames")}
    counts["transitions in the replay"] = metrics.get("replay/size_transitions")
    progress = [f"{as_text('', n)} {name.replace('_', ' ')}" for name, n in counts.items() if is_number(n)]
    if (version := content.get("weights_version")) is not None:
        progress.append(f"weights version {short_repr(version)}")
    if progress:
        yield "progress", ", ".join(progress)
    if "checkpoint" in content:
        saved = _dict(content, "checkpoint")
        at = f"at {as_text('', saved.get('updates'))} updates, {duration(saved.get('age_seconds'))} old"
        yield "checkpoint", at if saved else "none yet"
    if peers := [_peer(short_repr(name), value) for name, value in _dict(content, "peers").items()]:
        yield "peers", ", ".join(peers[:MAX_LINES])


def _activity(content: dict[str, Any]) -> str:
    role, phase = content.get("role"), content.get("phase")
    if role == "evaluator" and phase is not None:
        return short_repr(phase) if content.get("weights_version") is not None else "waits for weights"
    if not isinstance(role, str) or role not in ACTIVITIES:
        return ""
    tag, works, waits = ACTIVITIES[role]
    if _metrics(content).get(tag, 0.0) > 0:
        return works
    missing = _missing(content)
    return f"waits for {', '.join(missing)}" if missing else waits


def _problems(content: dict[str, Any]) -> Iterator[str]:
    if content.get("healthy") is False:
        yield f"no progress for {as_text('', content.get('progress_age_seconds'))} s"
    for name in _missing(content):
        yield f"is not connected to {name}"
    for name, reason in _dict(content, "unreadable_keys").items():
        yield f"keys of {short_repr(name)} cannot be read: {short_repr(reason)}"
    for tag, value in _metrics(content).items():
        is_drop = tag.startswith("replay/dropped_") and tag not in EXPECTED_DROPS
        if (is_drop or tag in PROBLEMS) and value > 0:
            yield f"{short_repr(tag)} {as_text(tag, value)}"


def _missing(content: dict[str, Any]) -> list[str]:
    """Returns the servers that the process has not joined, with the state of each connection."""
    peers = _dict(content, "peers").items()
    missing = [
        f"{short_repr(name)} ({short_repr(state)})"
        for name, state in peers
        if isinstance(state, str) and state != "joined"
    ]
    return missing[:MAX_LINES]


def _peer(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value):,} {name}"
    if isinstance(value, dict) or value is None:
        return f"{name} joined" if value else f"no {name}"
    return f"{name.replace('_', ' ')} {as_text('', value)}"


def _metrics(content: dict[str, Any]) -> dict[str, float]:
    return {tag: value for tag, value in _dict(content, "metrics").items() if is_number(value)}


def _dict(content: dict[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    return value if isinstance(value, dict) else {}
