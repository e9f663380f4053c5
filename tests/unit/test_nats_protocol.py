"""The NATS protocol without a server: what comes in, what goes out, and in which order."""

from __future__ import annotations

import json
import pickle
import socket
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.waits import await_end

from penstock.config.nats import NatsSinkConfig, redact
from penstock.core.errors import SinkError
from penstock.core.message import SUBJECT_FIELD, WIRE_SCHEMA
from penstock.sinks.nats.chains import Chaining
from penstock.sinks.nats.errors import refused_by_stream
from penstock.sinks.nats.frames import BLOCK_ROWS, Encoder
from penstock.sinks.nats.order import group_keys, waits_of
from penstock.sinks.nats.parser import StoredAnswer, Event, Info, Parser, Ping, Pong, Reply, ServerError
from penstock.sinks.nats.retries import BACKOFF_MAX, backoff
from penstock.sinks.nats.sink import NatsSink
from penstock.sinks.nats.task import Task

INBOX = b"_INBOX.abc."


def msg(number: int, body: bytes) -> bytes:
    return b"MSG %s%d 1 %d\r\n%s\r\n" % (INBOX, number, len(body), body)


def ack(number: int, more: bytes = b"") -> bytes:
    return msg(number, b'{"stream":"S", "seq":%d%s}' % (number + 7, more))


NO_RESPONDERS = b"HMSG " + INBOX + b"9 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
FULL = b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"}}'
FOUND = b'{"message":{"subject":"a","seq":9}}'
COPY = b'{"stream":"S", "seq":9,"duplicate": true}'
TALK = (
    b'INFO {"max_payload":10}\r\n'
    + ack(1)
    + ack(2, b',"duplicate": true')
    + b"PING\r\n"
    + ack(3)
    + NO_RESPONDERS
    + msg(4, FULL)
    + msg(4, FOUND).replace(INBOX, INBOX + b"q")
    + b"-ERR 'Permissions Violation for Publish to \"a.b\"'\r\n"
    + msg(5, b'{"stream":"S", "domain":"hub", "seq":0}')
    + msg(6, b"+OK\r\nMSG " + INBOX + b'77 1 2\r\n{"stream":"S", "seq":1}')
    + b"MSG other.7 2 2\r\nhi\r\n+OK\r\nPONG\r\n"
    + ack(8, b"")
)


def feed(pieces: Sequence[bytes]) -> tuple[list[int], list[Event], dict[bytes, bytes]]:
    parser = Parser(INBOX)
    acks: list[int] = []
    events: list[Event] = []
    for piece in pieces:
        some, more = parser.feed(piece)
        acks += map(int, some)
        events += more
    return acks, events, parser.copies


def test_parser() -> None:
    acks, events, copies = feed([TALK])
    assert acks == [1, 2, 3, 8]
    assert copies == {b"2": COPY}
    assert [type(e) for e in events] == [
        Info, Ping, Reply, Reply, StoredAnswer, ServerError, Reply, Reply, Pong,
    ]  # fmt: skip
    assert events[0] == Info({"max_payload": 10})
    assert events[2] == Reply(9, 503, b"")
    assert events[3] == Reply(4, 0, FULL)
    assert events[4] == StoredAnswer(4, 0, FOUND)
    problem = events[5]
    assert isinstance(problem, ServerError)
    assert problem.denied_subject == "a.b"


@given(st.lists(st.integers(0, len(TALK)), max_size=20))
def test_however_it_is_cut(cuts: list[int]) -> None:
    at = [0, *sorted(cuts), len(TALK)]
    assert feed([TALK[a:b] for a, b in pairwise(at)]) == feed([TALK])


def test_an_ack_of_sequence_0_or_with_an_error_is_no_ack() -> None:
    body = b'{"error":{"code":400},"stream":"S","seq":0}'
    assert feed([msg(1, body)])[:2] == ([], [Reply(1, 0, body)])
    assert feed([msg(1, b'{"stream":"S","seq":0}')])[0] == []


