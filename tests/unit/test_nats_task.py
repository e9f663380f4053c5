"""In which order the rows of a batch go to a NATS server, whatever fails on the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.nats_frames_help import INBOX, batch, encoder, parse_frames

from penstock.core.errors import SinkError
from penstock.sinks.nats.chains import Chaining
from penstock.sinks.nats.frames import BLOCK_ROWS
from penstock.sinks.nats.order import waits_of
from penstock.sinks.nats.task import Task


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
