"""Stops the role when EC2 gives notice, two minutes ahead, that it will reclaim a spot instance."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from deploy.host.metadata import Metadata

POLL_SECONDS = 5.0


def main() -> int:
    """Waits for a notice, then stops the unit of APEX_JAX_ROLE; returns the exit code of `systemctl stop`."""
    unit = f"apex-jax@{os.environ['APEX_JAX_ROLE']}.service"
    notice = wait_for_notice(Metadata(), float(os.environ.get("APEX_JAX_POLL_SECONDS", POLL_SECONDS)))
    print(f"spot notice: {notice}; stopping {unit}", flush=True)
    return subprocess.run(["systemctl", "stop", unit], check=False).returncode


def wait_for_notice(metadata: Metadata, poll_seconds: float) -> str:
    """Polls the metadata until there is a notice, and returns it; goes on if the service does not answer."""
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