def test_something_else_than_nats() -> None:
    with pytest.raises(SinkError, match="does not speak NATS"):
        Parser(INBOX).feed(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(SinkError, match="does not speak NATS"):
        Parser(INBOX).feed(b"\0" * 2_000_000)


def batch(count: int, **columns: list[Any]) -> pa.RecordBatch:
    usual: dict[str, list[Any]]
    usual = {
        "record": [json.dumps({"id": n}) for n in range(count)],
        "changes": [None] * count,
        "action": ["insert"] * count,
        "table_schema": ["public"] * count,
        "table_name": ["orders"] * count,
        "metadata": ['{"database":"db"}'] * count,
        "idempotency_key": [f"t-{n}-0" for n in range(count)],
        "commit_lsn": list(range(count)),
        "commit_idx": [0] * count,
        "group_hash": list(range(count)),
        "old_group_hash": [None] * count,
        "old_key": [None] * count,
        "part": [0] * count,
    }
    return pa.record_batch(usual | columns, schema=WIRE_SCHEMA)


def encoder(**settings: Any) -> Encoder:
    return Encoder(NatsSinkConfig(**settings), "orders", "shop", INBOX)


def parse_frames(data: bytes) -> list[tuple[str, int, str, Any]]:
    """Read frames as a server does: by their lengths. Gives subject, number, header, body."""
    found = []
    while data:
        line, _, data = data.partition(b"\r\n")
        word, subject, reply, header, total = line.split(b" ")
        assert word == b"HPUB"
        body = data[int(header) : int(total)]
        assert data[int(header) - 4 : int(header)] == b"\r\n\r\n"
        assert data[int(total) : int(total) + 2] == b"\r\n"
        found.append(
            (
                subject.decode(),
                int(reply.removeprefix(INBOX)),
                data[: int(header)].decode(),
                orjson.loads(body),
            )
        )
        data = data[int(total) + 2 :]
    return found


def test_frames() -> None:
    rows = batch(
        3,
        record=['{"a":"ä\\r\\n"}', None, "{}"],
        changes=[None, '{"a":1}', None],
        metadata=['{"database":"db"}', " {} \n", None],
    )
    block = encoder().block(rows, 0, base=100)
    frames = parse_frames(bytes(block.data))
    consumer = {"id": "orders", "name": "orders"}
    assert [f[1] for f in frames] == [100, 101, 102]
    assert frames[0] == (
        "shop.public.orders.insert",
        100,
        "NATS/1.0\r\nNats-Msg-Id: t-0-0\r\n\r\n",
        {
            "record": {"a": "ä\r\n"},
            "changes": None,
            "action": "insert",
            "metadata": {"database": "db", "consumer": consumer},
        },
    )
    assert frames[1][3]["record"] is None
    assert frames[1][3]["changes"] == {"a": 1}
    assert frames[2][3]["metadata"]["consumer"] == consumer
    assert block.body_bytes == sum(
        len(bytes(block.frame(n)).split(b"\r\n\r\n", 1)[1]) - 2 for n in range(3)
    )
    assert block.largest == max(block.payload)


def test_frames_of_rows() -> None:
    rows = batch(3, record=['{"a":"ä"}', None, "{}"], metadata=['{"x":1}', None, " {} \n"])
    block = encoder(kind="rows").block(rows, 0, base=1)
    consumer = {"id": "orders", "name": "orders"}
    frames = parse_frames(bytes(block.data))
    assert frames[0][0] == "shop.public.orders"
    assert [f[3] for f in frames] == [
        {"record": {"a": "ä"}, "metadata": {"x": 1, "consumer": consumer}},
        {"record": None, "metadata": {"unavailable": [], "consumer": consumer}},
        {"record": {}, "metadata": {"unavailable": [], "consumer": consumer}},
    ]
    sizes = [len(bytes(block.frame(n)).split(b"\r\n\r\n", 1)[1]) - 2 for n in range(3)]
    assert block.body_bytes == sum(sizes)
    assert block.largest == max(block.payload)


def test_the_frame_of_a_row_that_was_deleted_and_the_sinks_id() -> None:
    config = NatsSinkConfig(kind="rows", deletes=True)
    rows = batch(2, action=["delete", "update"])
    of = Encoder(config, "orders", "shop", INBOX, "0b1e5c3a-0000-4000-8000-000000000000")
    consumer = {"id": "0b1e5c3a-0000-4000-8000-000000000000", "name": "orders"}
    for messages in (rows, pa.concat_batches([rows] * 40)):  # a few, and many
        block = of.block(messages, 0, base=1)
        deleted, updated = (f[3] for f in parse_frames(bytes(block.data))[:2])
        assert list(deleted) == ["record", "action", "metadata"]
        assert deleted["action"] == "delete"
        assert deleted["metadata"]["consumer"] == consumer
        assert list(updated) == ["record", "metadata"]


def test_the_expected_stream_is_a_header() -> None:
    block = encoder(stream="ORDERS").block(batch(1), 0, 1)
    assert "Nats-Expected-Stream: ORDERS\r\n" in parse_frames(bytes(block.data))[0][2]


def test_a_key_cannot_add_headers() -> None:
    rows = batch(2, idempotency_key=["x\r\nNats-Rollup: all", "ok"])
    block = encoder().block(rows, 0, 1)
    assert block.refused == {0: ("invalid_key", "the message's id holds a line end")}
    assert b"Rollup" not in bytes(block.data)


def test_a_subject_of_the_message_wins_over_the_template() -> None:
    subjects = ["eu.orders", None, "ü.%20"]
    rows = batch(3).append_column(SUBJECT_FIELD, pa.array(subjects, pa.string()))
    found = [f[0] for f in parse_frames(bytes(encoder().block(rows, 0, 1).data))]
    assert found == ["eu.orders", "shop.public.orders.insert", "ü.%20"]
    found = [f[0] for f in parse_frames(bytes(encoder().block(rows.slice(2), 0, 1).data))]
    assert found == ["ü.%20"]


@pytest.mark.parametrize(
    "subject",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "a b",
        "a\tb",
        "a\r\nPUB x 0",
        "a.*",
        "a.>",
        "$JS.API",
        "a\0",
        "\x7f",
    ],
)
def test_a_subject_that_is_none_is_refused(subject: str) -> None:
    rows = batch(3).append_column(SUBJECT_FIELD, pa.array(["a", subject, None], pa.string()))
    block = encoder().block(rows, 0, 1)
    assert [(row, code) for row, (code, _) in block.refused.items()] == [(1, "bad_subject")]
    assert repr(subject) in block.refused[1][1]
    frames = parse_frames(bytes(block.data))
    assert [f[0] for f in frames] == ["a", "-", "shop.public.orders.insert"]
    task = Task(rows, encoder(), 1, None)
    assert len(parse_frames(bytes(task.wave(10, 10**6, 0.0)))) == 2
    assert [(d.code, d.idempotency_key) for d in task.written.dead] == [("bad_subject", "t-1-0")]


