"""An outbox's messages into a real JetStream: forms, subjects, atomic batches, faults."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from tests.waits import await_true

from penstock.core.delivery import Written
from penstock.core.message import WIRE_SCHEMA
from penstock.embedded.handles import JetStream, Msg
from penstock.embedded.nats import EmbeddedNats
from penstock.outbox.settings import OutboxSinkSettings, read
from penstock.sinks.nats import client as nats_client
from penstock.sinks.nats.sink import NatsSink
from penstock.sinks.nats.task import Task

from .nats_servers import Writer

PADDING = "x" * 100


@pytest.fixture
def own_server(server_dir: Path) -> Iterator[EmbeddedNats]:
    """A server that the test may stop."""
    with EmbeddedNats(server_dir / f"outbox{uuid.uuid4().hex[:8]}") as server:
        yield server


@pytest.fixture
def stream() -> str:
    return f"O{uuid.uuid4().hex[:8]}"


def rows(numbers: Sequence[int], **record: Any) -> pa.RecordBatch:
    """Return rows of an outbox, in one group: their ids and what a payload has are `numbers`."""
    count = len(numbers)
    usual = {"dedup_key": None, "headers": {}, "created_at": "2026-11-21T10:00:00Z", **record}
    texts = [
        orjson.dumps({"id": n, "payload": {"n": n, "of": n % 7, "p": PADDING}} | usual).decode()
        for n in numbers
    ]
    columns = [
        texts, [None] * count, ["insert"] * count, ["tide"] * count, ["outbox_orders"] * count,
        ['{"database":"shop"}'] * count, [f"t-{n}-0" for n in numbers], list(numbers),
        [0] * count, [1] * count, [None] * count, [None] * count, [0] * count,
    ]  # fmt: skip
    arrays = [pa.array(c, f.type) for c, f in zip(columns, WIRE_SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=WIRE_SCHEMA)


def settings(url: str, stream: str, **keys: Any) -> OutboxSinkSettings:
    config = {"sink_type": "nats", "url": url, "subject": f"{stream}.x", **keys}
    return read(config, {}).sink(source="group", outbox="orders")


def make(nats: JetStream, stream: str, *, atomic: bool = True, **config: Any) -> None:
    """Make a stream, which takes atomic batches or not; nats-py knows no such setting."""
    nats.add_stream(stream, f"{stream}.>", **config)
    if atomic:
        set_atomic(nats, stream, atomic=True)


def set_atomic(nats: JetStream, stream: str, *, atomic: bool) -> None:
    answer = nats.api(f"STREAM.INFO.{stream}", {})
    changed = answer["config"] | {"allow_atomic": atomic}
    answer = nats.api(f"STREAM.UPDATE.{stream}", changed)
    assert answer["config"].get("allow_atomic", False) == atomic, answer


def without_links(sink: NatsSink) -> NatsSink:
    """Return a sink that links no messages, as where others publish to the stream all the time."""
    sink._chaining.may_link = False
    return sink


def stored(nats: JetStream, stream: str, count: int) -> bool:
    """Return whether a stream has more than `count` messages."""
    return int(nats.info(stream).state.messages) > count


def numbers(messages: Sequence[Msg]) -> list[int]:
    return [json.loads(message.data)["n"] for message in messages]


def batches(messages: Sequence[Msg]) -> dict[str, int]:
    """Return how many messages of each atomic batch there are."""
    found: dict[str, int] = {}
    for message in messages:
        if (name := message.headers.get("Nats-Batch-Id")) is not None:
            found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.parametrize("atomic", [True, False])
def test_an_outbox_goes_many_at_once_in_its_order(
    nats_server: EmbeddedNats, nats: JetStream, stream: str, atomic: bool
) -> None:
    make(nats, stream, atomic=atomic)
    writer = Writer(settings(nats_server.url, stream))
    if atomic:
        without_links(writer.sink)
    written = writer.write(rows(range(1, 2051)))
    assert (written.delivered, written.duplicates, written.dead) == (2050, 0, [])
    messages = nats.messages(stream)
    assert numbers(messages) == list(range(1, 2051))
    if atomic:
        assert sorted(batches(messages).values()) == [50] + [100] * 20
    else:
        assert batches(messages) == {}
        unlinked = [m for m in messages if "Nats-Expected-Last-Msg-Id" not in m.headers]
        assert numbers(unlinked) == [1, *range(3, 2051, 100)]
    assert messages[4].headers["Nats-Msg-Id"] == "orders#5"
    assert json.loads(messages[4].data) == {"n": 5, "of": 5, "p": PADDING}
    assert written.bytes == sum(len(message.data) for message in messages)


def test_a_stream_without_atomic_batches_gets_one_by_one(
    nats_server: EmbeddedNats, nats: JetStream, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is asked again only after a while, as it may have been changed."""
    make(nats, stream, atomic=False)
    sink = NatsSink(settings(nats_server.url, stream), name="notify", source="group")
    without_links(sink)
    assert sink.write(rows(range(300))).delivered == 300
    set_atomic(nats, stream, atomic=True)
    assert sink.write(rows(range(300, 400))).delivered == 100
    assert batches(nats.messages(stream)) == {}
    monkeypatch.setattr(sink._chaining, "_atomic_from", float("-inf"))
    assert sink.write(rows(range(400, 500))).delivered == 100
    messages = nats.messages(stream)
    assert numbers(messages) == list(range(500))
    assert list(batches(messages).values()) == [100]
    sink.close()


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("seen", [range(150, 160), range(1), range(299, 300), range(300)])
def test_messages_that_are_there_already_are_passed_over(
    nats_server: EmbeddedNats, nats: JetStream, stream: str, seen: range, links: bool
) -> None:
    make(nats, stream)
    sink = NatsSink(settings(nats_server.url, stream), name="notify", source="group")
    if not links:
        without_links(sink)
    assert sink.write(rows(seen)).delivered == len(seen)
    written = sink.write(rows(range(300)))
    assert (written.delivered, written.duplicates) == (300, len(seen))
    found = numbers(nats.messages(stream))
    assert found == [*seen, *(n for n in range(300) if n not in seen)]
    sink.close()


