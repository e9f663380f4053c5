"""A real cluster of three: what sink and check name when a leader changes, and without a quorum."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.nats_cluster import Cluster, answered
from tests.waits import await_true

from penstock.config.nats import NatsSinkConfig
from penstock.core.errors import SinkError
from penstock.core.finding import Finding
from penstock.embedded.handles import JetStream
from penstock.sinks.nats import check as nats_check
from penstock.sinks.nats.publish import Publisher
from penstock.sinks.nats.sink import NatsSink

from . import test_outbox_sink as outbox
from .nats_servers import Writer, batch

FALSE = {"jetstream_not_enabled", "no_stream"}


@pytest.fixture(scope="module")
def cluster(server_dir: Path) -> Iterator[Cluster]:
    with Cluster(server_dir / "quorum") as cluster:
        yield cluster


@pytest.fixture
def streams(cluster: Cluster) -> Iterator[JetStream]:
    with JetStream(cluster.url.split(",")[0], error_cb=ignore_error) as handle:
        yield handle


def config(cluster: Cluster, subject: str = "orders") -> NatsSinkConfig:
    return NatsSinkConfig(url=cluster.url, subject=subject, ack_timeout=2)


async def ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that we killed."""


def test_an_outbox_that_comes_again_in_another_order(cluster: Cluster, streams: JetStream) -> None:
    """A stream of three replicas takes nothing more once it has refused a link."""
    answered(partial(streams.add_stream, "OUTBOX", "outbox.>", num_replicas=3), "the stream")
    for numbers_ in ([1, 4], range(1, 50)):
        sink = NatsSink(outbox.settings(cluster.url, "outbox"), name="a", source="group")
        assert sink.write(outbox.rows(numbers_), 10.0).delivered == len(numbers_)
        sink.close()
    assert outbox.numbers(streams.messages("OUTBOX")) == [1, 4, 2, 3, *range(5, 50)]


def test_what_a_cluster_is_short_of(cluster: Cluster, streams: JetStream) -> None:
    answered(partial(streams.add_stream, "ORDERS", "orders", num_replicas=3), "the stream")
    leader = cluster.leader(streams, "ORDERS")
    writer = Writer(config(cluster))
    assert writer.sink.write(batch([1])).delivered == 1

    # A subject that no stream captures is one in a cluster, too.
    stop: list[bool] = []
    missing = Writer(config(cluster, "missing"), should_stop=lambda: bool(stop))
    missing.start(batch([1]))
    missing.until_retry("no_stream")
    stop.append(True)
    assert missing.codes == {"no_leader", "no_stream"}
    with pytest.raises(SinkError):
        missing.result()
    (error,) = [f for f in nats_check.inspect(config(cluster, "missing")) if f.level == "error"]
    assert "No JetStream stream captures the subject 'missing'" in error.message

    # A leader change: it is awaited.
    cluster.kill(leader)
    writer.start(batch([2], first=2))
    (quiet,) = [f for f in nats_check.inspect(config(cluster)) if f.subject == "subject orders"
                and "captured" in f.message]  # fmt: skip
    assert quiet.level == "ok"
    assert writer.result().delivered == 1
    assert not writer.codes & FALSE

    # No quorum: neither the sink nor `check` asks for -js or for a stream.
    second = next(name for name in cluster.servers if name != leader)
    cluster.kill(second)
    stop.clear()
    alone = Writer(config(cluster), should_stop=lambda: bool(stop))
    alone.start(batch([3], first=3))
    alone.until_retry("no_quorum")
    assert not alone.codes & FALSE
    text = str(next(error for error in alone.errors if error.code == "no_quorum"))
    assert "no quorum" in text
    assert "must run" in text

    def errors() -> list[Finding]:
        return [f for f in nats_check.inspect(config(cluster)) if f.level == "error"]

    await_true(lambda: bool(errors()))  # the server that is left finds out after seconds
    assert [("quorum" in f.message, "must run" in f.fix) for f in errors()] == [(True, True)]
    with (
        Publisher(config(cluster), name="orders", source="shop") as publisher,
        pytest.raises(SinkError) as caught,
    ):
        publisher.publish("orders", "key", b"{}")
    assert caught.value.code == "no_quorum"

    # Its servers are back, and so is everything.
    cluster.servers[second].start()
    cluster.servers[leader].start()
    assert alone.result().delivered == 1
