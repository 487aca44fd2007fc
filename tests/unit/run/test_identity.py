"""The identity of a run: made once, kept with it, adopted by whoever joins, and a reason to refuse any other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from apex_jax.host.errors import RunError
from apex_jax.run.identity import RunIdentity
from apex_jax.transport.messages import ActorHello, ActorWelcome, LearnerHello, LearnerWelcome
from tests.fuzz.targets import fuzz_config
from tests.rigs.links import CONFIG
from tests.rigs.served import Served
from tests.rigs.weights_link import Link, link, newest, params_of

__all__ = ["link"]

MINE, OTHER = "00112233aabbccdd", "fedcba9876543210"


def kept_in(directory: Path) -> str:
    path = directory / "run_identity"
    return path.read_text() if path.exists() else ""


def of_run(directory: Path, name: str) -> RunIdentity:
    directory.mkdir(exist_ok=True)
    (directory / "run_identity").write_text(name)
    return RunIdentity(str(directory))


# In a directory ---------------------------------------------------------------------------------------------------


def test_a_directory_takes_the_run_that_it_joins_and_keeps_it(tmp_path: Path) -> None:
    run = RunIdentity(str(tmp_path / "new"))
    assert run.name == ""
    run.adopt("", "a peer that does not know its run")
    run.adopt("no identity", "a peer that speaks nonsense")
    assert not (tmp_path / "new").exists()
    run.adopt(MINE, "the learner")
    assert (run.name, kept_in(tmp_path / "new")) == (MINE, MINE)
    assert RunIdentity(str(tmp_path / "new")).name == MINE


def test_a_directory_of_another_run_is_refused_with_both_runs_and_the_directory(tmp_path: Path) -> None:
    run = of_run(tmp_path, MINE)
    with pytest.raises(
        RunError, match=f"^the learner is of run {OTHER}, .* of run {MINE} .*={tmp_path}.*run_directory"
    ):
        run.adopt(OTHER, "the learner")
    assert kept_in(tmp_path) == MINE


def test_earlier_process_of_a_directory_is_bound_to_the_run_that_a_later_one_joined(tmp_path: Path) -> None:
    early = RunIdentity(str(tmp_path))
    of_run(tmp_path, MINE)
    with pytest.raises(RunError, match=OTHER):
        early.adopt(OTHER, "the learner")
    early.adopt(MINE, "the learner")


def test_processes_of_a_directory_may_join_their_run_at_the_same_moment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for turn in range(20):
        runs = [RunIdentity(str(tmp_path / str(turn))) for _ in range(4)]
        start = threading.Barrier(len(runs))

        def join(run: RunIdentity, start: threading.Barrier = start) -> None:
            start.wait(10)
            run.adopt(MINE, "the learner")

        with ThreadPoolExecutor(len(runs)) as threads:
            list(threads.map(join, runs))
        assert kept_in(tmp_path / str(turn)) == MINE
        assert [path.name for path in (tmp_path / str(turn)).iterdir()] == ["run_identity"]
    assert not caplog.records, "nothing went wrong"


@pytest.mark.parametrize("content", ["nonsense", "x" * 10_000, "00112233AABBCCDD", "\x1b[2J", None])
def test_a_damaged_identity_is_one_line_with_its_file(tmp_path: Path, content: str | None) -> None:
    if content is None:
        (tmp_path / "run_identity").mkdir()
    with pytest.raises(RunError, match="run_identity") as caught:
        RunIdentity(str(tmp_path)) if content is None else of_run(tmp_path, content)
    assert str(caught.value).isprintable()


def test_an_empty_file_left_by_a_loss_of_power_is_no_identity(tmp_path: Path) -> None:
    run = of_run(tmp_path, "")
    run.adopt(MINE, "the learner")
    assert kept_in(tmp_path) == MINE


# With the weights -------------------------------------------------------------------------------------------------


def test_receiver_of_weights_joins_the_run_of_the_learner(link: Link, tmp_path: Path) -> None:
    client = link.client(run=RunIdentity(str(tmp_path / "evaluator")))
    server = link.server(run=of_run(tmp_path / "learner", MINE))
    server.publish(params_of(1), 1, 0)
    newest(client, 1)
    assert kept_in(tmp_path / "evaluator") == MINE


# At the replay server ---------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(fuzz_config(tmp_path / "replay-server"))
    yield served
    served.close()


def learner_hello(run: str, is_new_run: bool = False, peer_id: int = 5) -> LearnerHello:
    return LearnerHello(peer_id, CONFIG.compatibility_key, 0, 1, batch_size=4, run_identity=run, is_new_run=is_new_run)


def actor_hello(run: str, peer_id: int = 1) -> ActorHello:
    return ActorHello(peer_id, CONFIG.compatibility_key, 4, run_identity=run)


def test_a_replay_server_joins_the_run_of_its_learner_and_its_actors_that_of_the_server(
    served: Served, tmp_path: Path
) -> None:
    early, learner, late = served.peer("experience"), served.peer("sampling"), served.peer("experience")
    early.send(actor_hello(""))
    assert early.receive(ActorWelcome).run_identity == ""
    learner.send(learner_hello(MINE, is_new_run=True))
    assert learner.receive(LearnerWelcome).run_identity == MINE
    assert kept_in(tmp_path / "replay-server") == MINE
    late.send(actor_hello("", peer_id=2))
    assert late.receive(ActorWelcome).run_identity == MINE


def test_learner_without_its_directory_continues_the_run_of_its_replay_server(served: Served, tmp_path: Path) -> None:
    (tmp_path / "replay-server" / "run_identity").write_text(MINE)
    served.restart()
    learner = served.peer("sampling")
    learner.send(learner_hello(OTHER, is_new_run=True))
    assert learner.receive(LearnerWelcome).run_identity == MINE


def test_a_journal_gives_its_run_to_an_empty_directory_and_is_refused_in_that_of_another(
    served: Served, tmp_path: Path
) -> None:
    learner, kept = served.peer("sampling"), tmp_path / "replay-server" / "run_identity"
    learner.send(learner_hello(MINE))
    learner.receive(LearnerWelcome)
    served.server.replay.finish(1.0)
    kept.write_text(OTHER)
    with pytest.raises(RunError, match=f"{MINE}, {tmp_path}/replay-server is of run {OTHER}"):
        served.restart()
    kept.unlink()
    served.restart()
    assert kept.read_text() == MINE
