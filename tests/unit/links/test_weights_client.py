"""A client gets the learner's newest weights across restarts of the learner, and ends if the learner refuses it."""

from __future__ import annotations

import pytest

from apex_jax.host.errors import RunError
from apex_jax.run.identity import RunIdentity
from apex_jax.transport.messages import WEIGHTS_PIECE_BYTES, WeightsHello, WeightsOffer, WeightsPiece, WeightsRequest
from tests.rigs.links import DEADLINE_SECONDS, wait_until
from tests.rigs.weights_link import COMPATIBILITY_KEY, Link, assert_equal_bits, large_params, link, newest, params_of

__all__ = ["link"]


def test_fetch_ends_with_the_first_weights_or_at_its_timeout(link: Link) -> None:
    client = link.client()
    assert client.fetch_after(None) is None
    link.server().publish(params_of(1), 1, 0)
    first = client.fetch_after(None, DEADLINE_SECONDS)
    assert first is not None
    assert first.updates == 1
    assert client.fetch_after(first, 0.01) is None


@pytest.mark.parametrize("first_version", [0, 2**60], ids=["older", "newer"])
def test_client_follows_a_restarted_learner_with_any_versions(link: Link, first_version: int) -> None:
    server, client = link.server(first_version=2**50), link.client()
    server.publish(params_of(1), 900, 0)
    newest(client, 900)
    again = link.restarted_server(server, first_version)  # from an older checkpoint
    again.publish(params_of(2), 100, 0)
    after = newest(client, 100)
    assert_equal_bits(after.params, params_of(2))
    assert client.peer_state == "joined"


def test_transfer_interrupted_by_a_restart_of_the_learner_starts_again(link: Link) -> None:
    learner = link.false_learner()
    client = link.client(large_params(0))
    learner.receive(WeightsHello)
    learner.send(WeightsOffer(9, 1, False))
    learner.receive(WeightsRequest)
    body = large_params(1)["kernel"].tobytes()
    learner.send(WeightsPiece(9, 1, 1, 0, False, 0.0, 0, len(body), 0, body[:WEIGHTS_PIECE_BYTES]))
    learner.receive(WeightsRequest)
    learner.close()
    server = link.when_free(lambda: link.server(params=large_params(0)))
    server.publish(large_params(2), 2, 0)
    assert_equal_bits(newest(client, 2).params, large_params(2))


def test_loss_of_a_learner_that_has_sent_its_final_weights_is_not_logged(
    link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    server = link.server()
    server.publish(params_of(1), 1, 0, final=True)
    client = link.client(away_limit_seconds=2.0)
    newest(client, 1)
    server.close()
    wait_until(lambda: client.peer_state == "lost")
    assert not client._closing.wait(3.0)
    assert newest(client, 1).final, "and the client has not failed"
    assert caplog.records == []


def test_client_with_final_weights_takes_those_of_a_learner_that_continues_the_run(link: Link) -> None:
    server, client = link.server(), link.client()
    server.publish(params_of(1), 1, 0, final=True)
    newest(client, 1)
    again = link.restarted_server(server)  # with a higher limit
    wait_until(lambda: len(again.clients) == 1)
    again.publish(params_of(2), 2, 0)
    assert not newest(client, 2).final
    again.close()
    wait_until(lambda: client.peer_state == "lost")
    assert client._connection.disconnects == 1, "this learner was not expected to end"


@pytest.mark.parametrize(("key", "run", "words"), [
    (COMPATIBILITY_KEY.replace("task=", "task=Other"), "a" * 16,
     "environment.task: the learner Pong-v5, this process OtherPong-v5; make them equal"),
    (COMPATIBILITY_KEY, "b" * 16, f"this process is of run {'b' * 16}, the learner of run {'a' * 16}"),
], ids=["configuration", "run"])  # fmt: skip
def test_a_client_of_another_configuration_or_run_is_refused_for_good_with_both_values(
    link: Link, key: str, run: str, words: str
) -> None:
    learners, its = RunIdentity(), RunIdentity()
    learners.name, its.name = "a" * 16, run
    server, client = link.server(run=learners), link.client(compatibility_key=key, run=its)
    with pytest.raises(RunError, match=f"^refused by the learner at {link.address}: {words}"):
        wait_until(lambda: client.newest)
    assert client.peer_state == "refused"
    assert not server.clients


def test_a_client_without_a_learner_can_be_closed(link: Link) -> None:
    client = link.client()
    client.close()  # returns once its thread has ended


def test_only_the_first_the_requested_and_the_final_version_are_fetched(link: Link) -> None:
    server, eager, client = link.server(), link.client(), link.client()
    server.publish(params_of(1), 1, 0)
    newest(client, 1)
    for updates in (2, 3):
        server.publish(params_of(updates), updates, 0)
        newest(eager, updates)
    assert newest(client, 1).updates == 1
    third = client.fetch_after(client.newest, DEADLINE_SECONDS)
    assert third is not None
    assert third.updates == 3, "the newest"
    server.publish(params_of(4), 4, 0)
    newest(eager, 4)
    assert newest(client, 3).updates == 3
    server.publish(params_of(5), 5, 0, final=True)
    wait_until(lambda: client.newest is not None and client.newest.final)
