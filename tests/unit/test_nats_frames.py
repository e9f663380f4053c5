"""What goes to a NATS server: the frames of a batch."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tests.nats_frames_help import INBOX, batch, encoder, parse_frames

from penstock.config.nats import NatsSinkConfig
from penstock.core.message import SUBJECT_FIELD
from penstock.sinks.nats.frames import Encoder
from penstock.sinks.nats.order import group_keys
from penstock.sinks.nats.task import Task


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
