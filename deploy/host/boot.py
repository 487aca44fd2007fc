"""Prepares a host at each boot: fetches its CURVE keys from Parameter Store and registers its name in Cloud Map."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deploy.host.aws import client

KEYS = "/etc/apex-jax/keys"
RETRY_SECONDS = 10.0
OPERATION_POLLS = 60  # one per second


def main() -> int:
    """Prepares the host, retrying until that succeeds; returns the exit code: 0 done, 2 incomplete environment file.

    It does not leave retrying to systemd, which would fail the units that require this one at its first failure.
    """
    said = ""
    while True:
        try:
            prepare()
            return 0
        except KeyError as error:
            print(f"error: the environment file lacks {error}", file=sys.stderr)
            return 2
        except Exception as error:  # a network or AWS error
            if str(error) != said:
                print(f"error: {error}; trying again", file=sys.stderr, flush=True)
            said = str(error)
            time.sleep(float(os.environ.get("APEX_JAX_RETRY_SECONDS", RETRY_SECONDS)))


def prepare() -> None:
    """Fetches the keys if APEX_JAX_KEY_PATH is set, and registers the name if APEX_JAX_SERVICE_ID is set."""
    if path := os.environ.get("APEX_JAX_KEY_PATH"):
        fetch_keys(path, os.environ["APEX_JAX_KEY_FILES"].split(), Path(os.environ.get("APEX_JAX_KEYS", KEYS)))
    if service := os.environ.get("APEX_JAX_SERVICE_ID"):
        register_name(service, os.environ["APEX_JAX_ROLE"])


def fetch_keys(path: str, files: Iterable[str], directory: Path) -> None:
    """Writes the parameters `path`/<file> to `directory`; only the directory's owner can read the secret ones.

    Raises LookupError if one does not exist yet: the keys may be pushed after the machines have started.
    """
    store = client("ssm")
    wanted = {file: _parameter(store, f"{path}/{file}") for file in files}
    owner = directory.stat()  # created by provision.sh, for the user that runs the roles
    for file in directory.iterdir():
        if file.name not in wanted:  # a key of a role that this host had before
            file.unlink()
    for file_name, value in wanted.items():
        _write(directory / file_name, value, 0o600 if file_name.endswith(".secret") else 0o644, owner)
    print(f"keys: {len(wanted)} files in {directory}", flush=True)


def _parameter(store: Any, name: str) -> str:
    try:
        return str(store.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"])
    except store.exceptions.ParameterNotFound:
        raise LookupError(f"no parameter {name}: run `python -m deploy.push_keys FLEET`") from None


def _write(path: Path, text: str, mode: int, owner: os.stat_result) -> None:
    """Writes a file atomically; at no time does it have more permissions than `mode`."""
    part = path.with_suffix(path.suffix + ".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.fchmod(descriptor, mode)
    part.replace(path)


def register_name(service_id: str, name: str) -> None:
    """Points a private name at this host.

    The name serves as the instance id in Cloud Map, so that a replacement host overwrites its predecessor's record.
    """
    discovery = client("servicediscovery")
    address = own_address(discovery.meta.endpoint_url)
    asked = discovery.register_instance(
        ServiceId=service_id, InstanceId=name, Attributes={"AWS_INSTANCE_IPV4": address}
    )
    _wait_for(discovery, asked["OperationId"])
    print(f"name: {name} is {address}", flush=True)


def own_address(url: str) -> str:
    """Returns the IPv4 address from which this host reaches a URL: that of its only network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((urlsplit(url).hostname, 443))  # sends nothing
        return str(probe.getsockname()[0])


def _wait_for(discovery: Any, operation_id: str) -> None:
    """Waits until Cloud Map has written the record, which it does some time after it has accepted the request."""
    for _ in range(OPERATION_POLLS):
        operation = discovery.get_operation(OperationId=operation_id)["Operation"]
        if operation["Status"] == "SUCCESS":
            return
        if operation["Status"] == "FAIL":
            raise OSError(f"Cloud Map: {operation.get('ErrorCode')}: {operation.get('ErrorMessage')}")
        time.sleep(1.0)
    raise OSError(f"Cloud Map has not written the record within {OPERATION_POLLS} s")


if __name__ == "__main__":
    sys.exit(main())