def test_links_that_others_break_keep_the_order(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    """Another publisher writes to the stream all the while, and nothing comes twice or late."""
    make(nats, stream)
    writer = Writer(settings(nats_server.url, stream))
    # Enough that a link is broken on a busy machine, too.
    writer.start(rows(range(60_000)))
    others = 0
    while nats.info(stream).state.messages < 55_000:
        for _ in range(20):
            others += 1
            nats.publish(f"{stream}.other", b'{"n": -1}')
    assert others > 0
    written = writer.result()
    assert (written.delivered, written.duplicates) == (60_000, 0)
    messages = nats.messages(stream)
    assert [n for n in numbers(messages) if n >= 0] == list(range(60_000))
    assert batches(messages)  # while it linked none


@pytest.mark.parametrize("links", [True, False])
def test_what_cannot_be_sent_leaves_the_others_in_order(
    nats_server: EmbeddedNats, nats: JetStream, stream: str, links: bool
) -> None:
    make(nats, stream, max_msg_size=20_000)
    parts = [
        rows(range(40)),
        rows([40], headers={"Nats-Rollup": "all"}),
        rows(range(41, 80)),
        rows([80], headers={"big": "y" * 30_000}),  # which only the stream refuses
        rows(range(81, 120)),
        rows([120], headers={"big": "y" * 70_000}),
        rows(range(121, 200)),
    ]
    batch = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
    writer = Writer(settings(nats_server.url, stream))
    if not links:
        without_links(writer.sink)
    written = writer.write(batch)
    assert [(d.code, d.idempotency_key) for d in written.dead] == [
        ("reserved_header", "t-40-0"),
        ("message_too_large", "t-80-0"),
        ("headers_too_large", "t-120-0"),
    ]
    assert numbers(nats.messages(stream)) == [n for n in range(200) if n not in (40, 80, 120)]


def test_messages_of_one_group_for_several_streams(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    """A batch is of one stream, so they go one by one."""
    nats.add_stream(f"{stream}A", [f"{stream}.0", f"{stream}.1"])
    make(nats, f"{stream}B", atomic=False)
    nats.add_stream(f"{stream}C", [f"{stream}.{n}" for n in range(2, 7)])
    set_atomic(nats, f"{stream}C", atomic=True)
    config = settings(nats_server.url, stream, subject=f"{stream}.{{payload.of}}")
    assert Writer(config).write(rows(range(210))).delivered == 210
    first, second = (numbers(nats.messages(f"{stream}{name}")) for name in "AC")
    assert first == [n for n in range(210) if n % 7 < 2]
    assert second == [n for n in range(210) if n % 7 >= 2]


@pytest.mark.parametrize("group_by", ["payload.of", "none"])
def test_order_by_a_value_or_by_nothing(
    nats_server: EmbeddedNats, nats: JetStream, stream: str, group_by: str
) -> None:
    make(nats, stream)
    config = settings(nats_server.url, stream, group_by=group_by)
    assert Writer(config).write(rows(range(700))).delivered == 700
    messages = nats.messages(stream)
    assert sorted(numbers(messages)) == list(range(700))
    sizes = set(batches(messages).values())
    if group_by == "none":
        assert sizes == set()
        return
    assert sizes == {100}
    for rest in range(7):
        mine = [n for n in numbers(messages) if n % 7 == rest]
        assert mine == sorted(mine)


def test_a_full_stream_is_waited_for(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    make(nats, stream, max_msgs=250, discard="new")
    writer = Writer(settings(nats_server.url, stream))
    writer.start(rows(range(600)))
    writer.until_retry("stream_full")
    assert numbers(nats.messages(stream)) == list(range(250))
    answer = nats.api(f"STREAM.INFO.{stream}", {})
    nats.api(f"STREAM.UPDATE.{stream}", answer["config"] | {"max_msgs": -1})
    assert writer.result(60).delivered == 600
    assert numbers(nats.messages(stream)) == list(range(600))


@contextlib.contextmanager
def permitting(folder: Path, subjects: str) -> Iterator[tuple[EmbeddedNats, JetStream]]:
    """A server where the user `relay` may publish to these subjects alone; its streams, as `admin`."""
    config = (
        "authorization { users = [\n"
        ' {user: admin, password: admin, permissions: {publish: ">", subscribe: ">"}}\n'
        " {user: relay, password: relay, permissions: {"
        f' publish: {{allow: ["{subjects}"]}}, subscribe: "_INBOX.>"}}}}\n'
        "] }\n"
    )
    with (
        EmbeddedNats(folder, config) as server,
        JetStream(server.url, user="admin", password="admin") as nats,
    ):
        yield server, nats


def test_a_denied_subject_blocks_its_group_alone(server_dir: Path, stream: str) -> None:
    with permitting(server_dir / f"denied{stream}", f"{stream}.1") as (server, nats):
        make(nats, stream)
        writer = Writer(
            settings(
                server.url, stream, username="relay", password="relay",
                subject=f"{stream}.{{payload.of}}", group_by="payload.of",
            ),
            should_stop=lambda: len(nats.messages(stream)) == 20,
        )  # fmt: skip
        writer.start(rows(range(140)))
        with pytest.raises(Exception, match="may not publish"):
            writer.result()
        assert numbers(nats.messages(stream)) == list(range(1, 140, 7))


@pytest.mark.parametrize(
    ("way", "count"), [("linked", 40_000), ("atomic", 20_000), ("single", 8_000)]
)
def test_a_server_killed_amid_it_all_loses_and_repeats_nothing(
    own_server: EmbeddedNats, stream: str, way: str, count: int
) -> None:
    """Killed three times while the group's messages go there."""
    with JetStream(own_server.url) as nats:
        make(nats, stream, atomic=way == "atomic")
        writer = Writer(settings(own_server.url, stream))
        if way != "linked":
            without_links(writer.sink)
        writer.start(rows(range(count)))
        for kill in range(1, 4):
            await_true(partial(stored, nats, stream, kill * count // 5))
            own_server.kill()
            own_server.start()
        written = writer.result(60)
        assert written.delivered == count
        found = nats.messages(stream)
        assert numbers(found) == list(range(count))
        assert bool(batches(found)) == (way == "atomic")


@pytest.mark.parametrize("links", [True, False])
def test_acks_that_are_lost_repeat_nothing(
    nats_server: EmbeddedNats,
    nats: JetStream,
    stream: str,
    monkeypatch: pytest.MonkeyPatch,
    links: bool,
) -> None:
    """The connection breaks with batches under way, of which the stream takes one or another."""
    make(nats, stream)
    sink = NatsSink(settings(nats_server.url, stream), name="notify", source="group")
    if not links:
        without_links(sink)
    connect = nats_client.connect_first
    steps = 0

    def breaking(*arguments: Any, **keywords: Any) -> Any:
        connection = connect(*arguments, **keywords)
        step = connection.step

        def lose(timeout: float, *, last: bool = False) -> Any:
            nonlocal steps
            found = step(timeout, last=last)
            steps += 1
            if steps % 5 == 0:
                connection._sock.close()
            return found

        monkeypatch.setattr(connection, "step", lose)
        return connection

    monkeypatch.setattr("penstock.sinks.nats.sink.connect_first", breaking)
    monkeypatch.setattr("penstock.sinks.nats.sink.backoff", lambda _attempt: 0.0)
    assert sink.write(rows(range(3_000))).delivered == 3_000
    assert steps > 10
    assert numbers(nats.messages(stream)) == list(range(3_000))
    sink.close()


def test_forms_and_headers_as_a_subscriber_reads_them(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    make(nats, stream)
    bodies = {}
    for number, form in enumerate(["plain", "envelope", "cloudevents", "debezium"]):
        batch = rows([number], headers={"Trace": "a b", "n": 5}, dedup_key=f"key-{number}")
        config = settings(nats_server.url, stream, format=form)
        assert Writer(config).write(batch).delivered == 1
        message = nats.messages(stream)[-1]
        assert message.headers["Nats-Msg-Id"] == f"orders:key-{number}"
        assert (message.headers["Trace"], message.headers["n"]) == ("a b", "5")
        bodies[form] = json.loads(message.data)
    payload = {"n": 0, "of": 0, "p": PADDING}
    assert bodies["plain"] == payload
    assert bodies["envelope"]["record"]["payload"] == payload | {"n": 1, "of": 1}
    assert bodies["cloudevents"]["data"] == payload | {"n": 2, "of": 2}
    assert bodies["debezium"] == payload | {"n": 3, "of": 3}


# A message that the stream has already


def of(
    url: str, stream: str, name: str, *, tag: str = "0a1b2c3d", outbox: str = "orders", **keys: Any
) -> NatsSink:
    """Return the sink of the pipeline `name`."""
    config = {"sink_type": "nats", "url": url, "subject": f"{stream}.{name}", **keys}
    sink = read(config, {}).sink(source="group", outbox=outbox, tag=tag)
    return NatsSink(sink, name=name, source="group")


def written(sink: NatsSink, batch: pa.RecordBatch) -> Written:
    try:
        return sink.write(batch)
    finally:
        sink.close()


def test_outboxes_that_share_a_key_lose_nothing(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    """Of two names, and of one name in two databases, with and without a key."""
    make(nats, stream)
    identities = [
        ("a", "orders", "11111111"),
        ("b", "notes", "11111111"),
        ("c", "orders", "2222222"),
    ]
    for name, outbox, tag in identities:
        for key in ("k-1", None):
            sink = of(nats_server.url, stream, name, tag=tag, outbox=outbox)
            done = written(sink, rows([1], dedup_key=key))
            assert (done.delivered, done.duplicates, done.dead) == (1, 0, [])
    assert nats.info(stream).state.messages == 6


@pytest.mark.parametrize("form", ["plain", "envelope", "cloudevents", "debezium"])
def test_another_publishers_message_is_no_delivery(
    nats_server: EmbeddedNats, nats: JetStream, stream: str, form: str
) -> None:
    """What follows it goes on; its own copies, sent again after a restart, are no loss."""
    make(nats, stream)
    url = nats_server.url
    assert written(of(url, stream, "other", format=form), rows([2])).delivered == 1
    nats.publish(f"{stream}.direct", b"5", {"Nats-Msg-Id": "orders/0a1b2c3d:k-5"})
    batch = pa.Table.from_batches([rows([1, 2, 3, 4]), rows([5], dedup_key="k-5"), rows([6])])
    batch = batch.combine_chunks().to_batches()[0]
    assert written(of(url, stream, "mine", format=form), batch.slice(2, 2)).delivered == 2
    done = written(of(url, stream, "mine", format=form), batch)
    assert (done.delivered, done.duplicates) == (4, 2)
    dead = sorted(done.dead, key=lambda d: d.idempotency_key)  # they are of two groups
    assert [(d.code, d.idempotency_key) for d in dead] == [
        ("duplicate_key", "t-2-0"), ("duplicate_key", "t-5-0"),
    ]  # fmt: skip
    first, second = (d.reason for d in dead)
    for part in ("'mine'", "'other'", "orders/0a1b2c3d#2", f"{stream}.other", f"stream {stream}"):
        assert part in first
    assert "another publisher" in second
    subjects = [message.subject.removeprefix(f"{stream}.") for message in nats.messages(stream)]
    assert subjects == ["other", "direct", "mine", "mine", "mine", "mine"]


def test_keys_are_shared_where_that_is_set(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    make(nats, stream)
    for name, tag in (("a", "11111111"), ("b", "22222222")):
        sink = of(nats_server.url, stream, name, tag=tag, key_scope="stream")
        done = written(sink, rows([1], dedup_key="k"))
        assert (done.delivered, done.duplicates, done.dead) == (1, int(name == "b"), [])
        done = written(of(nats_server.url, stream, name, key_scope="stream"), rows([7]))
        assert len(done.dead) == int(name == "b")  # one without a key is not shared
    ids = [message.headers["Nats-Msg-Id"] for message in nats.messages(stream)]
    assert ids == ["k", "orders/0a1b2c3d#7"]


def test_a_message_that_is_gone_since_was_delivered(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    """As where it was worked through; its id is known still."""
    make(nats, stream)
    assert written(of(nats_server.url, stream, "a"), rows(range(5))).delivered == 5
    nats.api(f"STREAM.PURGE.{stream}", {})
    done = written(of(nats_server.url, stream, "a"), rows(range(5)))
    assert (done.delivered, done.duplicates, done.dead) == (5, 5, [])


def test_a_user_who_may_not_read_the_stream_is_reported(server_dir: Path, stream: str) -> None:
    with permitting(server_dir / f"unread{stream}", f"{stream}.>") as (server, nats):
        make(nats, stream)
        for duplicates in (0, 300):
            writer = Writer(settings(server.url, stream, username="relay", password="relay"))
            done = writer.write(rows(range(300)))
            assert (done.delivered, done.duplicates, done.dead) == (300, duplicates, [])
        assert writer.codes == {"duplicates_unchecked"}
        assert f"$JS.API.STREAM.MSG.GET.{stream}" in str(writer.errors[0])
        assert len(writer.errors) == 1


# What comes again in another order: as of an outbox whose slot was lost, by its ids


def test_what_comes_again_in_another_order_overtakes_nothing(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    """4 was committed before 2 and 3, and was the last that arrived before."""
    make(nats, stream, atomic=False)
    assert written(of(nats_server.url, stream, "a"), rows([1, 4])).delivered == 2
    done = written(of(nats_server.url, stream, "a"), rows(range(1, 150)))
    assert (done.delivered, done.duplicates, done.dead) == (149, 2, [])
    messages = nats.messages(stream)
    assert numbers(messages) == [1, 4, 2, 3, *range(5, 150)]
    linked = [m for m in messages if "Nats-Expected-Last-Msg-Id" in m.headers]
    assert len(linked) > 140  # it is fast again


def test_nor_where_it_goes_to_several_streams(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    """That one of them has stored something shows nothing of the others."""
    names = [f"{stream}{name}" for name in "AB"]
    for name, of_rows in zip(names, ([0, 1, 2], [3, 4, 5, 6]), strict=True):
        nats.add_stream(name, [f"{stream}.{n}" for n in of_rows])
    config = settings(nats_server.url, stream, subject=f"{stream}.{{payload.of}}")
    assert Writer(config).write(rows([5])).delivered == 1
    # 0 to 2 go to the one; of 3 to 6, the other has 5.
    done = Writer(config).write(rows(range(7)))
    assert (done.delivered, done.duplicates) == (7, 1)
    assert [numbers(nats.messages(name)) for name in names] == [[0, 1, 2], [5, 3, 4, 6]]


def test_copies_pass_many_at_once(
    nats_server: EmbeddedNats, nats: JetStream, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a replay of many messages is not to take a round trip for each."""
    make(nats, stream, atomic=False)
    assert written(of(nats_server.url, stream, "a"), rows(range(1_000))).delivered == 1_000
    waves: list[int] = []
    wave = Task.wave

    def counted(task: Task, *arguments: Any) -> Any:
        before = task.rows.flying
        found = wave(task, *arguments)
        waves.append(task.rows.flying - before)
        return found

    monkeypatch.setattr(Task, "wave", counted)
    done = written(of(nats_server.url, stream, "a"), rows(range(1_500)))
    assert (done.delivered, done.duplicates) == (1_500, 1_000)
    assert numbers(nats.messages(stream)) == list(range(1_500))
    assert len(waves) < 30, waves
