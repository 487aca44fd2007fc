"""Addresses are parsed, hosts are resolved in time, and what leaves this machine is known."""

from __future__ import annotations

import socket
from ipaddress import IPv6Address

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from apex_jax.host.errors import RunError, UsageError
from apex_jax.transport.addresses import Address, is_loopback, resolve, split


def test_a_path_is_no_host_and_is_resolved_without_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (socket.AF_INET, ("127.0.0.1", 80)) in resolve(split("tcp://127.0.0.1:80"))
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert split("ipc:///run/x") == Address("", 0, "/run/x")
    assert resolve(split("ipc:///run/x")) == [(socket.AF_UNIX, "/run/x")]


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 300])
def test_unknown_host_is_a_one_line_error(host: str) -> None:
    with pytest.raises(RunError, match=r"there is no host|no name server answers") as caught:
        resolve(split(f"tcp://{host}:80"))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("host", "stays"), [
    *((host, True) for host in ("127.0.0.1", "127.8.9.10", "[::1]", "[::ffff:127.0.0.1]", "localhost")),
    *((host, False) for host in ("[::ffff:10.0.0.7]", "*", "0.0.0.0", "[::]", "eth0", "10.0.0.7")),
    *((host, False) for host in ("localhost.example.org", "127.0.0.1.example.org", "10.0.0.7:0;127.0.0.1")),
])  # fmt: skip
def test_reachable_address_needs_keys(host: str, stays: bool) -> None:
    assert is_loopback(f"tcp://{host}:5550") == stays


NAMES = st.from_regex(r"[a-z0-9-]{1,20}(\.[a-z0-9-]{1,20})*", fullmatch=True)


@settings(max_examples=30, deadline=None)
@given(host=st.ip_addresses() | NAMES, port=st.integers(1, 65535))
def test_host_and_port_of_any_valid_address_are_returned(host: object, port: int) -> None:
    text = f"[{host}]" if isinstance(host, IPv6Address) else host
    assert split(f"tcp://{text}:{port}") == Address(str(host), port, "")


@pytest.mark.parametrize("address", [
    "", "tcp", "tcp://", "tcp://host", "tcp://:80", "host:80", "http://host:80", "TCP://host:80", "ipc://",
    "tcp://host:0", "tcp://host:65536", "tcp://host:-1", "tcp://host:080000", "tcp://host:8o", "tcp://host:\u0661",
    "tcp://host:80 ", "tcp://host:80\n",
])  # fmt: skip
def test_malformed_address_is_a_one_line_error_with_an_example(address: str) -> None:
    with pytest.raises(UsageError, match=r"tcp://HOST:PORT or ipc://PATH") as caught:
        split(address)
    assert str(caught.value).isprintable()


@example(text="tcp://[:1")
@given(text=st.text() | st.text().map("tcp://{}".format) | st.text().map("tcp://{}:80".format))
def test_any_text_is_an_address_or_wrong_usage_and_its_reach_is_known(text: str) -> None:
    assert is_loopback(text) in (True, False)
    try:
        host, port, path = split(text)
    except UsageError as error:
        assert str(error).isprintable()
    else:
        assert path or (host and 1 <= port <= 65535)
