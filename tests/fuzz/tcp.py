"""Strangers at the ports of a real fleet: noise, HTTP, TLS, broken and half-open handshakes, false sizes."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from apex_jax.transport import keys
from tests.rigs.fleet import START_SECONDS, Fleet, acts, goes_on
from tests.rigs.processes import Programs, Resources, resources_of, wait_until

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # ZMTP 3.0, no security, a client
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops everything and sends RST
HALF_OPEN = 200  # connections at once of each kind, held until the others are done
MARGINS = {"memory_bytes": 64 * 2**20, "fds": 8, "threads": 2}
RECOVERY_SECONDS = 60.0  # ZMQ gives up a handshake after 30 s


def ready(socket_type: bytes) -> bytes:
    """Returns the command that ends a handshake."""
    name = b"Socket-Type"
    properties = bytes([len(name)]) + name + struct.pack(">I", len(socket_type)) + socket_type
    body = b"\x05READY" + properties
    return b"\x04" + bytes([len(body)]) + body


def frame(body: bytes, more: bool = False, announced_bytes: int | None = None) -> bytes:
    """Returns a long ZMTP frame, which may lie about its size."""
    return bytes([2 | int(more)]) + struct.pack(">Q", len(body) if announced_bytes is None else announced_bytes) + body


def command(name: bytes, body: bytes) -> bytes:
    """Returns a ZMTP command, as handshakes are made of."""
    body = bytes([len(name)]) + name + body
    return (b"\x04" + bytes([len(body)]) if len(body) < 256 else b"\x06" + struct.pack(">Q", len(body))) + body


Attack = Callable[[random.Random], bytes]

ATTACKS: dict[str, Attack] = {
    "noise": lambda rng: rng.randbytes(rng.choice((1, 9, 10, 64, 1000, 100_000))),
    "http": lambda rng: b"GET / HTTP/1.1\r\nHost: replay\r\n\r\n",
    "tls": lambda rng: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(512),
    "old_zmtp": lambda rng: b"\x01\x00" + frame(b"hello"),
    "wrong_mechanism": lambda rng: GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32) + rng.randbytes(64),
    "greeting_then_noise": lambda rng: GREETING + rng.randbytes(300),
    "wrong_socket_type": lambda rng: GREETING + ready(b"PUSH"),
    "speaks_before_it_is_answered": lambda rng: GREETING + ready(b"DEALER") + frame(rng.randbytes(100)) * 20,
}
ALLOWED_BYTES = 60_000  # of a message, on each port
# Of a stranger who was let in: what comes before the server has answered ends the handshake, whatever it is.
BEHIND_THE_HANDSHAKE: dict[str, Attack] = {
    "announces_2_GiB": lambda rng: frame(b"x", announced_bytes=2**31),
    "announces_2_to_63": lambda rng: frame(b"x", announced_bytes=2**63),
    "half_a_message": lambda rng: frame(rng.randbytes(ALLOWED_BYTES // 2), announced_bytes=ALLOWED_BYTES),
    "half_of_its_frames": lambda rng: frame(rng.randbytes(100), more=True) * 2 + frame(b"x", announced_bytes=100),
    "noise_behind_the_handshake": lambda rng: rng.randbytes(1000),
    "messages_of_noise": lambda rng: frame(rng.randbytes(100)) * 20,
    "many_frames": lambda rng: frame(b"", more=True) * 1000 + frame(b""),
    "commands": lambda rng: b"\x04\x05\x04PING" * 100,
}
HELD_OPEN: dict[str, bytes] = {
    "says_nothing": b"",
    "one_byte": b"\xff",
    "half_a_greeting": GREETING[:30],
    "greeting_and_no_more": GREETING,
    "half_a_ready": (GREETING + ready(b"DEALER"))[:70],
}
# Of a server that has keys; without them these are but noise. A HELLO has 200 bytes, of which 80 are a box.
CURVE_GREETING = SIGNATURE + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
ATTACKS_ON_KEYS: dict[str, Attack] = {
    "hello_of_noise": lambda rng: CURVE_GREETING + command(b"HELLO", b"\x01\x00" + bytes(72) + rng.randbytes(120)),
    "hello_of_another_version": lambda rng: CURVE_GREETING + command(b"HELLO", rng.randbytes(194)),
    "hello_too_short": lambda rng: CURVE_GREETING + command(b"HELLO", rng.randbytes(rng.randrange(194))),
    "initiate_without_hello": lambda rng: CURVE_GREETING + command(b"INITIATE", rng.randbytes(rng.randrange(1000))),
    "ready_without_hello": lambda rng: CURVE_GREETING + ready(b"DEALER") + frame(rng.randbytes(100)),
    "noise_as_a_message": lambda rng: CURVE_GREETING + frame(b"\x07MESSAGE" + rng.randbytes(100)),
    "announces_2_to_63_unencrypted": lambda rng: CURVE_GREETING + frame(b"x", announced_bytes=2**63),
}
HELD_OPEN_AT_KEYS: dict[str, bytes] = {
    "curve_greeting_and_no_more": CURVE_GREETING,
    "half_of_a_hello": CURVE_GREETING + b"\x04\xc8\x05HELLO" + bytes(90),
}


def fuzz_tcp(directory: Path, connections: int, seed: int, has_keys: bool = False) -> dict[str, Any]:
    """Attacks each port with this many connections; returns the figures. `has_keys`: whether the fleet has keys."""
    rng, failures, started = random.Random(seed), list[str](), time.monotonic()
    done: Counter[str] = Counter()
    settings = []
    if has_keys:
        keys.create(directory / "keys")
        settings.append(f"security.keys={directory / 'keys'}")
    greetings = {**HELD_OPEN, **(HELD_OPEN_AT_KEYS if has_keys else {})}
    attacks = [*ATTACKS, *(ATTACKS_ON_KEYS if has_keys else BEHIND_THE_HANDSHAKE)]  # where nobody is let in, or all are
    with Programs(directory) as programs, Fleet(programs, directory / "run", *settings) as fleet:
        fleet.start("replay", "learner", "actor-0")
        fleet.running["learner"].wait_until(lambda: fleet.updates() > 500, START_SECONDS)  # all is compiled
        before = _resources(fleet)
        for link, address in fleet.addresses.items():
            port = int(address.rpartition(":")[2])
            held = [_open(port, data) for data in greetings.values() for _ in range(HALF_OPEN)]
            if not has_keys:
                half = frame(b"x", announced_bytes=ALLOWED_BYTES)
                held += [open_behind_the_handshake(port, half) for _ in range(HALF_OPEN)]
            done["held_open"] += len(held)
            for attack in _each_as_often(attacks, rng, connections // len(fleet.addresses)):
                done[attack] += 1
                with _attacker(port, attack, rng) as stranger:
                    _read_a_little(stranger)
            try:
                goes_on(fleet)
                acts(fleet, "actor-0")
            except AssertionError as error:
                failures.append(f"nothing goes on while {len(held)} connections are held open at {link}: {error}")
            for stranger in held:
                stranger.close()
        failures += _what_is_left(fleet, before)
        growth = {name: now.memory_bytes - before[name].memory_bytes for name, now in _resources(fleet).items()}
    return {
        "socket": "curve" if has_keys else "tcp",
        "connections": sum(done.values()),
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "growth_bytes": growth,
        "attacks": dict(sorted(done.items())),
        "failures": failures,
    }


def _resources(fleet: Fleet) -> dict[str, Resources]:
    found = {name: resources_of(program.process.pid) for name, program in fleet.running.items()}
    return {name: resources for name, resources in found.items() if resources is not None}


def _what_is_left(fleet: Fleet, before: dict[str, Resources]) -> list[str]:
    """Returns a line for everything that is more than before, and for every process that has come to harm."""

    def excess() -> list[str]:
        now = _resources(fleet)
        return [
            f"{name}: {what} was {getattr(before[name], what)}, is {getattr(resources, what)}"
            for name, resources in now.items()
            for what, margin in MARGINS.items()
            if getattr(resources, what) > getattr(before[name], what) + margin
        ]

    with suppress(AssertionError):
        wait_until(lambda: not excess(), RECOVERY_SECONDS)
    return excess() + [
        f"{name}: exit code {program.process.poll()}\n{program.stderr[-2000:]}"
        for name, program in fleet.running.items()
        if program.process.poll() is not None or "Traceback" in program.stderr
    ]


def _open(port: int, data: bytes) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", port), timeout=10)
    with suppress(OSError):  # thrown out in the middle of a sentence
        stranger.sendall(data)
    return stranger


def open_behind_the_handshake(port: int, data: bytes) -> socket.socket:
    """Returns a connection that was let in, and has sent this; OSError where it was not."""
    stranger, received = _open(port, GREETING + ready(b"DEALER")), b""
    while b"READY" not in received:
        if not (more := stranger.recv(4096)):
            raise ConnectionError(f"a stranger is not let in at port {port}")
        received += more
    with suppress(OSError):
        stranger.sendall(data)
    return stranger


def _each_as_often(names: list[str], rng: random.Random, count: int) -> list[str]:
    """Returns so many names of attacks, all of them before the first comes again."""
    return [name for _ in range(count // len(names) + 1) for name in rng.sample(names, len(names))][:count]


def _attacker(port: int, attack: str, rng: random.Random) -> socket.socket:
    if (says := ATTACKS.get(attack) or ATTACKS_ON_KEYS.get(attack)) is not None:
        return _open(port, says(rng))
    return open_behind_the_handshake(port, BEHIND_THE_HANDSHAKE[attack](rng))


def _read_a_little(stranger: socket.socket) -> None:
    stranger.settimeout(0.02)
    with suppress(OSError):
        stranger.recv(4096)
