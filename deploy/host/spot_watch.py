"""Stops the role when EC2 gives the two minutes' notice that a spot instance will be taken away."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from deploy.host.metadata import Metadata

POLL_SECONDS = 5.0


def main() -> int:
    """Waits for a notice, then stops the unit of APEX_JAX_ROLE; returns the exit code of that."""
    unit = f"apex-jax@{os.environ['APEX_JAX_ROLE']}.service"
    notice = wait_for_notice(Metadata(), float(os.environ.get("APEX_JAX_POLL_SECONDS", POLL_SECONDS)))
    print(f"spot notice: {notice}; stopping {unit}", flush=True)
    return subprocess.run(["systemctl", "stop", unit], check=False).returncode


def wait_for_notice(metadata: Metadata, poll_seconds: float) -> str:
    """Asks until there is a notice, and returns it. A service that does not answer is asked again."""
    failing = False
    while True:
        try:
            if notice := metadata.get("spot/instance-action"):
                return " ".join(notice.split())
            failing = False
        except OSError as error:
            if not failing:
                print(f"instance metadata: {error}; asking again", file=sys.stderr, flush=True)
            failing = True
        time.sleep(poll_seconds)


if __name__ == "__main__":
    sys.exit(main())