def test_a_subject_of_the_message_has_a_greatest_length() -> None:
    rows = batch(1).append_column(SUBJECT_FIELD, pa.array(["a" * 4000]))
    assert encoder().block(rows, 0, 1).refused[0][0] == "subject_too_long"


def test_a_slice_of_a_batch_encodes_as_itself() -> None:
    whole, part = batch(10), batch(10).slice(4, 3)
    expected = [f[3] for f in parse_frames(bytes(encoder().block(whole, 0, 1).data))][4:7]
    assert [f[3] for f in parse_frames(bytes(encoder().block(part, 0, 1).data))] == expected


def test_waits() -> None:
    keys = [("a",), ("b",), ("a",), ("c", "a"), ("a", "b"), (None,), ("c", "c")]
    waits, followers = waits_of(keys)
    assert waits == [0, 0, 1, 1, 2, 0, 1]
    assert followers == {0: [2], 2: [3], 3: [4, 6], 1: [4]}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 5)), max_size=60),
    st.randoms(use_true_random=False),
)
def test_a_group_has_one_message_in_flight(
    groups: list[tuple[int, int | None]], random: Any
) -> None:
    """Whatever order the acks come in, and whatever fails or disconnects on the way."""
    count = len(groups)
    rows = batch(
        count, group_hash=[g for g, _ in groups], old_group_hash=[old for _, old in groups]
    )
    task = Task(rows, encoder(), 1, None)
    flying: set[int] = set()
    done: list[int] = []
    while task.rows.left:
        task.release_due(1e9)
        while task.ready:
            data = bytes(task.wave(random.randint(1, 5), 10**6, 0.0))
            flying |= {number - 1 for _, number, _, _ in parse_frames(data)}
        assert task.rows.flying == len(flying)
        held = [g for row in flying for g in {*groups[row]} - {None}]
        assert len(held) == len(set(held)), "two of a group in flight"
        row = random.choice(sorted(flying))
        fate = random.random()
        if fate < 0.2:
            task.fail([row], SinkError("stream_full", "full"), 0.0, lambda _e, _s: None)
            flying.discard(row)
        elif fate < 0.3:
            task.disconnected()
            flying.clear()
        else:
            task.acked([str(row + 1).encode()] * 2)
            flying.discard(row)
            done.append(row)
    assert sorted(done) == list(range(count))
    assert task.written.delivered == count
    for group in range(6):
        mine = [row for row in done if group in groups[row]]
        assert mine == sorted(mine)


