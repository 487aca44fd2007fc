"""What a run's environment returns and accepts, in `<run directory>/interface.json`, with which `policy` loads it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apex_jax.host.disk import read_regular, write_durably
from apex_jax.host.errors import RunError, first_line
from apex_jax.types import ActionSpec, Interface, Part, SegmentSpec

FILE_NAME = "interface.json"


def record_interface(run_directory: str | os.PathLike[str], interface: Interface) -> None:
    """Writes the file. Raises OSError."""
    write_durably(Path(run_directory, FILE_NAME), json.dumps(as_record(interface), indent=2) + "\n")


def as_record(interface: Interface) -> dict[str, Any]:
    """Returns the interface as JSON can hold it; `of_record` returns the interface."""
    spec = interface.spec._asdict() | {"action": interface.spec.action._asdict()}
    parts = None if interface.parts is None else [part._asdict() for part in interface.parts]
    return interface._asdict() | {"spec": spec, "parts": parts}


def of_record(record: Any) -> Interface:
    """Returns the interface of a record. Raises ValueError, TypeError, KeyError or AttributeError for another one."""
    spec, parts = record["spec"], record["parts"]
    action = ActionSpec(**spec["action"] | {"shape": tuple(spec["action"]["shape"])})
    return Interface(
        SegmentSpec(**spec | {"frame_shape": tuple(spec["frame_shape"]), "action": action}),
        None if parts is None else tuple(_parts(parts)),
        *(None if bound is None else tuple(map(float, bound)) for bound in (record["low"], record["high"])),
    )


def _parts(record: Any) -> Iterator[Part]:
    if isinstance(record, dict):  # shapes by name, which earlier versions wrote
        record = [{"path": [name], "shape": shape, "counts": [], "starts": []} for name, shape in record.items()]
    for part in record:
        path = tuple(key if isinstance(key, int) else str(key) for key in part["path"])
        yield Part(path, *(tuple(map(int, part[name])) for name in ("shape", "counts", "starts")))


def read_interface(run_directory: str | os.PathLike[str]) -> Interface:
    """Returns what `record_interface` has written. Raises RunError if the file is missing or invalid."""
    path = Path(run_directory, FILE_NAME)
    try:
        return of_record(json.loads(read_regular(path)))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: give the directory of a run that has made an update") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"{path} cannot be read: {first_line(error)}"
        raise RunError(f"{what}; start the run again, whose first update writes it") from None
