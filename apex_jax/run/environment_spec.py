"""What a run's environment returns and accepts, in `<run directory>/interface.json`, with which `policy` loads it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from apex_jax.host.disk import read_regular, write_durably
from apex_jax.host.errors import RunError, first_line
from apex_jax.types import MAX_SEGMENT_BYTES, ActionSpec, EnvironmentSpec, ImageSpec, Part, SegmentSpec

FILE_NAME = "interface.json"


def record_interface(run_directory: str | os.PathLike[str], interface: EnvironmentSpec) -> None:
    """Writes the file. Raises OSError."""
    write_durably(Path(run_directory, FILE_NAME), json.dumps(as_record(interface), indent=2) + "\n")


def as_record(interface: EnvironmentSpec) -> dict[str, Any]:
    """Returns the interface as JSON can hold it; `of_record` returns the interface."""
    spec = interface.spec._asdict() | {"action": interface.spec.action._asdict()}
    parts = None if interface.parts is None else [part._asdict() for part in interface.parts]
    image = interface.image and interface.image._asdict()
    return interface._asdict() | {"spec": spec, "parts": parts, "image": image}


def of_record(record: Any) -> EnvironmentSpec:
    """Returns the interface of a record. Raises ValueError, TypeError, KeyError or AttributeError for another one."""
    spec, parts = record["spec"], record["parts"]
    low, high = (None if bound is None else tuple(map(float, bound)) for bound in (record["low"], record["high"]))
    image = record["image"]
    action = ActionSpec(**spec["action"] | {"shape": tuple(spec["action"]["shape"])})
    interface = EnvironmentSpec(
        SegmentSpec(**spec | {"frame_shape": tuple(spec["frame_shape"]), "action": action}),
        None if parts is None else tuple(_parts(parts)),
        low,
        high,
        None if image is None else ImageSpec(**image | {"shape": tuple(image["shape"])}),
        str(np.dtype(record["action_dtype"])),
        int(record["first_action"]),
    )
    _check(interface)
    return interface


def _check(interface: EnvironmentSpec) -> None:
    """Raises ValueError if no environment has this interface."""
    spec, action = interface.spec, interface.spec.action
    sizes = [*spec.frame_shape, *action.shape, spec.frame_stack, spec.slots, spec.n_step]
    if any(type(size) is not int or not 1 <= size <= MAX_SEGMENT_BYTES for size in sizes):
        raise ValueError(f"its sizes are {sizes}, must be whole numbers from 1 to {MAX_SEGMENT_BYTES}")
    if (spec.frame_dtype, len(spec.frame_shape)) not in (("float32", 1), ("uint8", 2), ("uint8", 3)):
        raise ValueError(f"its frames are {spec.frame_dtype}{list(spec.frame_shape)}, must be a vector or pixels")
    if spec.frame_bytes * spec.frame_stack > MAX_SEGMENT_BYTES:
        raise ValueError(f"its frames are {spec.frame_dtype}{list(spec.frame_shape)}: too large for a segment")
    if interface.image is not None and interface.image.frame_shape != spec.frame_shape:
        raise ValueError(f"its images are {interface.image}, its frames {spec.frame_shape}")
    bounds = [bound for bound in (interface.low, interface.high) if bound is not None]
    sizes = [len(bound) for bound in bounds]
    if action.dtype == "int32":
        is_valid = action.shape == () and sizes == [] and type(action.high) is int and 0 <= action.high < 2**31
    else:
        is_valid = action == ActionSpec.continuous(*action.shape) and sizes == [*action.shape] * 2
    if not is_valid or not all(math.isfinite(value) for bound in bounds for value in bound):
        raise ValueError(f"its actions are {action} from {interface.low} to {interface.high}")
    size = sum(sum(part.counts) or math.prod(part.shape) for part in interface.parts or ())
    if interface.parts is not None and (spec.frame_shape != (size,) or not all(map(_is_part, interface.parts))):
        raise ValueError(f"the parts of its observations do not make a vector of {spec.frame_shape}")


def _is_part(part: Part) -> bool:
    is_encoded = len(part.counts) == math.prod(part.shape)
    return len(part.starts) == len(part.counts) and min(part.counts, default=1) > 0 and (is_encoded or not part.counts)


def _parts(record: Any) -> Iterator[Part]:
    for part in record:
        path = tuple(key if isinstance(key, int) else str(key) for key in part["path"])
        yield Part(path, *(tuple(map(int, part[name])) for name in ("shape", "counts", "starts")))


def read_interface(run_directory: str | os.PathLike[str]) -> EnvironmentSpec:
    """Returns what `record_interface` has written. Raises RunError if the file is missing or invalid."""
    path = Path(run_directory, FILE_NAME)
    try:
        return of_record(json.loads(read_regular(path)))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: give the directory of a run that has made an update") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"{path} cannot be read: {first_line(error)}"
        raise RunError(f"{what}; start the run again, whose first update writes it") from None
