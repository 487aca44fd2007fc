"""What every worker process starts with: its random numbers, hosts that exist, and an end when a thread of it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from apex_jax import process
from apex_jax.config.load import load
from apex_jax.host.errors import RunError
from apex_jax.process import ROLE_NUMBERS, SUPERVISED, new_peer_id, process_rng
from tests.rigs.processes import ROOT


def test_log_line_has_no_control_characters_of_a_file_or_peer() -> None:
    code = "from apex_jax.process import start_log; start_log('actor-0').warning('run %s', '\\x1b[2J of\\nsomebody')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.removesuffix("\n").isprintable()
    assert "WARNING actor-0: " in done.stderr


def test_processes_of_one_seed_draw_different_numbers_and_the_same_again() -> None:
    keys = [(number,) for number in ROLE_NUMBERS.values()] + [(ROLE_NUMBERS["actor"], i) for i in range(1, 4)]
    draws = [process_rng(seed, *key).integers(2**31) for seed in (1, 2) for key in keys]
    assert len(set(draws)) == len(draws)
    assert process_rng(1, *keys[0]).integers(2**31) == draws[0]
    assert new_peer_id() != new_peer_id()


def test_process_exits_with_1_if_one_of_its_threads_dies() -> None:
    code = """
import sys, threading
from apex_jax.process import StopSignal
stop = StopSignal()
stop.install()
threading.Thread(target=lambda: 1 / 0, name="the one").start()
assert stop.wait(60)
sys.exit(stop.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the thread 'the one' died" in done.stderr
    assert "ZeroDivisionError" in done.stderr


SAVES = """
import time
from apex_jax import process
process.SAME_PRESS_SECONDS, process.SAME_REQUEST_SECONDS = {seconds}
stop = process.StopSignal()
stop.on_second_signal = lambda: print("ended", flush=True)
stop.install()
print("ready", flush=True)
while not stop.wait(0.05):
    pass
print("saving", flush=True)
time.sleep(1)
print("saved", flush=True)
raise SystemExit(stop.exit_code)
"""
INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(("seconds", "supervised", "first", "second", "printed"), [
    pytest.param((0, 60), "", TERM, TERM, "saved", id="sigterm_once_more"),
    pytest.param((60, 0), "", TERM, TERM, "ended", id="sigterm_of_its_own"),
    pytest.param((0, 60), "", INT, INT, "ended", id="pressed_twice"),
    pytest.param((0, 60), "1", INT, INT, "saved", id="role_of_a_supervisor"),
])  # fmt: skip
def test_separate_second_signal_ends_a_process_at_once(
    seconds: tuple[float, float], supervised: str, first: signal.Signals, second: signal.Signals, printed: str
) -> None:
    command, environment = [sys.executable, "-c", SAVES.format(seconds=seconds)], {**os.environ, SUPERVISED: supervised}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(first)
        assert program.stdout.readline() == "saving\n"
        program.send_signal(second)
        assert program.stdout.readline().strip() == printed
        assert program.wait(60) == 128 + first


def test_wildcard_is_no_address_to_connect_to() -> None:
    config = load(None, ["addresses.weights=tcp://*:5552"])
    process.check_hosts("learner", config)
    with pytest.raises(RunError, match=r"addresses\.weights=tcp://\*:5552"):
        process.check_hosts("actor", config)
