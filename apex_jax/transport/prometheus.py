"""The status of a process in Prometheus's text format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any


def gauges(content: Mapping[str, Any]) -> bytes:
    """Returns the numbers of a report in Prometheus's text format, labelled with the role and name of the process.

    `{"metrics": {"learner/updates": 5}}` becomes `apex_jax_learner_updates`; lists and strings are omitted. The
    `reports` that a local run has of its processes are labelled with those, as if each had been fetched by itself.
    """
    from prometheus_client import CollectorRegistry, Gauge, generate_latest  # imported here: takes 0.1 s

    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for report in ({**content, "reports": None}, *content.get("reports", {}).values()):
        labels = {"role": str(report.get("role")), "name": str(report.get("name"))}
        for name, number in _numbers("", {**report, **report.get("metrics", {}), "metrics": None}):
            if name not in gauges:
                gauges[name] = Gauge(f"apex_jax_{name}", "see docs/metrics.md", list(labels), registry=registry)
            gauges[name].labels(**labels).set(number)
    return generate_latest(registry)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yields (name, number) of each number in a report; nested names are joined by "_"."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _numbers(re.sub(r"\W", "_", f"{name}_{key}" if name else key), member)
    elif isinstance(value, bool | int | float):
        yield name, float(value)
