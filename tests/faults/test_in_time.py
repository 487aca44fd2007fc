"""Errors that only people can fix are reported within seconds after a process has loaded its code."""

from __future__ import annotations

import re
import shutil
import socket
import time
from pathlib import Path

import pytest

from apex_jax.transport import keys
from tests.rigs.processes import Program, Programs, catch, free_tcp_addresses, wait_until

SAID_SECONDS = 5.0
GIVEN_UP_SECONDS = 15
LOADED_SECONDS = 120.0  # on such a machine, with nothing compiled

pytestmark = pytest.mark.timeout(400)


# Loading takes a busy machine as long as it takes; what a process does then is what it answers for.
TELLS_ITS_SECONDS = """
import atexit, time
import {module}
began = time.monotonic()
atexit.register(lambda: print(time.monotonic() - began))
"""


@pytest.mark.parametrize(("arguments", "module", "code", "words"), [
    (("--rolle", "actor"), "command_line", 2, "did you mean --role"),
    (("actor.environments=-1",), "command_line", 2, "actor.environments=-1"),
    (("--role", "actor", "addresses.experience=tcp://no.such.host.invalid:5550"), "process", 1, "correct the name"),
    (("--role", "replay", "addresses.sampling={taken}"), "workers.replay_server", 1, "choose a free address"),
], ids=["a_flag", "a_number", "a_host", "a_port"])  # fmt: skip
def test_fault_36_impossible_start_fails_within_5_s(
    programs: Programs, tmp_path: Path, arguments: tuple[str, ...], module: str, code: int, words: str
) -> None:
    settings = catch(tmp_path / "run", *free_tcp_addresses())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        given = [word.format(taken=address) for word in arguments]
        lines = TELLS_ITS_SECONDS.format(module=f"apex_jax.{module}")
        program = programs.start(*settings, *given, lines=lines)
        assert program.exit_code(LOADED_SECONDS) == code
    [line] = program.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert float(program.stdout) < SAID_SECONDS


@pytest.mark.slow
def test_fault_29_wrong_key_is_logged_within_5_s_and_ends_an_actor_within_15_s(
    programs: Programs, tmp_path: Path
) -> None:
    sound, foreign, unknown = (tmp_path / name for name in ("sound", "foreign", "unknown"))
    keys.create(sound)
    keys.create(foreign)
    shutil.copytree(sound, unknown)
    for kind in ("secret", "public"):
        shutil.copy(foreign / f"actor.{kind}", unknown)
    addresses = free_tcp_addresses()
    server = programs.start("--role", "replay", *catch(tmp_path / "run", *addresses, f"security.keys={sound}"))
    server.wait_until(lambda: "replay of " in server.stderr, LOADED_SECONDS)
    for given, hint in (
        ("", "takes encrypted connections only: set security.keys=DIR here"),
        (str(foreign), "does not have the key in replay.public here: copy replay.public from there"),
        (str(unknown), "refused the key of this actor: put its public key into actor.public there"),
    ):
        directory = tmp_path / f"actor-{Path(given).name}"
        actor = programs.start("--role", "actor", *catch(directory, *addresses, f"security.keys={given}"))
        check_said_in_time(actor, hint)


def check_said_in_time(actor: Program, hint: str) -> None:
    wait_until(lambda: hint in actor.stderr, LOADED_SECONDS)
    said = time.monotonic()
    assert actor.exit_code() == 1
    tried = re.search(r"\(tried for (\d+) s\)$", actor.stderr)
    assert tried is not None, actor.stderr
    assert int(tried[1]) <= GIVEN_UP_SECONDS
    assert time.monotonic() - said > int(tried[1]) - SAID_SECONDS, "the hint came late"
    assert actor.stderr.count(hint) == 2, "when it was first known, and at the end"
