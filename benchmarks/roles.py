"""Real worker processes for a benchmark: `main.py --role ...`, each in a temporary run directory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from apex_jax.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def role(name: str, config: Path | str, settings: Sequence[str], cores: set[int] | None = None) -> Iterator[Path]:
    """Runs a role until the end of the block; yields its run directory. `cores`: allowed cores, None = all."""
    with tempfile.TemporaryDirectory(prefix="apex-jax-benchmark-") as directory:
        command = [sys.executable, str(ROOT / "main.py"), "--role", name, "--config", str(config)]
        command += [f"run_directory={directory}", *settings]
        log = open(Path(directory) / "log", "w+")  # noqa: SIM115 - closed below
        with log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
            if cores is not None:
                os.sched_setaffinity(process.pid, cores)
            try:
                yield Path(directory)
                assert process.poll() is None, f"the {name} ended by itself"
            except Exception:
                log.seek(0)
                print(log.read(), file=sys.stderr)
                raise
            finally:
                process.terminate()
                process.wait()


def resident_bytes(directory: Path, name: str) -> float:
    """Returns the resident memory in the newest line of a role's metrics."""
    return float(read_metrics(directory / "metrics" / f"{name}.jsonl")[-1]["system/resident_memory_bytes"])


def server_settings(experience: str, sampling: str, capacity: int) -> list[str]:
    """Returns the settings of a replay server on these addresses, which writes metrics once a second."""
    return [
        f"addresses.experience={experience}",
        f"addresses.sampling={sampling}",
        f"replay.capacity_transitions={capacity}",
        "metrics_interval_seconds=1",
    ]


def free_tcp_addresses(count: int) -> list[str]:
    """Returns loopback addresses whose ports are free now."""
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"tcp://127.0.0.1:{server.getsockname()[1]}" for server in found]
    for server in found:
        server.close()
    return addresses


def split_cores() -> tuple[set[int], set[int]]:
    """Returns one core for the server, and the machine's other cores, if any, for its peers."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}
