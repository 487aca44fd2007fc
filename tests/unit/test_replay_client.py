"""Specification of the client of the replay alone, against a replay server over real sockets."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax import ReplayClient
from apex_jax.host.errors import RunError, UsageError
from apex_jax.links import sampling_client
from apex_jax.transport import keys, sockets
from tests.rigs.items import ALPHA, BATCH, BETA, Served, items_of, sample_all
from tests.rigs.processes import ROOT, wait_until


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


def numbers_drawn(client: ReplayClient, count: int, timeout_seconds: float = 60.0) -> np.ndarray:
    return np.concatenate([client.sample(timeout_seconds).items["number"] for _ in range(count)])


def filled(served: Served, items: int, *settings: str) -> ReplayClient:
    """Returns a client of a server with these settings that has stored so many items."""
    served.start(*settings)
    client = served.client(*settings)
    client.insert(items_of(range(items)))
    client.flush()
    return client


def use(client: ReplayClient, act: str, items: dict[str, np.ndarray]) -> None:
    """Uses one link of a client until the server has answered."""
    if act == "draw":
        client.sample()
    else:
        client.insert(items)
        client.flush()


def test_every_inserted_item_is_drawn_bit_for_bit(served: Served) -> None:
    served.start()
    client = served.client()
    for start, stop in itertools.pairwise((0, 1, 3, 50, 57, 64, 200)):  # fewer than a segment, one, and several
        client.insert(items_of(range(start, stop)))
    client.flush()
    assert served.size == 200
    sample_all(client, range(200))


def test_weights_are_those_of_the_formula(served: Served) -> None:
    served.start()
    client = served.client()
    priorities = np.random.default_rng(3).random(100) + 0.01
    client.insert(items_of(range(100)), priorities)
    client.flush()
    items, weights, _ = client.sample()
    probability = (priorities**ALPHA / (priorities**ALPHA).sum())[items["number"]]
    expected = (100 * probability) ** -BETA
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, expected / expected.max(), rtol=1e-5)


def test_next_draw_follows_the_priorities_written_before_it(served: Served) -> None:
    client = filled(served, 14)
    items, _, handles = client.sample()
    assert set(items["number"]) == set(range(14))
    client.update_priorities(handles, np.where(items["number"] == 5, 1.0, 1e-12))
    assert set(client.sample().items["number"]) == {5}


def test_flush_returns_once_all_is_stored_and_the_end_of_a_with_block_flushes(served: Served) -> None:
    served.start()
    with served.client() as client:
        client.insert(items_of(range(3)))
        assert served.size == 0, "no segment is full"
        client.flush()
        assert served.size == 3
        client.insert(items_of(range(3, 21)))
    assert served.size == 21


def test_items_inserted_while_the_server_is_away_are_stored_once_it_is_back(served: Served) -> None:
    client = served.client()
    client.insert(items_of(range(20)))
    with pytest.raises(TimeoutError, match=r"20 items .* 0.1 s: .* is connecting"):
        client.flush(timeout_seconds=0.1)
    client.insert(items_of(range(20, 30)))
    served.start()
    client.flush()
    sample_all(client, range(30))
    served.stop()
    client.insert(items_of(range(30, 40)))
    served.start()
    client.flush()
    sample_all(client, range(40))
    assert served.size == 40


def test_insert_blocks_while_the_server_takes_nothing_and_goes_on_once_it_does(served: Served) -> None:
    client = served.client()
    thread = threading.Thread(target=lambda: client.insert(items_of(range(300))))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    served.start()
    thread.join(60)
    assert not thread.is_alive()
    client.flush()
    assert served.size == 300


def test_rate_limiter_makes_the_reader_wait_for_inserts(served: Served) -> None:
    ratio = ("replay.samples_per_insert=8", "replay.min_size_to_sample=50", "learner.updates_per_call=1")
    client = filled(served, 56, *ratio, "replay.error_buffer=1")
    with pytest.raises(TimeoutError, match=r"replay.samples_per_insert=8 asks for more inserts"):
        numbers_drawn(client, 100, timeout_seconds=0.5)
    client.insert(items_of(range(56, 112)))
    client.sample(timeout_seconds=60)


def test_draw_of_too_few_items_times_out_with_the_reason_and_a_program_may_poll(served: Served) -> None:
    client = filled(served, 49, "replay.min_size_to_sample=50")
    with pytest.raises(TimeoutError, match=r"after 0.5 s: .*replay.min_size_to_sample=50 items"):
        client.sample(timeout_seconds=0.5)
    client.insert(items_of(range(49, 50)))
    client.flush()
    drawn: list[int] = []

    def has_drawn() -> bool:
        with contextlib.suppress(TimeoutError):  # what arrives after a draw timed out is the next draw's
            drawn.append(len(client.sample(0.0).weights))
        return bool(drawn)

    wait_until(has_drawn, 60)
    assert drawn == [BATCH]


@pytest.mark.parametrize("act", ["insert", "draw"])
def test_other_columns_than_the_servers_are_one_error(served: Served, act: str) -> None:
    served.start()
    client = served.client("replay.columns=number:int32")
    with pytest.raises(RunError, match=r"refused by .*replay.columns: .*number:int64,.*number:int32"):
        use(client, act, {"number": np.zeros(1, np.int32)})


@pytest.mark.parametrize("act", ["insert", "draw"])
def test_address_without_a_server_is_one_error_after_the_limit(served: Served, act: str) -> None:
    client = served.client("away_limit_seconds=0.3")
    with pytest.raises(RunError, match=r"tcp://127.0.0.1:\d+ .*refused"):
        use(client, act, items_of(range(1)))


@pytest.mark.parametrize("act", ["insert", "draw"])
def test_key_that_the_server_does_not_know_is_one_error(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    monkeypatch.setattr(sockets, "GIVE_UP_SECONDS", 0.5)
    keys.create(tmp_path / "keys")
    keys.create(tmp_path / "others")
    (tmp_path / "others" / "replay.public").write_bytes((tmp_path / "keys" / "replay.public").read_bytes())
    served.start(f"security.keys={tmp_path}/keys")
    client = served.client(f"security.keys={tmp_path}/keys")
    use(client, "insert", items_of(range(1)))
    use(client, "draw", {})
    stranger = served.client(f"security.keys={tmp_path}/others")
    with pytest.raises(RunError, match="wrong key"):
        use(stranger, act, items_of(range(1)))


def test_second_reader_is_refused_and_a_later_one_is_not(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_client, "REFUSED_SECONDS", 0.5)
    first = filled(served, 7)
    first.sample()
    with pytest.raises(RunError, match="another learner"):
        served.client().sample()
    first.close()
    served.client().sample()


@pytest.mark.parametrize(("change", "priorities", "message"), [
    ({"number": None}, None, r"\['mask', 'tokens', 'value'\], must have \['mask', 'number'"),
    ({"tokens": np.zeros((2, 3), np.int64)}, None, r"tokens is int64\[2, 3\], must be int32\[2, 3\]"),
    ({"value": np.zeros(3, np.float32)}, None, r"value is float32\[3\], must be float32\[2\]"),
    *(({}, wrong, "priorities") for wrong in ([1.0], [1.0, 0.0], [1.0, np.nan], ["a", "b"])),
])  # fmt: skip
def test_items_that_do_not_fit_are_refused_before_anything_is_inserted(
    served: Served, change: dict[str, Any], priorities: Any, message: str
) -> None:
    client = served.client()
    items = {name: column for name, column in (items_of(range(2)) | change).items() if column is not None}
    with pytest.raises(ValueError, match=message):
        client.insert(items, priorities)
    client.flush(timeout_seconds=0.0)


def test_priorities_that_do_not_fit_the_batch_are_refused(served: Served) -> None:
    client = filled(served, 7)
    with pytest.raises(ValueError, match="it has drawn nothing"):
        client.update_priorities(None, np.ones(BATCH))  # type: ignore[arg-type]
    handles = client.sample().handles
    for wrong in (np.ones(BATCH - 1), np.zeros(BATCH), np.full(BATCH, np.nan)):
        with pytest.raises(ValueError, match="priorities are"):
            client.update_priorities(handles, wrong)


def test_wrong_settings_are_one_line_of_an_error(served: Served) -> None:
    for wrong in ("replay.columns=''", "replay.columns=x:text", "replay.colums=x:int8"):
        with pytest.raises(UsageError, match=r"replay\.columns"):
            served.client(wrong)
    away = served.client("addresses.experience=tcp://no-such-host.invalid:5550", "security.insecure=true")
    with pytest.raises(RunError, match=r"addresses\.experience=.*no-such-host\.invalid"):
        away.insert(items_of(range(1)))


def test_client_loads_neither_jax_nor_envpool() -> None:
    code = "import sys; from apex_jax import ReplayClient; print({'jax', 'envpool', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=60) == "set()\n"
