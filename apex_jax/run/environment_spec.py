"""The observations and actions of a run's environment, in `<run directory>/interface.json`, which `policy` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from apex_jax.host.disk import read_regular, write_durably
from apex_jax.host.errors import RunError, first_line
from apex_jax.types import ActionSpec, EnvironmentSpec, ImageSpec, Part, SegmentSpec

FILE_NAME = "interface.json"


def record_environment_spec(run_directory: str | os.PathLike[str], environment_spec: EnvironmentSpec) -> None:
    """Writes the file. Raises OSError."""
    write_durably(Path(run_directory, FILE_NAME), json.dumps(as_record(environment_spec), indent=2) + "\n")


def as_record(environment_spec: EnvironmentSpec) -> dict[str, Any]:
    """Returns a spec as JSON can hold it; `of_record` returns the spec."""
    spec = environment_spec.spec._asdict() | {"action": environment_spec.spec.action._asdict()}
    parts = None if environment_spec.parts is None else [part._asdict() for part in environment_spec.parts]
    images = [image._asdict() for image in environment_spec.images]
    action_part = environment_spec.action_part and environment_spec.action_part._asdict()
    return environment_spec._asdict() | {"spec": spec, "parts": parts, "images": images, "action_part": action_part}


def of_record(record: Any) -> EnvironmentSpec:
    """Returns the spec of a record. Raises ValueError, TypeError, KeyError or AttributeError for another one."""
    spec, parts = _of_this_release(record["spec"], record["parts"])
    low, high = (None if bound is None else tuple(map(float, bound)) for bound in (record["low"], record["high"]))
    older = [record["image"]] if record.get("image") else []  # in files of releases whose observations had one part
    action = ActionSpec(**spec["action"] | {"shape": tuple(spec["action"]["shape"])})
    return EnvironmentSpec(
        SegmentSpec(**spec | {"frame_shape": tuple(spec["frame_shape"]), "action": action}),
        None if parts is None else tuple(_parts(parts)),
        low,
        high,
        tuple(map(_image, record.get("images", older))),
        str(np.dtype(record["action_dtype"])),
        int(record["first_action"]),
        # Older files lack these.
        next(_parts([record["action_part"]])) if record.get("action_part") else None,
        record.get("frames_per_second"),
        str(record.get("reading", "")),
        str(record.get("caution", "")),
    )


def _of_this_release(spec: dict[str, Any], parts: Any) -> tuple[dict[str, Any], Any]:
    """Returns spec and parts of a record; in earlier releases, masks were the last numbers of a vector."""
    if "numbers" in spec or not spec["action"].get("is_masked"):
        return spec, parts
    [size] = spec["frame_shape"]
    masks = int(spec["action"]["high"]) + 1
    return spec | {"frame_shape": [size - masks]}, parts and parts[:-1]


def _image(record: Any) -> ImageSpec:
    path = tuple(key if isinstance(key, int) else str(key) for key in record.get("path", ()))
    return ImageSpec(**record | {"shape": tuple(record["shape"]), "path": path})


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
