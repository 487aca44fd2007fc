"""Sends one report to CloudWatch, for the alarms: whether the role is healthy, and the use of memory and disk."""

from __future__ import annotations

import os
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

from deploy.host.aws import client

TIMEOUT_SECONDS = 10.0
DATA = "/var/lib/apex-jax"
MEMINFO = Path("/proc/meminfo")


def main() -> int:
    """Measures and reports; returns the exit code."""
    environment = os.environ
    values = {
        "Healthy": float(is_healthy(environment["APEX_JAX_STATUS"])),
        "MemoryUsedPercent": memory_used_percent(MEMINFO.read_text()),
        "DiskUsedPercent": disk_used_percent(environment.get("APEX_JAX_DATA", DATA)),
    }
    name = environment.get("APEX_JAX_NAME", environment["APEX_JAX_ROLE"])
    try:
        report(values, environment["APEX_JAX_NAMESPACE"], environment["APEX_JAX_FLEET"], name)
    except Exception as error:  # the timer retries in a minute, and missing reports raise an alarm
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def is_healthy(url: str) -> bool:
    """Returns whether a role's status page answers 200."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=TIMEOUT_SECONDS) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def memory_used_percent(meminfo: str) -> float:
    """Returns the share of memory that is not available to a new program, 0 to 100, from the text of /proc/meminfo."""
    fields = {line.split(":")[0]: float(line.split()[1]) for line in meminfo.splitlines() if len(line.split()) > 1}
    return 100.0 * (1.0 - fields["MemAvailable"] / fields["MemTotal"])


def disk_used_percent(path: str) -> float:
    """Returns the used share of the disk that holds `path`, 0 to 100."""
    usage = shutil.disk_usage(path)
    return 100.0 * usage.used / usage.total


def report(values: dict[str, float], namespace: str, fleet: str, name: str) -> None:
    """Sends the values; their dimensions are fleet and role (of a replay server its name), not the host.

    Alarms outlive hosts.
    """
    dimensions = [{"Name": "Fleet", "Value": fleet}, {"Name": "Role", "Value": name}]
    client("cloudwatch").put_metric_data(
        Namespace=namespace,
        MetricData=[{"MetricName": name, "Dimensions": dimensions, "Value": value} for name, value in values.items()],
    )


if __name__ == "__main__":
    sys.exit(main())