def sent_batches(data: bytes) -> list[list[tuple[int, list[bytes]]]]:
    """Read what goes to the server: for each batch, or message alone, row numbers and headers."""
    found: list[list[tuple[int, list[bytes]]]] = []
    while data:
        line, _, data = data.partition(b"\r\n")
        _, _, *reply, header, total = line.split(b" ")
        head, data = data[: int(header)], data[int(total) + 2 :]
        headers = head.split(b"\r\n")[1:-2]
        row = int(json.loads(headers[-1].partition(b"t-")[2].partition(b"-")[0]))
        batched = any(name.startswith(b"Nats-Batch-Id") for name in headers)
        if batched and b"Nats-Batch-Sequence: 1" not in headers:
            found[-1].append((row, headers))
            assert headers[1] == b"Nats-Batch-Sequence: %d" % len(found[-1])
        else:
            found.append([(row, headers)])
        ends = batched and not (b"Nats-Batch-Commit: 1" in headers or len(found[-1]) == 1)
        assert bool(reply) != ends
        if reply:
            assert reply[0] == INBOX + str(row + 1).encode()
    for sent in found:
        assert len(sent) == 1 or len({headers[0] for _, headers in sent}) == 1
        assert (b"Nats-Batch-Commit: 1" in sent[-1][1]) == (len(sent) > 1)
    return found


