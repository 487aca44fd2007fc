"""The summary of a status report: what the process does, how fast, with which peers, and what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from apex_jax.host.errors import printable, short_repr
from apex_jax.operations.status_page import STARTING_SECONDS, STUCK_SECONDS
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
STEADY = ("updates", "frames", "segments", "batches")  # counts of a report that grow all the time; evaluations do not
LINE_CHARACTERS = 400  # of an error or a warning


class ProcessStatus(NamedTuple):
    """The answer of a process to a request for its status."""

    name: str  # as given, or as the process reports it
    address: str
    content: dict[str, Any] | None
    error: str  # why there is no content

    @property
    def problems(self) -> list[str]:
        """What keeps the process from its work, at most MAX_LINES lines."""
        return [self.error] if self.content is None else problems(self.content)[:MAX_LINES]


def summary(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (label, text) pairs; the peer may have put anything into its report."""
    states, reports = _dict(content, "roles"), _dict(content, "reports")
    for name, state in list(states.items())[:MAX_LINES]:  # of a supervisor
        found = dict(_rows(_dict(reports, name)))
        yield short_repr(name), ", ".join(filter(None, (short_repr(state), found.get("now"), found.get("speed"))))
    yield from _rows(content)
    for label, lines in (("problems", problems(content)), ("warnings", warnings(content))):
        if lines or label == "problems":
            yield label, lines[0] if lines else "none"
        yield from (("", line) for line in lines[1:MAX_LINES])
        if len(lines) > MAX_LINES:
            yield "", f"and {len(lines) - MAX_LINES} more, see below"


def problems(content: dict[str, Any]) -> list[str]:
    """Returns what keeps a process, or the processes of a supervisor, from its work or from saving it."""
    return _of_all(content, _problems)


def warnings(content: dict[str, Any]) -> list[str]:
    """Returns what a process, or the processes of a supervisor, advise to change."""
    return _of_all(content, partial(_lines, name="warnings"))


def _of_all(content: dict[str, Any], find: Callable[[dict[str, Any]], Iterator[str]]) -> list[str]:
    reports = _dict(content, "reports")
    of_roles = (f"{short_repr(name)}: {found}" for name in reports for found in find(_dict(reports, name)))
    return [*find(content), *of_roles]


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


def metrics(content: dict[str, Any]) -> dict[str, float]:
    """Returns the newest values of a process by tag."""
    return {tag: value for tag, value in _dict(content, "metrics").items() if is_number(value)}


def frames(content: dict[str, Any]) -> float:
    """Returns the frames of the run, as the process knows them; 0 if it does not."""
    number = content.get("environment_frames")
    return number if is_number(number) else 0


def line(content: dict[str, Any]) -> tuple[str, str, str]:
    """Returns what a process does now, how fast, and how much it has done and saved, each with its age."""
    checkpoint = {"checkpoint": _dict(content, "checkpoint").get("age_seconds")}
    ages = [f"{name} {_seconds(age)} old" for name, age in (_ages(content) | checkpoint).items() if is_number(age)]
    return _activity(content), "".join(_speeds(content)[:1]), ", ".join([*_progress(content), *ages])


def _speeds(content: dict[str, Any]) -> list[str]:
    values = metrics(content)
    speeds = [f"{as_text(tag, float(values[tag]))} {unit}" for tag, unit in SPEEDS.items() if tag in values]
    if is_number(steps := content.get("steps_per_second")):  # of the evaluator
        speeds.append(f"{as_text('', steps)} steps/s")
    return speeds


def _progress(content: dict[str, Any]) -> list[str]:
    return [f"{as_text('', n)} {name} ({_seconds(age)} ago)" for name, n, age, _ in _counts(content)]


def _ages(content: dict[str, Any]) -> dict[str, Any]:
    copy = metrics(content).get("storage/copy_age_seconds")  # on object storage
    return {"weights": content.get("weights_age_seconds"), "copy": copy}


def _rows(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    values = metrics(content)
    if activity := _activity(content):
        yield "now", activity
    waits = [values[tag] for tag in ("learner/wait_seconds_share", "actor/wait_seconds_share") if tag in values]
    if speeds := [*_speeds(content), *(f"waits {share:.0%} of the time" for share in waits)]:
        yield "speed", ", ".join(speeds)
    progress = _progress(content)
    names = ("environment_frames",) if progress else ("updates", "environment_frames")
    counts = {name: content.get(name) for name in names}
    counts["transitions in the replay"] = values.get("replay/size_transitions")
    progress += [f"{as_text('', n)} {name.replace('_', ' ')}" for name, n in counts.items() if is_number(n)]
    if (version := content.get("weights_version")) is not None:
        progress.append(f"weights version {short_repr(version)}")
    if progress:
        yield "progress", ", ".join(progress)
    for name, age in _ages(content).items():
        if is_number(age):
            yield name, f"{duration(age)} old"
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
    if metrics(content).get(tag, 0.0) > 0:
        return works
    missing = _missing(content)
    return f"waits for {', '.join(missing)}" if missing else waits


def _problems(content: dict[str, Any]) -> Iterator[str]:
    if content.get("healthy") is False:
        yield f"no progress for {as_text('', content.get('progress_age_seconds'))} s"
    for name in _missing(content):
        yield f"is not connected to {name}"
    peers = _dict(content, "peers")
    yield from (f"has no {name}" for name in ("learner", "actors") if name in peers and not peers[name])
    for name, reason in _dict(content, "unreadable_keys").items():
        yield f"keys of {short_repr(name)} cannot be read: {short_repr(reason)}"
    yield from _stalls(content)
    yield from _lines(content, "errors")


def _stalls(content: dict[str, Any]) -> Iterator[str]:
    """Yields the counts that no longer grow; before any has grown, the process may still start."""
    counts = [count for count in _counts(content) if count.name in STEADY]
    grown = [count for count in counts if count.has_changed]
    for name, _, age, _ in grown:
        if age > STUCK_SECONDS:
            yield f"no {name} for {_seconds(age)}"
    if counts and not grown and (age := max(count.age_seconds for count in counts)) > STARTING_SECONDS:
        yield f"no {' or '.join(count.name for count in counts)} since its start, {_seconds(age)} ago"


class _Count(NamedTuple):
    name: str
    number: float
    age_seconds: float  # since it last grew
    has_changed: bool  # since the start of the process


def _counts(content: dict[str, Any]) -> list[_Count]:
    progress = _dict(content, "progress")
    counts = []
    for name in progress:
        count = _dict(progress, name)
        if is_number(number := count.get("count")) and is_number(age := count.get("age_seconds")):
            counts.append(_Count(short_repr(name), number, age, count.get("has_changed") is True))
    return counts


def _seconds(value: float) -> str:
    return f"{value:,.0f} s"


def _lines(content: dict[str, Any], name: str) -> Iterator[str]:
    lines = content.get(name)
    for line in lines if isinstance(lines, list) else ():
        if isinstance(line, str):
            yield printable(line)[:LINE_CHARACTERS]


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


def _dict(content: dict[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    return value if isinstance(value, dict) else {}
