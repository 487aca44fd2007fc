"""Parses the addresses of links and of the status, and resolves host names."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import stat
from typing import Any, NamedTuple

from apex_jax.host.errors import RunError, UsageError, short_repr


class Address(NamedTuple):
    """`tcp://HOST:PORT`, or `ipc://PATH` if `path` is not empty."""

    host: str
    port: int
    path: str


def split(address: str) -> Address:
    """Returns the parts of an address. Raises UsageError if it is malformed."""
    scheme, _, place = address.partition("://")
    if scheme == "ipc" and place:
        return Address("", 0, place)
    host, _, port = place.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if scheme != "tcp" or not host or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise UsageError(f"{short_repr(address)}: give tcp://HOST:PORT or ipc://PATH, such as tcp://127.0.0.1:8080")
    return Address(host, int(port), "")


def is_loopback(address: str) -> bool:
    """Returns whether an address can be reached from this machine only."""
    scheme, _, place = address.partition("://")
    host = place.rpartition(":")[0]
    if scheme == "ipc" or host == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:  # a host name, an interface name, or *
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def check_path_is_free(path: str) -> None:
    """Raises OSError if a process serves at a path or the path is a file; the socket of a dead process is free."""
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(0, "it is a file")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
            raise OSError(0, "another process serves there")


def resolve(address: Address) -> list[tuple[Any, Any]]:
    """Returns (family, socket address) of each endpoint of an address. Raises RunError for an unknown host name."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name with an empty or too long part
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise RunError(f"there is no host {short_repr(address.host)} ({reason})") from None
    return [(family, place) for family, _, _, _, place in infos]