@given(
    st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3)), max_size=60),
    st.integers(2, 8),
    st.integers(0, 2**32),
)
def test_a_group_has_one_atomic_batch_in_flight(
    groups: list[tuple[int, int | None]], size: int, seed: int
) -> None:
    """What a stream takes is in order, whatever it refuses and whatever is lost on the way."""
    random = Random(seed)
    count = len(groups)
    rows = batch(
        count, group_hash=[g for g, _ in groups], old_group_hash=[old for _, old in groups]
    )
    task = Task(rows, encoder(), 1, None, None, size)
    flying: list[list[int]] = []
    stored: list[int] = []
    while task.rows.left:
        task.release_due(1e9)
        while task.ready:
            task.chains.atomic = random.random() < 0.8
            data = bytes(task.wave(random.randint(1, 12), 10**6, 0.0))
            flying += [[row for row, _ in sent] for sent in sent_batches(data)]
        assert task.rows.flying == sum(map(len, flying))
        assert all(len(sent) <= size for sent in flying)
        held = [{g for row in sent for g in groups[row] if g is not None} for sent in flying]
        assert sum(map(len, held)) == len(set().union(*held)), "two of a group in flight"
        at = random.randrange(len(flying))
        rows_ = flying[at]
        last, fate = rows_[-1], random.random()
        if fate < 0.2:  # all is lost, but perhaps the stream has taken it
            stored += [row for sent in flying if random.random() < 0.5 for row in sent]
            task.disconnected()
            flying.clear()
            continue
        del flying[at]
        if len(rows_) == 1:
            if fate < 0.4:
                task.fail([last], SinkError("stream_full", "full"), 0.0, lambda _e, _s: None)
            else:
                stored.append(last)
                task.acked([str(last + 1).encode()])
        elif fate < 0.4:
            task.dissolve(random.choice(rows_))
        elif fate < 0.5:
            task.fail(rows_, SinkError("permission_denied", "no"), 0.0, lambda _e, _s: None)
        elif fate < 0.6:
            assert not task.committed(last, len(rows_) - 1)
            task.acked([str(last + 1).encode()])  # of a server that knows no batches
        else:
            stored += rows_
            assert task.committed(last, len(rows_))
    assert task.written.delivered == count
    assert set(stored) == set(range(count))
    first = list(dict.fromkeys(stored))
    for group in range(4):
        mine = [row for row in first if group in groups[row]]
        assert mine == sorted(mine)


class LinkedStream:
    """What a stream does with messages that name the one before them; it has some already."""

    def __init__(self, there: Sequence[bytes]) -> None:
        self.there = list(there)
        self.stored: list[bytes] = []
        self.last = there[-1] if there else b""

    def take(self, key: bytes, expected: bytes | None) -> str:
        """Return whether a message is `new`, a `copy`, or out of `line`; store what is new."""
        if key in self.stored or key in self.there:
            return "copy"
        if expected is not None and expected != self.last:
            return "line"
        self.stored.append(key)
        self.last = key
        return "new"


def linked(data: bytes) -> list[tuple[bytes, bytes | None]]:
    """Return id, and the id that must stand before it, of what goes to the server."""
    found = []
    while data:
        line, _, data = data.partition(b"\r\n")
        header, total = map(int, line.split(b" ")[3:])
        head, data = data[:header], data[total + 2 :]
        lines = (line.split(b": ") for line in head.split(b"\r\n")[1:-2])
        values: dict[bytes, bytes] = dict(lines)
        found.append((values[b"Nats-Msg-Id"], values.get(b"Nats-Expected-Last-Msg-Id")))
    return found


