"""Metrics: what a script, TensorBoard and the live view can read, also after kills and full disks."""

from __future__ import annotations

import json
import logging
import math
import re
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from apex_jax.run.metrics import (
    EPSILON_BANDS,
    NOISE_BANDS,
    TAGS,
    Bands,
    Means,
    MetricsFollower,
    MetricsWriter,
    RateMeter,
    read_metrics,
    resident_memory_bytes,
)

LINE = {"time": 1.0, "seconds": 0.5, "step": 4}


def test_docs_page_describes_every_tag_once() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert sorted(tag.strip("`") for tag, _, _ in rows) == sorted(TAGS)


def lines_path(directory: Path) -> Path:
    return directory / "metrics" / "learner.jsonl"


def event_files(directory: Path) -> list[Path]:
    return sorted((directory / "tensorboard" / "learner").iterdir())


def read_events(path: Path) -> Iterator[Event]:
    """Reads TFRecords the slow way, checksums included."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (masked_crc32c(body),)
        yield Event.FromString(body)
        data = data[16 + length :]


def test_written_metrics_are_lines_and_tensorboard_scalars(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path), "learner")
    writer.write(400, {"losses/td_loss": 0.25, "learner/updates": 7})
    writer.write(800, {"losses/td_loss": np.float32(0.5)})
    first, second = read_metrics(lines_path(tmp_path))
    assert (first["step"], first["losses/td_loss"], first["learner/updates"]) == (400, 0.25, 7)
    assert (second["step"], second["losses/td_loss"]) == (800, 0.5)
    assert 0 <= first["seconds"] <= second["seconds"]
    assert 0 < first["time"] <= second["time"]
    (path,) = event_files(tmp_path)
    version, *events = read_events(path)
    assert version.file_version == "brain.Event:2"
    scalars = [(event.step, {value.tag: value.simple_value for value in event.summary.value}) for event in events]
    assert scalars == [(400, {"losses/td_loss": 0.25, "learner/updates": 7.0}), (800, {"losses/td_loss": 0.5})]


def test_tensorboard_files_can_be_switched_off(tmp_path: Path) -> None:
    MetricsWriter(str(tmp_path), "learner", has_tensorboard=False).write(400, {"learner/updates": 7})
    assert len(read_metrics(lines_path(tmp_path))) == 1
    assert not (tmp_path / "tensorboard").exists()


def test_resumed_process_appends_whole_lines_and_begins_its_own_event_file(tmp_path: Path) -> None:
    MetricsWriter(str(tmp_path), "learner").write(400, {"learner/updates": 1})
    (older,) = event_files(tmp_path)
    content = older.read_bytes()
    with open(lines_path(tmp_path), "ab") as file:
        file.write(b'{"time": 17000')  # torn by a kill
    MetricsWriter(str(tmp_path), "learner").write(800, {"learner/updates": 2})
    assert [line["step"] for line in read_metrics(lines_path(tmp_path))] == [400, 800]
    assert len(event_files(tmp_path)) == 2
    assert older.read_bytes() == content


@pytest.mark.parametrize("torn", [b'{"time": 1', b'{"time": 1}\n', b"[1]\n", b"\xff\xfe\n", b"\n", b"7"])
def test_incomplete_metrics_lines_are_skipped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(json.dumps(LINE).encode() + b"\n" + torn)
    assert read_metrics(path) == [LINE]
    assert MetricsFollower(path).read_new() == [LINE]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_non_finite_value_is_null_in_json_and_missing_in_tensorboard(
    tmp_path: Path, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    MetricsWriter(str(tmp_path), "learner").write(4, {"losses/td_loss": value, "losses/q_values": 1.0})
    (line,) = read_metrics(lines_path(tmp_path))
    assert line["losses/td_loss"] is None
    assert line["losses/q_values"] == 1.0
    (path,) = event_files(tmp_path)
    _, event = read_events(path)
    assert [scalar.tag for scalar in event.summary.value] == ["losses/q_values"]
    assert caplog.records == []


def test_unwritable_directory_is_counted_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "run"
    directory.write_text("a file where the directory should be")
    writer = MetricsWriter(str(directory), "learner")
    with caplog.at_level(logging.WARNING):
        writer.write(4, {"learner/updates": 1})
        writer.write(8, {"learner/updates": 2})
    assert writer.failed_writes == 4  # two files, two writes
    assert len(caplog.records) == 1
    directory.unlink()
    writer.write(12, {"learner/updates": 3})
    assert [line["step"] for line in read_metrics(lines_path(directory))] == [12]
    assert [event.step for event in read_events(event_files(directory)[0])] == [0, 12]
    assert writer.failed_writes == 4


def test_partially_written_record_is_removed(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path), "learner", has_tensorboard=False)
    writer.write(4, {"learner/updates": 1})
    content, limits = lines_path(tmp_path).read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 5, limits[1]))  # there is room for five bytes
    try:
        writer.write(8, {"learner/updates": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert writer.failed_writes == 1
    assert lines_path(tmp_path).read_bytes() == content
    writer.write(12, {"learner/updates": 3})
    assert [line["step"] for line in read_metrics(lines_path(tmp_path))] == [4, 12]


@pytest.mark.parametrize("tag", ["losses/tdloss", "replay/dropped_", "charts/episodic_return_epsilon_<band>", ""])
def test_tag_without_an_explanation_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ValueError, match=f"unknown tag {tag!r}"):
        MetricsWriter(str(tmp_path), "learner").write(4, {tag: 1.0})
    assert not lines_path(tmp_path).exists()
    values = {re.sub("<.*>", "above_0.2", tag): 1.0 for tag in TAGS}
    MetricsWriter(str(tmp_path), "learner").write(4, values)  # all of the table are accepted
    (line,) = read_metrics(lines_path(tmp_path))
    assert line.keys() == {"time", "seconds", "step", *values}


def test_follower_sees_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    follower = MetricsFollower(path)
    assert follower.read_new() == []  # no file yet
    text = json.dumps(LINE).encode() + b"\n"
    with open(path, "ab", buffering=0) as file:
        file.write(text + text[:10])
        assert follower.read_new() == [LINE]
        assert follower.read_new() == []
        file.write(text[10:-1])
        assert follower.read_new() == []
        file.write(b"\n")
        assert follower.read_new() == [LINE]


def test_follower_starts_again_if_the_file_was_truncated(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    text = json.dumps(LINE) + "\n"
    path.write_text(text * 3)
    follower = MetricsFollower(path)
    assert len(follower.read_new()) == 3
    path.write_text(text)
    assert follower.read_new() == [LINE]


def test_rate_is_the_growth_since_the_last_update() -> None:
    seconds = iter([10.0, 12.0, 12.0, 13.0, 14.0])
    meter = RateMeter(clock=lambda: next(seconds))
    assert meter.update(100) == 0.0  # nothing to compare with
    assert meter.update(150) == 25.0
    assert meter.update(160) == 25.0  # no time has passed: the rate stands, and the growth counts next time
    assert meter.update(170) == 20.0
    assert meter.update(5) == 0.0  # the counter began anew


def test_mean_of_a_tag_is_over_all_elements_since_it_was_taken() -> None:
    means = Means()
    means.add("own/a", 1.0)
    means.add("own/a", np.array([[2, 3], [4, 5]], np.int32))
    means.add("own/b", np.array([], np.float32))
    assert means.take() == {"own/a": 3.0}
    means.add("own/a", 7.0)
    assert means.take() == {"own/a": 7.0}


@pytest.mark.parametrize(("bands", "value", "name"), [
    (EPSILON_BANDS, 0.0, "epsilon_below_0.01"), (EPSILON_BANDS, 0.01, "epsilon_0.01_to_0.05"),
    (EPSILON_BANDS, 0.05, "epsilon_0.05_to_0.2"), (EPSILON_BANDS, 0.2, "epsilon_above_0.2"),
    (EPSILON_BANDS, 1.0, "epsilon_above_0.2"), (NOISE_BANDS, 0.39, "noise_0.2_to_0.4"),
    (NOISE_BANDS, 10.0, "noise_above_0.4"),
])  # fmt: skip
def test_band_holds_its_lower_edge_and_the_last_one_has_no_end(bands: Bands, value: float, name: str) -> None:
    [(found, values)] = bands.split(np.array([value]), np.array([7.0]))
    assert (found, values.tolist()) == (name, [7.0])


def test_resident_memory_is_in_bytes() -> None:
    assert 2**23 < resident_memory_bytes() < 2**36  # Python with NumPy is tens of megabytes, not of pages or of KiB
