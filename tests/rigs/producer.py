"""A process that plays no game: the stream of an actor, full of numbered segments. It tells of itself on its output.

python -m tests.rigs.producer CONFIG ADDRESS SEGMENTS_PER_SECOND OVERFLOW
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq

from apex_jax.config.load import load
from apex_jax.environments.environment import segment_spec
from apex_jax.process import new_peer_id, start_log
from apex_jax.transport.messages import ActorHello
from apex_jax.types import Columns, Segment, SegmentSpec
from tests.rigs.links import CountingStream

QUEUE = 16  # segments that wait to be sent
REPORT_SECONDS = 0.1


def numbered(spec: SegmentSpec, number: int) -> Segment:
    """A full segment whose pixels all have the value `number`."""
    starts = np.zeros(spec.slots, bool)
    starts[spec.frame_stack - 1 : -spec.n_step] = True
    columns: Columns = dict(
        priority=starts.astype(np.float32),
        n_step_return=np.zeros(spec.slots, np.float32),
        discount=starts * np.float32(0.9),  # below gamma: a server refuses what no actor can have made
        action=np.zeros(spec.slots, np.int32),
        bootstrap_offset=starts.astype(np.uint8),
    )
    return Segment(np.full((spec.slots, *spec.frame_shape), number, spec.frame_dtype), columns)


def main(arguments: Sequence[str]) -> int:
    path, address, rate, overflow = arguments
    config = load(path)
    spec = segment_spec(config)
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    start_log("producer")
    hello = ActorHello(new_peer_id(), config.compatibility_key, 2)
    context = zmq.Context()
    stream = CountingStream(context, address, spec, hello, QUEUE, overflow)
    print(json.dumps({"peer_id": hello.peer_id}), flush=True)
    number, next_report, next_segment = 0, 0.0, time.monotonic()
    while not ending.is_set() and not stream.finished.is_set():
        now = time.monotonic()
        welcome = stream.wait_for_welcome(0.0)
        if welcome is not None and now >= next_segment and stream.put(numbered(spec, number + 1), 0.0):
            number += 1
            next_segment = max(next_segment + 1 / float(rate), now - 1.0)
        if now >= next_report:
            next_report = now + REPORT_SECONDS
            print(json.dumps(report(stream, number, spec)), flush=True)
        ending.wait(0.002)
    stream.close()
    print(json.dumps(report(stream, number, spec)), flush=True)  # the last, of all that it has made
    context.term()
    if stream.error is not None:
        print(f"error: {stream.error}", file=sys.stderr)
    return int(stream.error is not None)


def report(stream: CountingStream, segments: int, spec: SegmentSpec) -> dict[str, Any]:
    """Returns the actor's report; `produced` is counted here, independently of the stream."""
    welcome = stream.wait_for_welcome(0.0)
    return {
        "segments": segments,
        "produced": segments * spec.max_transitions,
        "acknowledged": stream._account["acknowledged"],
        "actor_number": welcome.actor_number if welcome else 0,
        "dropped": dict(stream.dropped),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