@given(st.integers(1, 40), st.integers(2, 9), st.integers(0, 2**32))
def test_linked_messages_are_stored_in_order(count: int, size: int, seed: int) -> None:
    """Whatever the stream has, in any order, refuses, loses, gets from others or late from us."""
    random = Random(seed)
    task = Task(batch(count, group_hash=[1] * count), encoder(), 1, None, None, size)
    keys = [f"t-{n}-0".encode() for n in range(count)]
    stream = LinkedStream(random.sample(keys, random.randint(0, count)))
    never = {random.choice(keys)} - set(stream.there)
    queue: list[tuple[bytes, bytes | None]] = []
    late: list[tuple[bytes, bytes | None]] = []
    for _ in range(100_000):
        if not task.rows.left:
            break
        task.release_due(1e9)
        while task.ready and (room := random.randint(1, 2 * size)) > 0:
            task.chains.linking = random.random() < 0.9
            queue += linked(bytes(task.wave(room, 10**6, 0.0)))
        assert task.rows.flying == len(queue)
        fate = random.random()
        if fate < 0.05:
            stream.last = random.choice([b"", b"another's"])
        elif fate < 0.08:  # the connection is lost; some of what it had comes later or never
            late = late + queue if random.random() < 0.7 else []
            queue = []
            task.disconnected()
        elif fate < 0.2 and late:
            stream.take(*late.pop(0))
        elif queue:
            key, expected = queue.pop(0)
            row = int(key.split(b"-")[1])
            if fate < 0.25:
                task.fail([row], SinkError("stream_full", "full"), 0.0, lambda _e, _s: None)
            elif key in never and (expected is None or expected == stream.last):
                late = [message for message in late if message[0] != key]
                if task.is_early(row):
                    task.take_back(row)
                else:
                    task.bury(row, "message_too_large", "refused for ever")
            elif key not in never and (taken := stream.take(key, expected)) != "line":
                number = str(row + 1).encode()
                ack = b'{"stream":"S","seq":9%s}' % (b',"duplicate":true' * (taken == "copy"))
                task.acked([number], {number: ack} if taken == "copy" else {})
                task.note_newest(number, ack)
            elif task.flies(row + 1) is not None:
                task.take_back(row)
        elif task.doubts:
            task.believe(random.choice(task.doubts.all())[0])
    assert not task.rows.left
    expected_keys = [key for key in keys if key not in never]
    assert [key for key in stream.stored if key not in never] == [
        key for key in expected_keys if key not in stream.there
    ]
    assert task.written.delivered == len(expected_keys)


@pytest.mark.parametrize(
    ("version", "cluster", "links"),
    [("2.15.1", None, True), ("2.15.1", "east", False), ("2.14.0", "east", False),
     ("2.12.8", "east", True), ("", "east", True)],
)  # fmt: skip
def test_a_cluster_that_links_freeze_gets_none(
    version: str, cluster: str | None, links: bool
) -> None:
    chaining = Chaining(may_link=True)
    chaining.connected({"version": version} | ({"cluster": cluster} if cluster else {}))
    assert chaining.links(0.0) == links


def test_two_messages_of_one_id_end_a_chain() -> None:
    """What is behind the second would follow the first, whatever became of those in between."""
    rows = batch(9, group_hash=[1] * 9)
    keys = ["a", "b", "c", "b", "d", "e", "b", "f", "g"]
    at = rows.schema.get_field_index("idempotency_key")
    rows = rows.set_column(at, rows.schema.field(at), pa.array(keys))
    task = Task(rows, encoder(), 1, None, None, 9)
    task.chains.linking = True
    task.chains.note_stream("S")
    sent: list[list[str]] = []
    while task.ready:
        chain = [key.decode() for key, _ in linked(bytes(task.wave(9, 10**6, 0.0)))]
        sent.append(chain)
        first = sum(map(len, sent)) - len(chain) + 1
        task.acked([str(first + n).encode() for n in range(len(chain))])
    assert sent == [["a", "b", "c", "b"], ["d", "e", "b"], ["f", "g"]]


def linking(count: int) -> Task:
    """Return a task whose rows, all of one group, are in flight, linked."""
    task = Task(batch(count, group_hash=[1] * count), encoder(), 1, None, None, count)
    task.chains.linking = True
    task.chains.note_stream("S")
    assert len(linked(bytes(task.wave(count, 10**6, 0.0)))) == count
    return task


def test_an_ack_out_of_turn_releases_no_row() -> None:
    task = linking(3)
    task.acked([b"2"])  # the stream had it before
    assert (task.written.delivered, task.rows.flying, task.ready) == (0, 2, False)
    task.take_back(2)
    assert not task.ready
    task.acked([b"1"])
    assert [key for key, _ in linked(bytes(task.wave(9, 10**6, 0.0)))] == [b"t-1-0", b"t-2-0"]
    task.acked([b"2", b"3"])
    assert (task.rows.left, task.rows.flying) == (0, 0)


