"""What the NATS sink does where it may not take its time: it gives back what it has not delivered."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waits import await_end, await_true

from penstock.config.nats import NatsSinkConfig
from penstock.core.delivery import Unfinished
from penstock.embedded.handles import JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.process import free_port
from penstock.sinks.nats.sink import NatsSink
from penstock.sinks.nats.window import WINDOW

from .nats_servers import batch, freeze

SUBJECTS = "shop.public.>"
PATIENCE = 0.4


@pytest.fixture
def server(server_dir: Path) -> Iterator[EmbeddedNats]:
    """A server that the test may stop."""
    with EmbeddedNats(server_dir / f"patience-{uuid.uuid4().hex[:8]}") as server:
        yield server


def sink_of(server: EmbeddedNats | str) -> NatsSink:
    url = server if isinstance(server, str) else server.url
    return NatsSink(NatsSinkConfig(url=url), name="orders", source="shop")


@pytest.mark.alone
def test_a_server_that_freezes_gives_back_what_it_has_not_acked(server: EmbeddedNats) -> None:
    rows = batch(range(20_000), groups=[i % 500 for i in range(20_000)])  # five windows
    with JetStream(server.url) as stream:
        stream.add_stream("SHOP", SUBJECTS, duplicate_window=600)
        sink = sink_of(server)
        assert sink.write(rows.slice(0, 1000), PATIENCE).delivered == 1000
        assert server.pid is not None
        freeze(server.pid)
        started = time.monotonic()
        try:
            with pytest.raises(Unfinished) as caught:
                sink.write(rows.slice(1000), PATIENCE)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert PATIENCE <= time.monotonic() - started < PATIENCE + 2
        unfinished = caught.value
        assert unfinished.error.code == "too_slow"
        assert unfinished.written.delivered == 0
        assert unfinished.rest.equals(rows.slice(1000))
        sink.write(unfinished.rest)
        found = [m.headers["Nats-Msg-Id"] for m in stream.messages("SHOP")]
    assert len(found) == len(set(found)) == 20_000
    order: dict[int, list[int]] = {}
    for key in found:
        number = int(key.split("-")[1])
        order.setdefault((number - 1) % 500, []).append(number)
    assert all(numbers == sorted(numbers) for numbers in order.values())


def test_a_server_killed_in_the_middle(server: EmbeddedNats) -> None:
    rows = batch(range(200_000))
    with JetStream(server.url) as stream:
        stream.add_stream("SHOP", SUBJECTS, duplicate_window=600)
        retried: list[str] = []
        sink = NatsSink(
            NatsSinkConfig(url=server.url), name="orders", source="shop",
            on_retry=lambda error, _: retried.append(error.code),
        )  # fmt: skip

        def kill_when_some_are_acked() -> None:
            # No more than a window is ever without its ack.
            await_true(lambda: stream.info("SHOP").state.messages > 2 * WINDOW)
            server.kill()

        thread = threading.Thread(target=kill_when_some_are_acked, daemon=True)
        thread.start()
        with pytest.raises(Unfinished) as caught:
            sink.write(rows, 5 * PATIENCE)  # a busy server is no dead one
        await_end(thread)
        rest, written = caught.value.rest, caught.value.written
        assert 0 < written.delivered < 200_000
        assert rest.num_rows + written.delivered == 200_000
        assert caught.value.error.code in ("connection_refused", "connection_lost")
        assert 0 < written.bytes < 200_000 * 1000
        numbers = rest.column("commit_lsn").to_pylist()
        assert numbers == sorted(numbers)
        server.start()
        sink.write(rest)
        with JetStream(server.url) as again:  # the first may still be connecting again
            found = [m.headers["Nats-Msg-Id"] for m in again.messages("SHOP")]
    assert len(found) == len(set(found)) == 200_000


def test_a_row_that_backs_off_is_what_is_left(server: EmbeddedNats) -> None:
    with JetStream(server.url) as stream:
        stream.add_stream("ORDERS", "shop.public.orders.>")
        rows = batch([1, 2, 3, 4], table=["orders", "payments", "orders", "payments"])
        with pytest.raises(Unfinished) as caught:
            sink_of(server).write(rows, PATIENCE)
    assert caught.value.error.code == "no_stream"
    assert caught.value.written.delivered == 2
    assert caught.value.rest.column("table_name").to_pylist() == ["payments", "payments"]


def test_nothing_listens() -> None:
    sink = sink_of(f"nats://127.0.0.1:{free_port()}")
    rows = batch([1, 2])
    for patience in (0.0, PATIENCE):
        started = time.monotonic()
        with pytest.raises(Unfinished) as caught:
            sink.write(rows, patience)
        assert caught.value.error.code == "connection_refused"
        assert caught.value.rest.equals(rows)
        with pytest.raises(Unfinished):
            sink.connect(patience)
        assert time.monotonic() - started < 2 * patience + 1


def test_a_login_that_is_refused_is_reported_at_once(server_dir: Path) -> None:
    config = 'authorization { user: penstock, password: "right" }'
    with EmbeddedNats(server_dir / f"patience-{uuid.uuid4().hex[:8]}", config) as server:
        sink = NatsSink(
            NatsSinkConfig(url=server.url, user="penstock", password="wrong"),
            name="orders", source="shop",
        )  # fmt: skip
        with pytest.raises(Unfinished) as caught:
            sink.write(batch([1]), 30)
    assert caught.value.error.code == "authorization_violation"
    assert caught.value.rest.num_rows == 1


def test_a_check_sees_that_a_server_is_gone_and_that_it_is_back(server: EmbeddedNats) -> None:
    sink = sink_of(server)
    sink.check(PATIENCE)
    sink.check(PATIENCE)
    assert server.pid is not None
    freeze(server.pid)
    try:
        with pytest.raises(Unfinished) as caught:
            sink.check(PATIENCE)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert caught.value.error.code == "timeout"
    assert caught.value.error.remedy
    sink.check(5.0)
    server.kill()
    with pytest.raises(Unfinished) as caught:
        sink.check(PATIENCE)
    assert caught.value.error.code in ("connection_lost", "connection_refused")
    server.start()
    sink.check(5.0)
    sink.close()
