"""Sends one report to CloudWatch, for the alarms: whether the role is healthy or its run over, and memory and disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from apex_jax.operations.records import ProcessStatus
from apex_jax.transport.http_link import StatusError, fetch
from deploy.host.aws import client

TIMEOUT_SECONDS = 10.0
DATA = "/var/lib/apex-jax"
MEMINFO = Path("/proc/meminfo")


def main() -> int:
    """Measures and reports; returns the exit code."""
    environment = os.environ
    try:
        finished = is_finished(environment["APEX_JAX_ROLE"])
        values = {
            "Finished": float(finished),
            "Healthy": float(finished or is_healthy(environment["APEX_JAX_STATUS"])),
            "MemoryUsedPercent": memory_used_percent(MEMINFO.read_text()),
            "DiskUsedPercent": disk_used_percent(environment.get("APEX_JAX_DATA", DATA)),
        }
        report(values, environment["APEX_JAX_NAMESPACE"], environment["APEX_JAX_RUN_AND_END"])
    except Exception as error:  # the timer retries in a minute, and missing reports raise an alarm
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def is_finished(role: str) -> bool:
    """Returns whether the role has ended because the run is over (not by a signal), and its results are copied.

    Its unit is inactive only after ExecStopPost, which copies them.
    """
    shown = subprocess.run(
        ["systemctl", "show", f"apex-jax@{role}.service", "--property=ActiveState,ExecMainCode,ExecMainStatus"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {*shown.splitlines()} >= {"ActiveState=inactive", "ExecMainCode=1", "ExecMainStatus=0"}  # 1: it has exited


def is_healthy(address: str) -> bool:
    """Returns whether a role's status shows no problem; prints those that it shows, for the log of the host."""
    try:
        status = ProcessStatus("", address, fetch(address, TIMEOUT_SECONDS)[1], "")
    except StatusError as error:
        status = ProcessStatus("", address, None, str(error))
    for problem in status.problems:
        print(f"not healthy: {problem}", flush=True)
    return not status.problems


def memory_used_percent(meminfo: str) -> float:
    """Returns the share of memory that is not available to a new program, 0 to 100, from the text of /proc/meminfo."""
    fields = {line.split(":")[0]: float(line.split()[1]) for line in meminfo.splitlines() if len(line.split()) > 1}
    return 100.0 * (1.0 - fields["MemAvailable"] / fields["MemTotal"])


def disk_used_percent(path: str) -> float:
    """Returns the used share of the disk that holds `path`, 0 to 100."""
    usage = shutil.disk_usage(path)
    return 100.0 * usage.used / usage.total


def report(values: dict[str, float], namespace: str, run: str) -> None:
    """Sends the values to the namespace of fleet and role, not by host: alarms outlive hosts.

    `Finished` is that of one `run` with its limits: the end of another does not end its hosts.
    """
    of_run = [{"Name": "Run", "Value": run}]
    client("cloudwatch").put_metric_data(
        Namespace=namespace,
        MetricData=[
            {"MetricName": metric, "Value": value, "Dimensions": of_run if metric == "Finished" else []}
            for metric, value in values.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