def test_of_a_group_that_fails_the_first_backs_off_and_the_others_wait() -> None:
    task = linking(3)
    reported: list[str] = []
    error = SinkError("permission_denied", "no")
    task.fail([0, 1, 2], error, 0.0, lambda e, _s: reported.append(e.code))
    assert (reported, task.rows.flying, task.ready) == (["permission_denied"], 0, False)
    assert [bucket.rows for bucket in task.retries.buckets.values()] == [[0]]
    task.release_due(1e9)
    assert [key for key, _ in linked(bytes(task.wave(9, 10**6, 0.0)))] == [b"t-0-0"]
    task.acked([b"1"])
    assert len(linked(bytes(task.wave(9, 10**6, 0.0)))) == 2


def test_many_blocks_and_late_rows() -> None:
    count = BLOCK_ROWS * 2 + 10
    task = Task(batch(count), encoder(), 1, None)
    sent = 0
    while task.ready:
        sent += len(parse_frames(bytes(task.wave(10_000, 10**6, now=0.0))))
    assert sent == count == task.rows.flying
    task.acked(str(n).encode() for n in range(1, count))  # all but the last
    assert task.late(now=4.0, timeout=5, last_ack=0.0) == []
    assert task.late(now=6.0, timeout=5, last_ack=2.0) == []  # acks still come: patience
    assert task.late(now=8.0, timeout=5, last_ack=2.0) == [count - 1]


