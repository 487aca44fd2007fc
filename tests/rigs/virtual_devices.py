"""Tests on several virtual CPU devices, each in a process of its own: JAX counts its devices once."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable

from tests.rigs.processes import ROOT

INSIDE = "APEX_JAX_VIRTUAL_DEVICES"
SECONDS = 200.0


def on_virtual_devices(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test, whose arguments are strings: it runs in a process that has `count` devices."""

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def in_a_process(**arguments: str) -> None:
            if os.environ.get(INSIDE):
                test(**arguments)
                return
            lines = f"from {test.__module__} import {test.__name__} as test\ntest(**{arguments!r})"
            environment = {**os.environ, INSIDE: "1", "JAX_NUM_CPU_DEVICES": str(count), "JAX_PLATFORMS": "cpu"}
            command = [sys.executable, "-W", "error", "-c", f"import tests.conftest\n{lines}"]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            assert done.returncode == 0, done.stderr

        return in_a_process

    return decorated
