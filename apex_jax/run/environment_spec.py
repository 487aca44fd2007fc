"""The observations and actions of a run's environment, in `<run directory>/interface.json`, which `policy` reads."""

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


def record_environment_spec(run_directory: str | os.PathLike[str], environment_spec: EnvironmentSpec) -> None:
    """Writes the file. Raises OSError."""
    write_durably(Path(run_directory, FILE_NAME), json.dumps(as_record(environment_spec), indent=2) + "\n")


def as_record(environment_spec: EnvironmentSpec) -> dict[str, Any]:
    """Returns a spec as JSON can hold it; `of_record` returns the spec."""
    spec = environment_spec.spec._asdict() | {"action": environment_spec.spec.action._asdict()}
    parts = None if environment_spec.parts is None else [part._asdict() for part in environment_spec.parts]
    image = environment_spec.image and environment_spec.image._asdict()
    action_part = environment_spec.action_part and environment_spec.action_part._asdict()
    return environment_spec._asdict() | {"spec": spec, "parts": parts, "image": image, "action_part": action_part}


def of_record(record: Any) -> EnvironmentSpec:
    """Returns the spec of a record. Raises ValueError, TypeError, KeyError or AttributeError for another one."""
    spec, parts = record["spec"], record["parts"]
    low, high = (None if bound is None else tuple(map(float, bound)) for bound in (record["low"], record["high"]))
    image = record["image"]
    action = ActionSpec(**spec["action"] | {"shape": tuple(spec["action"]["shape"])})
    environment_spec = EnvironmentSpec(
        SegmentSpec(**spec | {"frame_shape": tuple(spec["frame_shape"]), "action": action}),
        None if parts is None else tuple(_parts(parts)),
        low,
        high,
        None if image is None else ImageSpec(**image | {"shape": tuple(image["shape"])}),
        str(np.dtype(record["action_dtype"])),
        int(record["first_action"]),
        next(_parts([record["action_part"]])) if record.get("action_part") else None,  # older files lack it
    )
    _check(environment_spec)
    return environment_spec


def _check(environment_spec: EnvironmentSpec) -> None:
    """Raises ValueError if no environment has this spec."""
    spec, action = environment_spec.spec, environment_spec.spec.action
    sizes = [*spec.frame_shape, *action.shape, spec.frame_stack, spec.slots, spec.n_step]
    if any(type(size) is not int or not 1 <= size <= MAX_SEGMENT_BYTES for size in sizes):
        raise ValueError(f"its sizes are {sizes}, must be whole numbers from 1 to {MAX_SEGMENT_BYTES}")
    if (spec.frame_dtype, len(spec.frame_shape)) not in (("float32", 1), ("uint8", 2), ("uint8", 3)):
        raise ValueError(f"its frames are {spec.frame_dtype}{list(spec.frame_shape)}, must be a vector or pixels")
    if spec.frame_bytes * spec.frame_stack > MAX_SEGMENT_BYTES:
        raise ValueError(f"its frames are {spec.frame_dtype}{list(spec.frame_shape)}: too large for a segment")
    if environment_spec.image is not None and environment_spec.image.frame_shape != spec.frame_shape:
        raise ValueError(f"its images are {environment_spec.image}, its frames {spec.frame_shape}")
    bounds = [bound for bound in (environment_spec.low, environment_spec.high) if bound is not None]
    sizes = [len(bound) for bound in bounds]
    if action.dtype == "int32":
        is_valid = action.shape == () and sizes == [] and type(action.high) is int and 0 <= action.high < 2**31
        part = environment_spec.action_part
        is_valid &= part is None or (_is_part(part) and len(part.counts) > 0)
        is_valid &= part is None or math.prod(part.counts) == action.num_actions
        is_valid &= action.is_masked is False or (action.is_masked is True and _can_be_masked(spec))
    else:
        is_valid = action == ActionSpec.continuous(*action.shape) and sizes == [*action.shape] * 2
    if not is_valid or not all(math.isfinite(value) for bound in bounds for value in bound):
        raise ValueError(f"its actions are {action} from {environment_spec.low} to {environment_spec.high}")
    size = sum(sum(part.counts) or math.prod(part.shape) for part in environment_spec.parts or ())
    if environment_spec.parts is not None and (
        spec.frame_shape != (size,) or not all(map(_is_part, environment_spec.parts))
    ):
        raise ValueError(f"the parts of its observations do not make a vector of {spec.frame_shape}")


def _can_be_masked(spec: SegmentSpec) -> bool:
    is_vector = (spec.frame_dtype, spec.frame_stack) == ("float32", 1)
    return is_vector and spec.frame_shape[0] > spec.action.num_actions


def _is_part(part: Part) -> bool:
    is_encoded = len(part.counts) == math.prod(part.shape)
    return len(part.starts) == len(part.counts) and min(part.counts, default=1) > 0 and (is_encoded or not part.counts)


def _parts(record: Any) -> Iterator[Part]:
    for part in record:
        path = tuple(key if isinstance(key, int) else str(key) for key in part["path"])
        yield Part(path, *(tuple(map(int, part[name])) for name in ("shape", "counts", "starts")))


def read_environment_spec(run_directory: str | os.PathLike[str]) -> EnvironmentSpec:
    """Returns the spec that `record_environment_spec` wrote. Raises RunError if the file is missing or invalid."""
    path = Path(run_directory, FILE_NAME)
    try:
        return of_record(json.loads(read_regular(path)))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: give the directory of a run that has made an update") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"{path} cannot be read: {first_line(error)}"
        raise RunError(f"{what}; start the run again, whose first update writes it") from None