def test_one_message_asks_whether_a_subject_is_permitted_by_now() -> None:
    count = 10
    tables = ["secrets", "orders"] * (count // 2)
    task = Task(batch(count, table_name=tables), encoder(), 1, None)
    task.wave(count, 10**6, now=0.0)
    denied = task.flying_to({"shop.public.secrets.insert"})
    assert denied == [0, 2, 4, 6, 8]
    task.fail(denied, SinkError("permission_denied", "no"), 0.0, lambda _e, _s: None)
    for _ in range(2):  # denied again
        task.release_due(1e9)
        assert len(parse_frames(bytes(task.wave(count, 10**6, now=1.0)))) == 1
        task.fail([0], SinkError("permission_denied", "no"), 0.0, lambda _e, _s: None)
    task.release_due(1e9)
    task.wave(count, 10**6, now=1.0)
    task.acked([b"1"])
    rest = parse_frames(bytes(task.wave(count, 10**6, now=1.0)))
    assert [number for _, number, _, _ in rest] == [3, 5, 7, 9]


def test_group_by_columns() -> None:
    rows = batch(
        3,
        record=['{"id":1,"c":"x"}', '{"id":2,"c":"y"}', '{"id":3}'],
        changes=[None, '{"c":"x"}', None],
    )
    first, second, third = group_keys(rows, ["c"])
    assert first[0] == ("public", "orders", b'["x"]')
    assert second[:2] == (("public", "orders", b'["y"]'), ("public", "orders", b'["x"]'))
    assert third == (2, None)  # the column is not in the WAL: the source's group holds


@pytest.mark.parametrize("hard", [r'"\ud800"', "1e999", "[" * 5000 + "]" * 5000])
def test_json_that_parsers_refuse_stops_nothing(hard: str) -> None:
    """Postgres' json takes all of these, beside a group's columns and those of the subject."""
    rows = batch(
        2,
        record=[f'{{"j":{hard},"c":"x","id":1}}', '{"c":"x","id":2}'],
        changes=[f'{{"j":{hard},"c":"w"}}', None],
        metadata=[f'{{"j":{hard},"database":"db"}}'] * 2,
    )
    first, second = group_keys(rows, ["c"])
    assert [key[2] for key in (first[0], first[1], second[0])] == [b'["x"]', b'["w"]', b'["x"]']
    made = encoder(subject="{database}.{record.c}.{record.id}").block(rows, 0, 1)
    assert [bytes(made.frame(n)).split(b" ")[1] for n in range(2)] == [b"db.x.1", b"db.x.2"]
    named = encoder(subject="a.{record.j}").block(rows, 0, 1)
    if not named.refused:
        assert bytes(named.frame(0)).split(b" ")[1] == b"a." + hard.strip('"').encode()


def test_backoff_grows_to_its_limit() -> None:
    assert 0.07 < backoff(1) <= 0.1
    assert 0.15 <= backoff(2) <= 0.2
    assert 7 < backoff(100) <= BACKOFF_MAX


@pytest.mark.parametrize(
    ("err_code", "text", "code", "transient"),
    [
        (10054, "message size exceeds maximum allowed", "message_too_large", False),
        (10060, "expected stream does not match", "wrong_stream", True),
        (10077, "maximum bytes exceeded", "stream_full", True),
        (10047, "insufficient storage resources available", "stream_full", True),
        (10039, "JetStream not enabled for account", "jetstream_not_enabled", True),
        (10167, "too many requests", "too_many_requests", True),
        (10109, "invalid operation on sealed stream", "stream_refused", True),
    ],
)
def test_refusals(err_code: int, text: str, code: str, transient: bool) -> None:
    body = {"error": {"err_code": err_code, "description": text}, "stream": "S"}
    error = refused_by_stream(body, NatsSinkConfig(), "a.b")
    assert (error.code, error.transient) == (code, transient)
    assert text in error.message
    assert error.remedy


@pytest.fixture
def silent_server() -> Iterator[int]:
    """A port that takes connections, sends an INFO without headers, and nothing more."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            taken.append(connection)
            connection.sendall(b'INFO {"headers":false}\r\n')

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    await_end(thread)
    for connection in taken:
        connection.close()


def test_a_server_without_headers(silent_server: int) -> None:
    sink = NatsSink(NatsSinkConfig(url=f"nats://127.0.0.1:{silent_server}"), name="n", source="s")
    with pytest.raises(SinkError) as caught:
        sink.write(batch(1))
    assert caught.value.code == "headers_unsupported"


def test_an_empty_batch_needs_no_server() -> None:
    sink = NatsSink(NatsSinkConfig(url="nats://127.0.0.1:1"), name="n", source="s")
    assert sink.write(batch(0)).delivered == 0


def test_config_pickles_and_hides_secrets() -> None:
    config = NatsSinkConfig(
        url="nats://me:hush%40@a:1, tok3n@[::1]:2,tls://c", user="u", password="hush2"
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert "hush" not in repr(config)
    assert "tok3n" not in repr(config)
    assert [str(s) for s in config.servers] == ["nats://a:1", "nats://[::1]:2", "tls://c:4222"]
    first, second, _ = config.servers
    assert (first.user, first.password, second.token) == ("me", "hush@", "tok3n")
    assert redact(config.url) == "nats://a:1, [::1]:2,tls://c"


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"url": ""}, "empty"),
        ({"url": "http://me:hush@h"}, "unknown scheme 'http'"),
        ({"url": "nats://me:hu/sh@h"}, "not a list of servers"),
        ({"url": "nats://me:hush@h:99999"}, "not a list of servers"),
        ({"subject": "a.{x}"}, "unknown variable"),
        ({"stream": "a.b"}, "cannot name a stream"),
        ({"group_by": []}, "one or more columns"),
        ({"user": "u"}, "password is missing"),
        ({"token": "hush", "nkey_seed": "hush"}, "use one way to log in"),
        ({"tls_cert": "c.pem"}, "tls_key is missing"),
        ({"tls": False, "tls_ca_cert": "c.pem"}, "tls is false"),
        ({"nope": 1}, "Extra inputs"),
        ({"ack_timeout": 0}, "greater than 0"),
    ],
)
def test_config_errors(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError) as caught:
        NatsSinkConfig(**settings)
    assert what in str(caught.value)
    assert "hush" not in str(caught.value)
    assert "hu/sh" not in str(caught.value)
