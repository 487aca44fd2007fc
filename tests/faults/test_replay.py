"""Faults of the replay server and of the experience link, mostly with real processes."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from apex_jax.environments.environment import segment_spec
from apex_jax.process import new_peer_id
from apex_jax.settings import load
from apex_jax.transport import wire
from apex_jax.transport.messages import IndexBatches, LearnerHello
from tests.rigs.fleet import FORGOTTEN_SECONDS, GIVEN_UP_BY_LEARNER_SECONDS
from tests.rigs.processes import ROOT, Programs, wait_until
from tests.rigs.replay_processes import CATCH, Site, end
from tests.rigs.sampling_link import AskingClient

SPEC = segment_spec(load(CATCH))
MEGABYTES = 2**20

pytestmark = pytest.mark.timeout(480)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Programs(tmp_path) as programs:
        site = Site(tmp_path, programs)
        yield site
        site.close()


def assert_once_and_in_order(sequences: list[int]) -> None:
    assert sequences == list(range(1, len(sequences) + 1))


def adds_up(ledger: dict[str, float]) -> bool:
    return ledger["produced"] == sum(number for name, number in ledger.items() if name != "produced")


def all_accounted_for(site: Site) -> dict[str, float]:
    """Returns the ledger once the producers have left, none of them killed: what they count themselves is in it."""
    ledger = site.ledger()
    assert adds_up(ledger)
    assert ledger["produced"] == site.produced()
    assert ledger["in_flight"] == ledger["lost_with_actor"] == 0
    return ledger


# Actors -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_02_a_stopped_actor_is_marked_stale_then_healthy_and_sends_nothing_twice(site: Site) -> None:
    server, stopped, other = site.server(), site.producer(), site.producer()
    server.wait_until(lambda: site.value("replay/actors") == 2 and stopped.get("segments") > 20)
    stopped.process.send_signal(signal.SIGSTOP)
    server.wait_until(lambda: site.value("replay/actors") == 1, FORGOTTEN_SECONDS)
    other.wait_for_more("acknowledged", 100)
    stopped.process.send_signal(signal.SIGCONT)
    server.wait_until(lambda: site.value("replay/actors") == 2)
    stopped.wait_for_more("acknowledged", 1_000)
    assert stopped.stop() == other.stop() == 0
    server.wait_until(lambda: site.value("replay/actors") == 0)
    assert server.stderr.count("has been silent for 10 s") == 1
    end(server, signal.SIGTERM)
    assert all_accounted_for(site)["lost_with_replay"] == 0
    for producer in (stopped, other):
        assert_once_and_in_order(site.journal()[producer.peer_id])


# The replay server goes away --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_04_empty_replay_is_filled_again_without_other_restarts(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="apex_jax")
    server, producer = site.server("replay.journal=false"), site.producer(rate=200)
    config, context = load(CATCH), zmq.Context()
    hello = LearnerHello(new_peer_id(), config.compatibility_key, 0, batches_at_once=1, batch_size=8)
    segments = 20_000 // SPEC.max_transitions
    learner = AskingClient(context, site.address(1), SPEC, hello, segments, groups=1)
    try:
        assert next_batches(learner).size_transitions >= 1_000
        assert (learner.peer_state, learner.disconnects) == ("joined", 0)
        end(server, signal.SIGKILL)
        wait_until(lambda: learner.peer_state == "lost")
        producer.settle()  # what it can keep is bounded
        while learner.next(0.0) is not None:  # what was under way
            pass
        server = site.server("replay.journal=false")
        batches = next_batches(learner)
        assert batches.size_transitions >= 1_000, "none before the replay holds its minimum again"
        assert (learner.peer_state, learner.disconnects) == ("joined", 1)
        [lost, back] = [record.getMessage() for record in caplog.records if "replay server" in record.getMessage()][1:]
        assert lost == f"the replay server at {site.address(1)} is lost: looking for it"
        assert back.startswith("the replay server is back after ")
        producer.wait_for_more("acknowledged")
        server.wait_until(lambda: site.ledger()["lost_with_replay"] > 0)
        assert producer.process.poll() is None
        assert producer.stop() == 0
        server.wait_until(lambda: site.value("replay/actors") == 0)
        ledger = site.ledger()
        assert adds_up(ledger)
        assert (ledger["produced"], ledger["in_flight"]) == (site.produced(), 0)
        assert ledger["lost_with_replay"] > 0, "what the first had stored is lost with it, and said so"
        # Segments stored at the end whose acknowledgement the producer did not await: of a ledger that began anew, they
        # hide as many of the lost ones.
        assert ledger["lost_with_actor"] <= config.actor.max_outstanding_segments * SPEC.max_transitions
        assert not (site.directory / "replay").exists()
    finally:
        learner.close()
        context.term()


def next_batches(learner: AskingClient) -> IndexBatches:
    """Consumes messages until batches arrive."""
    while True:
        item = learner.next(60.0)
        assert item is not None
        learner.consumed(item)
        if isinstance(item.content, IndexBatches):
            return item.content


@pytest.mark.slow
def test_fault_04_dropping_actors_go_on_without_a_replay_and_count(site: Site) -> None:
    server, producer = site.server(), site.producer(rate=300, overflow="drop")
    server.wait_until(lambda: producer.get("acknowledged") > 0)
    end(server, signal.SIGKILL)
    wait_until(lambda: producer.get("dropped").get("overflow", 0) > 100)
    server = site.server()
    producer.wait_for_more("acknowledged", 1_000)
    server.wait_until(lambda: site.value("replay/actors") == 1)
    assert producer.stop() == 0
    server.wait_until(lambda: site.value("replay/actors") == 0)
    end(server, signal.SIGTERM)
    ledger = all_accounted_for(site)
    assert ledger["dropped_overflow"] >= 100 * SPEC.max_transitions
    assert ledger["lost_with_replay"] == 0
    assert_once_and_in_order(site.journal()[producer.peer_id])


@pytest.mark.slow
def test_fault_05_restarted_replay_equals_the_stopped_one_bit_for_bit(site: Site) -> None:
    server, producer = site.server(), site.producer(rate=1000)
    config, context = load(CATCH), zmq.Context()
    hello = LearnerHello(new_peer_id(), config.compatibility_key, 5_000, batches_at_once=1, batch_size=8)
    learner = AskingClient(context, site.address(1), SPEC, hello, 20_000 // SPEC.max_transitions, groups=1)
    for priority in range(1, 30):
        item = learner.next(60.0)
        assert item is not None
        if isinstance(item.content, IndexBatches):
            learner.update_priorities(item, np.full((1, 8), priority, np.float32))
        learner.consumed(item)
    assert producer.stop() == 0
    learner.close()
    context.term()
    server.wait_until(lambda: site.value("replay/actors") == 0)
    end(server, signal.SIGTERM)
    name, before = site.newest_snapshot, site.snapshot()
    end_when_restored(site)
    after = site.snapshot()
    assert site.newest_snapshot > name, "else it is compared with itself"
    assert after.facts == before.facts, "limiter, counters, largest priority, random numbers"
    assert after.facts["limiter"]["sampled"] > 0
    for name in ("insertion_ids", "leaves", "accounts"):
        np.testing.assert_array_equal(after.arrays[name], before.arrays[name], err_msg=name)
    assert len(np.unique(before.arrays["leaves"])) > 3, "priorities that were learned"


def end_when_restored(site: Site) -> str:
    """Starts the server and stops it once it serves; returns its log."""
    server = site.server()
    server.wait_until(lambda: "restored" in server.stderr and "replay of" in server.stderr)
    end(server, signal.SIGTERM)
    return server.stderr


@pytest.mark.slow
def test_fault_05_killed_replay_has_every_acknowledged_segment_once(site: Site) -> None:
    roomy = "replay.capacity_transitions=1000000"  # nothing that was stored is overwritten
    producers = [site.producer(rate=150) for _ in range(2)]
    acknowledged = [0, 0]
    for _ in range(3):
        server = site.server(roomy)
        for producer in producers:
            producer.wait_for_more("acknowledged", 2_000)
        end(server, signal.SIGKILL)
        known = site.journal()
        for i, producer in enumerate(producers):
            sequences = known[producer.peer_id]
            assert_once_and_in_order(sequences)
            acknowledged[i] = producer.get("acknowledged")
            assert len(sequences) * SPEC.max_transitions >= acknowledged[i]
    server = site.server(roomy)
    for producer in producers:
        producer.wait_for_more("acknowledged")  # who leaves cut off can tell nobody what it takes with it
    server.wait_until(lambda: site.value("replay/actors") == 2)
    assert [producer.stop() for producer in producers] == [0, 0]
    server.wait_until(lambda: site.value("replay/actors") == 0)
    end(server, signal.SIGTERM)
    ledger = all_accounted_for(site)
    assert ledger["lost_with_replay"] == 0
    assert ledger["stored"] == SPEC.max_transitions * sum(map(len, site.journal().values()))
    assert len({report["incarnation"] for producer in producers for report in producer.reports} - {0}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_fault_10_damaged_snapshot_is_logged_once_and_the_previous_one_is_used(site: Site, damage: str) -> None:
    server, producer = site.server(), site.producer()
    server.wait_until(lambda: producer.get("acknowledged") > 500)
    assert producer.stop() == 0
    server.wait_until(lambda: site.value("replay/actors") == 0)
    end(server, signal.SIGTERM)
    end_when_restored(site)
    newest = sorted((site.directory / "replay").glob("snapshot-*"))[-1]
    data = newest.read_bytes()
    broken = {"truncated": data[: len(data) // 2], "empty": b"", "flipped": data[:-9] + b"\xff" + data[-8:]}
    newest.write_bytes(broken[damage])
    before = site.journal()
    said = end_when_restored(site)
    assert said.count("is damaged, trying the one before") == said.count("WARNING") == 1
    assert site.journal() == before
    assert "WARNING" not in end_when_restored(site), "it is gone"


@pytest.mark.long
def test_fault_11_journal_of_another_configuration_is_a_one_line_error_and_unchanged(site: Site) -> None:
    server = site.server()
    server.wait_until(lambda: "replay of" in server.stderr)
    end(server, signal.SIGTERM)
    before = {path.name: path.read_bytes() for path in (site.directory / "replay").iterdir()}
    other = site.server("algorithm.n_step=2")
    assert other.exit_code() == 1
    [line] = [line for line in other.stderr.splitlines() if line.startswith("error: ")]
    assert "is the replay of another configuration: algorithm.n_step: was 3, now 2; use" in line
    assert "Traceback" not in other.stderr
    assert {path.name: path.read_bytes() for path in (site.directory / "replay").iterdir()} == before


def test_fault_12_full_disk_stops_no_service_and_loses_no_acknowledged_segment(site: Site) -> None:
    server = site.server("replay.snapshot_interval_seconds=1")
    producer = site.producer(rate=100)
    server.wait_until(lambda: producer.get("acknowledged") > 1_000)
    pid = server.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    # Of any file: room for the log of this server, and not for the segments of a second, the first delay.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4_096, hard))
    server.wait_until(lambda: "cannot write segments to" in server.stderr)
    server.wait_until(lambda: "cannot write a snapshot to" in server.stderr)
    producer.wait_for_more("acknowledged", 5_000)
    assert server.stderr.count("cannot write segments to") == 1
    assert server.stderr.count("cannot write a snapshot to") == 1
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    server.wait_until(lambda: "segments are written to" in server.stderr)
    server.wait_until(lambda: site.value("replay/journal_errors") > 0)
    producer.wait_for_more("acknowledged", 1_000)
    end(server, signal.SIGKILL)
    sequences = site.journal()[producer.peer_id]
    assert_once_and_in_order(sequences)
    assert len(sequences) * SPEC.max_transitions >= producer.get("acknowledged")


# Slow peers -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_14_learner_that_does_not_draw_blocks_actors_and_memory_stays_flat(site: Site) -> None:
    server, producer = site.server("replay.samples_per_insert=8"), site.producer(rate=2_000)
    server.wait_until(lambda: site.value("replay/size_transitions") >= 1_000)
    held = producer.settle()
    memory = site.value("system/resident_memory_bytes"), producer.get("memory_bytes")
    producer.wait_for_reports(30)
    assert producer.get("segments") == held
    assert site.value("system/resident_memory_bytes") < memory[0] + 8 * MEGABYTES
    assert producer.get("memory_bytes") < memory[1] + 8 * MEGABYTES
    assert site.ledger()["in_flight"] <= (64 + 16 + 1) * SPEC.max_transitions
    assert adds_up(site.ledger())


@pytest.mark.slow
def test_fault_15_learner_notices_a_frozen_replay_and_continues_with_it(site: Site) -> None:
    server, config, context = site.server(), load(CATCH), zmq.Context()
    site.producer(rate=200)
    hello = LearnerHello(new_peer_id(), config.compatibility_key, 0, batches_at_once=1, batch_size=8)
    learner = AskingClient(context, site.address(1), SPEC, hello, 20_000 // SPEC.max_transitions, groups=1)
    try:
        next_batches(learner)
        server.send(signal.SIGSTOP)
        wait_until(lambda: learner.peer_state == "lost", GIVEN_UP_BY_LEARNER_SECONDS)
        server.send(signal.SIGCONT)
        wait_until(lambda: learner.peer_state == "joined")
        next_batches(learner)
        assert learner.disconnects == 1
    finally:
        learner.close()
        context.term()


@pytest.mark.slow
def test_fault_15_a_stopped_replay_makes_actors_wait_and_loses_nothing(site: Site) -> None:
    server, producer = site.server(), site.producer(rate=300)
    server.wait_until(lambda: producer.get("acknowledged") > 1_000)
    server.send(signal.SIGSTOP)
    held = producer.settle()
    memory = producer.get("memory_bytes")
    wait_until(lambda: producer.get("disconnects") == 1, FORGOTTEN_SECONDS)
    assert producer.get("segments") == held
    assert producer.get("memory_bytes") < memory + 8 * MEGABYTES
    server.send(signal.SIGCONT)
    producer.wait_for_more("acknowledged", 2_000)
    assert producer.stop() == 0
    assert producer.stderr.count("has been silent") == producer.stderr.count("is back") == 1
    server.wait_until(lambda: site.value("replay/actors") == 0)
    end(server, signal.SIGTERM)
    assert_once_and_in_order(site.journal()[producer.peer_id])
    assert site.ledger()["lost_with_actor"] == 0


# Versions ---------------------------------------------------------------------------------------------------------

OLD_RELEASE = """
import sys
from apex_jax.transport import wire
wire.PROTOCOL_VERSION = 1
import main
sys.exit(main.main())
"""


@pytest.mark.slow
def test_fault_30_a_role_of_another_protocol_version_ends_with_both_in_one_line(site: Site) -> None:
    server = site.server()
    server.wait_until(lambda: "replay of" in server.stderr)
    command = [sys.executable, "-c", OLD_RELEASE, "--role", "actor", *site.settings()]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert f"protocol version {wire.PROTOCOL_VERSION}" in line
    assert "version 1" in line
    assert "Traceback" not in ended.stderr
    end(server, signal.SIGTERM)
