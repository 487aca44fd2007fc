"""deploy/keep and deploy/healthy, with shell scripts in place of roles."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.tests.conftest import StatusServer
from deploy.tests.tools import DEPLOY
from tests.rigs.processes import wait_until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(120)]

# Each start takes the next exit code of the file `codes`; without one, it runs until SIGTERM, or the end of the test.
ROLE = """
echo start >>starts
code=$(head -n 1 codes) && sed -i 1d codes
trap 'echo saved; exit 143' TERM
[[ -z ${code} ]] || exit "${code}"
echo $$ >pid
while [[ -e codes ]]; do /bin/sleep 0.05; done
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.05\n")
    (tmp_path / "sleep").chmod(0o755)
    yield tmp_path
    (tmp_path / "codes").unlink(missing_ok=True)


def keep(folder: Path, codes: str = "", *arguments: str) -> subprocess.Popen[str]:
    (folder / "codes").write_text("\n".join(codes.split()))
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.Popen(
        [str(DEPLOY / "keep"), "role", "bash", "-c", ROLE, "role", *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.quick
@pytest.mark.parametrize(("codes", "code", "starts"), [
    ("0", 0, 1), ("2", 2, 1), ("3", 3, 1), ("1 137 1 0", 0, 4), ("1 1 1 1 1 1 1 3", 3, 8),
])  # fmt: skip
def test_failed_role_is_started_again_unless_that_is_in_vain(folder: Path, codes: str, code: int, starts: int) -> None:
    process = keep(folder, codes)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert (folder / "starts").read_text().count("start") == starts
    assert errors.count("starting it again in") == starts - 1


@pytest.mark.quick
def test_sigterm_reaches_the_role_which_has_time_to_save(folder: Path) -> None:
    process = keep(folder)
    wait_until((folder / "pid").exists, 30)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (143, "saved\n")


@pytest.mark.quick
def test_sigterm_just_after_the_start_is_not_lost(folder: Path) -> None:
    processes = []
    for number in range(40):
        processes.append(keep(folder))
        time.sleep(0.002 + 0.001 * (number % 20))
        processes[-1].send_signal(signal.SIGTERM)
    for process in processes:
        process.communicate(timeout=60)
    assert {process.returncode for process in processes} <= {143, -signal.SIGTERM}, "the latter before its trap is set"


@pytest.mark.quick
def test_health_is_what_the_status_address_says(server: StatusServer) -> None:
    def code() -> int:
        return subprocess.run([DEPLOY / "healthy", server.address], capture_output=True, timeout=30).returncode

    assert code() == 0
    server.code = 503
    assert code() == 1
    server.shutdown()
    server.server_close()
    assert code() == 2


def test_role_that_says_that_it_hangs_is_killed_and_started_again(folder: Path, server: StatusServer) -> None:
    process = keep(folder, "", f"addresses.status={server.address}")
    wait_until((folder / "pid").exists, 30)
    first, server.code = (folder / "pid").read_text(), 503
    wait_until(lambda: (folder / "pid").read_text() not in ("", first), 60)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert "role hangs: killing it" in errors
    assert "role ended with exit code 137: starting it again in 5 s" in errors
    assert process.returncode == 143
