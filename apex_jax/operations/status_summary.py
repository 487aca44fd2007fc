"""What a status report says: what the process does, how fast, how far it is, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from apex_jax.host.errors import printable, short_repr
from apex_jax.operations.status_page import STARTING_SECONDS, STUCK_SECONDS
from apex_jax.run.metric_files import is_number

MAX_LINES = 6  # of the problems and of the warnings of a process
ACTIVITIES = {  # by role: a metric and its unit, what the role does while it is positive, and what it may do else
    "learner": ("charts/updates_per_second", "updates/s", "learns", "waits for batches, or compiles"),
    "actor": ("actor/steps_per_second", "steps/s", "acts", "waits for the replay server, or compiles"),
    "replay": ("replay/inserts_per_second", "transitions/s stored", "stores segments", "waits for segments"),
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

    @property
    def warnings(self) -> list[str]:
        """What the process advises to change, at most MAX_LINES lines."""
        return list(_lines(self.content or {}, "warnings"))[:MAX_LINES]

    @property
    def cells(self) -> tuple[str, str, str]:
        """What the process does now, how fast, and how much it has done and saved, each with its age."""
        if self.content is None:
            return "unreachable", "", ""
        return _activity(self.content), _speed(self.content), ", ".join(_progress(self.content))


def with_roles(status: ProcessStatus) -> list[ProcessStatus]:
    """Returns a status, then those that a supervisor has of its processes."""
    reports = _dict(status.content or {}, "reports")
    names = {name: f"{status.name}/{short_repr(name)}" for name in reports}
    return [status, *(ProcessStatus(names[name], status.address, _dict(reports, name), "") for name in reports)]


def problems(content: dict[str, Any]) -> list[str]:
    """Returns what keeps a process from its work, or from saving it; the peer may have put anything into its report."""
    found = []
    if content.get("healthy") is False:
        age = content.get("progress_age_seconds")
        found.append(f"no progress for {_seconds(age) if is_number(age) else short_repr(age)}")
    found += [f"is not connected to {name}" for name in _missing(content)]
    peers = _dict(content, "peers")
    found += [f"has no {name}" for name in ("learner", "actors") if name in peers and not peers[name]]
    for name, reason in _dict(content, "unreadable_keys").items():
        found.append(f"keys of {short_repr(name)} cannot be read: {short_repr(reason)}")
    return [*found, *_stalls(content), *_lines(content, "errors")]


def metrics(content: dict[str, Any]) -> dict[str, float]:
    """Returns the newest values of a process by tag."""
    return {tag: value for tag, value in _dict(content, "metrics").items() if is_number(value)}


def frames(content: dict[str, Any]) -> float:
    """Returns the frames of the run, as the process knows them; 0 if it does not."""
    number = content.get("environment_frames")
    return number if is_number(number) else 0


def _activity(content: dict[str, Any]) -> str:
    role, phase = content.get("role"), content.get("phase")
    if states := _dict(content, "roles"):  # of a supervisor
        others = [f"{short_repr(name)} {short_repr(state)}" for name, state in states.items() if state != "running"]
        return ", ".join(others[:MAX_LINES]) or "all roles run"
    if role == "evaluator" and phase is not None:
        return short_repr(phase) if content.get("weights_version") is not None else "waits for weights"
    if not isinstance(role, str) or role not in ACTIVITIES:
        return ""
    tag, _, works, waits = ACTIVITIES[role]
    if metrics(content).get(tag, 0.0) > 0:
        return works
    missing = _missing(content)
    return f"waits for {', '.join(missing)}" if missing else waits


def _speed(content: dict[str, Any]) -> str:
    values = metrics(content)
    speeds = [f"{values[tag]:,.1f} {unit}" for tag, unit, *_ in ACTIVITIES.values() if tag in values]
    if is_number(steps := content.get("steps_per_second")):  # of the evaluator
        speeds.append(f"{steps:,.1f} steps/s")
    return "".join(speeds[:1])


def _progress(content: dict[str, Any]) -> Iterator[str]:
    for name, number, age, _ in _counts(content):
        yield f"{number:,.0f} {name} ({_seconds(age)} ago)"
    ages = {
        "weights": content.get("weights_age_seconds"),
        "copy": metrics(content).get("storage/copy_age_seconds"),  # on object storage
        "checkpoint": _dict(content, "checkpoint").get("age_seconds"),
    }
    yield from (f"{name} {_seconds(age)} old" for name, age in ages.items() if is_number(age))


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


def _dict(content: dict[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    return value if isinstance(value, dict) else {}
