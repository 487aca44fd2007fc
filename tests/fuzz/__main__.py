"""Fuzzes the sockets: `python -m tests.fuzz --messages 1000000 --seed 1 [--socket LINK|tcp|curve]`.

`--files 10000` opens as many damaged runs, exported folders and packed results instead.

Sends as many messages as asked for to the server of each link, and to real processes raw bytes, HTTP and broken
handshakes. Prints a line of JSON for each. Exit code 1 if the system crashed, grew, or did not serve
the next good message.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported, which is below

import argparse
import contextlib
import json
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex_jax.run.metrics import resident_memory_bytes
from tests.fuzz.files import fuzz_files
from tests.fuzz.targets import Target, make_target
from tests.fuzz.tcp import fuzz_tcp

SOCKETS = ("experience", "sampling", "weights")
PORTS = ("tcp", "curve")  # of a fleet without keys, and of one with some
PARTS = 10  # after each of which a good message must be served
WARM_UP_PARTS = 3  # in which queues and allocators fill
GROWTH_BYTES = 32 * 2**20
SETTLED_SECONDS = 0.3  # without a connection that is made or closed


def fuzz(link: str, messages: int, seed: int) -> dict[str, Any]:
    """Fuzzes the server of a link; returns the figures, with an empty `failures` if everything held."""
    started = time.monotonic()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="apex-jax-fuzz-") as folder:
        marker = str(Path(folder, "unpickled"))
        with contextlib.closing(make_target(link, Path(folder), seed, marker)) as target:
            growth_bytes = _drive(target, messages, failures)
            dropped = target.dropped()
            failures += [f"{number} x {crash}" for crash, number in target.crashes.items()]
        failures += ["a pickle was loaded"] if Path(marker).exists() else []
    if growth_bytes > GROWTH_BYTES:
        failures.append(f"resident memory grew by {growth_bytes} bytes")
    seconds = time.monotonic() - started
    return {
        "socket": link,
        "messages": messages,
        "seed": seed,
        "seconds": round(seconds, 1),
        "messages_per_second": round(messages / seconds),
        "dropped": dict(sorted(dropped.items())),
        "growth_bytes": growth_bytes,
        "failures": failures,
    }


def _drive(target: Target, messages: int, failures: list[str]) -> int:
    """Sends the messages; returns the growth of resident memory after a warm-up."""
    target.serve_good()
    memory: list[int] = []
    handles = [_settled_handles()]  # with every peer connected: later some may be just connecting again
    for _ in range(PARTS):
        for _ in range(messages // PARTS):
            target.send(target.fuzzer.next())
        try:
            target.serve_good()
        except AssertionError as error:
            failures.append(str(error))
            break
        memory.append(resident_memory_bytes())
        handles.append(_handles())
    half = len(handles) // 2  # the first of which has the beginning, too
    if half and any(
        min(now) > max(before) for before, now in zip(_columns(handles[:half]), _columns(handles[half:]), strict=True)
    ):
        failures.append(f"file descriptors and threads grew: {handles}")
    settled = memory[min(WARM_UP_PARTS, len(memory) - 1) - 1 :] or [0]
    return max(0, settled[-1] - settled[0])


def _handles() -> tuple[int, int]:
    """Returns the numbers of open files and of threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _settled_handles() -> tuple[int, int]:
    """Returns the values once they are stable."""
    handles, since = _handles(), time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        time.sleep(0.01)
        if (now := _handles()) != handles:
            handles, since = now, time.monotonic()
    return handles


def _columns(rows: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    return list(zip(*rows, strict=True))


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="to each socket")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--socket", choices=(*SOCKETS, *PORTS), action="append", help="default: all")
    parser.add_argument("--files", type=int, metavar="N", help="instead of the sockets: N damaged files")
    chosen = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # what is refused is counted
    if chosen.files:
        with tempfile.TemporaryDirectory(prefix="apex-jax-fuzz-") as folder:
            figures = fuzz_files(Path(folder), chosen.files, chosen.seed)
        print(json.dumps(figures), flush=True)
        return int(bool(figures["failures"]))
    failed = False
    for link in chosen.socket or (*SOCKETS, *PORTS):
        with tempfile.TemporaryDirectory(prefix="apex-jax-fuzz-") as folder:
            figures = (
                fuzz_tcp(Path(folder), max(200, chosen.messages // 1_000), chosen.seed, has_keys=link == "curve")
                if link in PORTS
                else fuzz(link, chosen.messages, chosen.seed)
            )
        print(json.dumps(figures), flush=True)
        failed |= bool(figures["failures"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
