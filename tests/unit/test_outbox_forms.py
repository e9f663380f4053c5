"""What a message of an outbox looks like: its headers, its body, its subject, its group."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.nats import Format, OutboxForm
from penstock.core.message import WIRE_SCHEMA
from penstock.core.subject import SubjectTemplate
from penstock.outbox.settings import OutboxSinkSettings, read
from penstock.sinks.nats.few_frames import MAX_HEADER
from penstock.sinks.nats.frames import Encoder
from penstock.sinks.nats.outbox_formats import OutboxFormatter, groups_of

from ..forms_help import FORMATS, check, headers_given, keys, payloads

INBOX = b"_INBOX.x."
TAG = "0a1b2c3d"
OWNER = ("Penstock-Pipeline", "notify")
CREATED = "2026-11-21T10:00:00.123456Z"


def rows(*records: dict[str, Any] | str) -> pa.RecordBatch:
    """Return the outbox's rows: a record has what is given, and the rest as usual."""
    texts = [
        record
        if isinstance(record, str)
        else json.dumps(
            {"id": at, "dedup_key": None, "payload": {}, "headers": {}, "created_at": CREATED}
            | record
        )
        for at, record in enumerate(records, 1)
    ]
    count = len(texts)
    columns = [
        texts, [None] * count, ["insert"] * count, ["tide"] * count, ["outbox_orders"] * count,
        [f'{{"database":"shop","idempotency_key":"t-{n}-0"}}' for n in range(count)],
        [f"t-{n}-0" for n in range(count)], list(range(count)),
        [0] * count, [1] * count, [None] * count, [None] * count, [0] * count,
    ]  # fmt: skip
    arrays = [pa.array(c, f.type) for c, f in zip(columns, WIRE_SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=WIRE_SCHEMA)


def settings(**keys: Any) -> OutboxSinkSettings:
    config = {"sink_type": "nats", "url": "nats://localhost", "subject": "o.{op}", **keys}
    return read(config, {}).sink(source="group", outbox="orders", tag=TAG)


def block_of(batch: pa.RecordBatch, **keys: Any) -> Any:
    return Encoder(settings(**keys), "notify", "group", INBOX).block(batch, 0, 1)


def made(batch: pa.RecordBatch, of: OutboxSinkSettings) -> pa.Array:
    return OutboxFormatter(of.form)(batch).key


def messages(batch: pa.RecordBatch, **keys: Any) -> list[tuple[str, list[tuple[str, str]], bytes]]:
    """Return subject, headers and body of each message, read by the lengths of its frame."""
    block = block_of(batch, **keys)
    assert block.refused == {}
    data, found = bytes(block.data), []
    for payload in block.payload:
        line, _, data = data.partition(b"\r\n")
        _, subject, _, header, total = line.split(b" ")
        assert payload == int(total)
        head, body = data[: int(header)], data[int(header) : int(total)]
        assert head.endswith(b"\r\n\r\n")
        version, *lines = head[:-4].split(b"\r\n")
        assert version == b"NATS/1.0"
        pairs = [line.decode().split(": ", 1) for line in lines]
        found.append((subject.decode(), [(name, value) for name, value in pairs], body))
        assert data[int(total) :][:2] == b"\r\n"
        data = data[int(total) + 2 :]
    assert data == b""
    return found


def test_a_plain_message_is_the_payload_with_id_and_headers() -> None:
    record = '{"id": 7, "dedup_key": "k-1", "payload": {"a": 1.10, "b" : [1]}, "headers": %s}'
    headers = '{"Trace": "é: x", "n": 5, "ok": true, "none": null, "many": ["a", 2]}'
    found = messages(rows(record % headers, {}, {"payload": None, "dedup_key": ""}))
    assert found == [
        (
            "o.insert",
            [
                ("Nats-Msg-Id", f"orders/{TAG}:k-1"),
                OWNER,
                ("Trace", "é: x"),
                ("n", "5"),
                ("ok", "true"),
                ("many", "a"),
                ("many", "2"),
            ],
            b'{"a": 1.10, "b" : [1]}',
        ),
        ("o.insert", [("Nats-Msg-Id", f"orders/{TAG}#2"), OWNER], b"{}"),
        ("o.insert", [("Nats-Msg-Id", f"orders/{TAG}#3"), OWNER], b"null"),
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_who_published_a_forwarded_message_is_left_out(form: Format) -> None:
    """The pipeline would take its own message for another's by it."""
    ((_, headers, _),) = messages(
        rows({"headers": {"penstock-pipeline": "other", "h": "x"}}), format=form
    )
    assert [pair for pair in headers if pair[0].lower() == OWNER[0].lower()] == [OWNER]
    assert ("h", "x") in headers


def test_a_stream_is_demanded() -> None:
    ((_, headers, _),) = messages(rows({}), stream="ORDERS")
    assert headers == [
        ("Nats-Expected-Stream", "ORDERS"), ("Nats-Msg-Id", f"orders/{TAG}#1"), OWNER,
    ]  # fmt: skip


def test_the_ids_of_outboxes_differ_unless_they_share_keys() -> None:
    batch = rows({"dedup_key": "k"}, {})
    other = settings().model_copy(update={"outbox": OutboxForm("orders", tag="ffffffff")})
    ids = [made(batch, of).to_pylist() for of in (settings(), other)]
    assert not set(ids[0]) & set(ids[1])
    shared = made(batch, settings(key_scope="stream")).to_pylist()
    assert shared == [b"k", f"orders/{TAG}#2".encode()]


def test_an_envelope_is_the_message_of_a_change() -> None:
    ((_, headers, body),) = messages(
        rows({"payload": {"a": 1}, "headers": {"h": "x"}}), format="envelope"
    )
    assert headers == [("Nats-Msg-Id", f"orders/{TAG}#1"), OWNER, ("h", "x")]
    message = json.loads(body)
    assert message["record"]["payload"] == {"a": 1}
    assert (message["action"], message["changes"]) == ("insert", None)
    assert message["metadata"] == {
        "database": "shop", "idempotency_key": f"orders/{TAG}#1",
        "consumer": {"id": "notify", "name": "notify"},
    }  # fmt: skip


def test_a_cloud_event_has_its_attributes() -> None:
    first, second = messages(
        rows(
            {"payload": {"type": "order.shipped"}, "dedup_key": 'a"b'},
            {
                "payload": [1],
                "headers": {"ce-type": "t", "CE-Source": "/s", "ce-subject": "5",
                            "content-type": "x", "Trace": "y"},
            },
        ),
        format="cloudevents",
    )  # fmt: skip
    assert first[1] == [
        ("Nats-Msg-Id", f'orders/{TAG}:a"b'), OWNER,
        ("Content-Type", "application/cloudevents+json"),
    ]  # fmt: skip
    assert json.loads(first[2]) == {
        "specversion": "1.0", "id": f'orders/{TAG}:a"b', "source": "/outbox/orders",
        "type": "order.shipped",
        "time": CREATED, "datacontenttype": "application/json", "data": {"type": "order.shipped"},
    }  # fmt: skip
    assert second[1] == [
        ("Nats-Msg-Id", f"orders/{TAG}#2"),
        OWNER,
        ("Trace", "y"),
        ("Content-Type", "application/cloudevents+json"),
    ]
    event = json.loads(second[2])
    assert (event["type"], event["source"], event["subject"]) == ("t", "/s", "5")
    assert event["data"] == [1]


def test_debezium_routes_by_headers() -> None:
    first, second = messages(
        rows(
            {"payload": {"type": "shipped", "aggregate_id": 5}, "dedup_key": "k"},
            {"headers": {"eventType": "e", "aggregateid": "9", "Id": "mine"}},
        ),
        format="debezium",
    )
    assert first[1] == [
        ("Nats-Msg-Id", f"orders/{TAG}:k"), OWNER, ("id", f"orders/{TAG}:k"),
        ("aggregateType", "orders"), ("op", "c"), ("eventType", "shipped"), ("aggregateId", "5"),
    ]  # fmt: skip
    assert first[2] == b'{"type": "shipped", "aggregate_id": 5}'
    assert second[1] == [
        ("Nats-Msg-Id", f"orders/{TAG}#2"), OWNER, ("eventType", "e"), ("aggregateid", "9"),
        ("Id", "mine"), ("aggregateType", "orders"), ("op", "c"),
    ]  # fmt: skip


def test_the_publishers_operation_is_in_every_form() -> None:
    given = [{}, *({"headers": {"op": op, "h": "x"}} for op in ("insert", "update", "delete"))]
    batch = rows(*given)
    ops = ["insert", "insert", "update", "delete"]
    for form in FORMATS:
        found = messages(batch, format=form)
        assert [subject for subject, _, _ in found] == [f"o.{op}" for op in ops]
        headers = [[v for n, v in sent if n == "op"] for _, sent, _ in found]
        if form == "debezium":
            assert headers == [["c"], ["c"], ["u"], ["d"]]
        else:
            assert headers == [[], ["insert"], ["update"], ["delete"]]
        if form == "envelope":
            assert [json.loads(body)["action"] for _, _, body in found] == ops
    plain = messages(batch, subject="a.{op}.{header.h}")
    assert [subject for subject, _, _ in plain] == [
        "a.insert.%null", "a.insert.x", "a.update.x", "a.delete.x",
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["plain", "envelope", "cloudevents", "debezium"])
@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"headers": {"a b": "x"}}, "invalid_header"),
        ({"headers": {"a:b": "x"}}, "invalid_header"),
        ({"headers": {"": "x"}}, "invalid_header"),
        ({"headers": {"é": "x"}}, "invalid_header"),
        ({"headers": {"a\r\nb": "x"}}, "invalid_header"),
        ({"headers": {"a": "x\r\nNats-Rollup: all"}}, "invalid_header"),
        ({"headers": {"a": ["x", "\n"]}}, "invalid_header"),
        ({"headers": ["a"]}, "invalid_header"),
        ({"headers": "a"}, "invalid_header"),
        ({"headers": {"Nats-Msg-Id": "x"}}, "reserved_header"),
        ({"headers": {"nats-rollup": "all"}}, "reserved_header"),
        ({"headers": {"a": "x" * MAX_HEADER}}, "headers_too_large"),
        ({"dedup_key": "x" * MAX_HEADER}, "headers_too_large"),
        ({"dedup_key": "x\r\nNats-Rollup: all"}, "invalid_key"),
        ({"dedup_key": "x\n"}, "invalid_key"),
        ('{"id": 1}', "no_payload"),
    ],
)
def test_what_nats_cannot_carry_is_refused(
    form: Format, record: dict[str, Any] | str, code: str
) -> None:
    block = block_of(rows({}, record, {}), format=form)
    assert {row: why[0] for row, why in block.refused.items()} == {1: code}
    assert re.findall(rb"\r\nnats-rollup", bytes(block.data), re.I) == []


def test_a_row_that_parsers_refuse_spoils_no_other() -> None:
    deep = "[" * 3000 + "]" * 3000
    odd = f'{{"id": 1, "payload": {deep}, "headers": {{"a": "b"}}, "dedup_key": null}}'
    found = messages(rows(odd, {"dedup_key": "k", "headers": {"c": "d"}}))
    assert found[0][1:] == ([("Nats-Msg-Id", f"orders/{TAG}#1"), OWNER, ("a", "b")], deep.encode())
    assert found[1][1:] == ([("Nats-Msg-Id", f"orders/{TAG}:k"), OWNER, ("c", "d")], b"{}")


def test_subjects_have_the_outboxs_variables() -> None:
    batch = rows(
        {"payload": {"kind": "a.b", "n": 5, "x.y": "z"}, "headers": {"region": "eu west"}},
        {"payload": {"kind": ""}},
        {"payload": 7},
    )
    subject = "{stream_table}.{op}.{outbox_id}.{payload.kind}.{payload.n}.{header.region}"
    assert [s for s, _, _ in messages(batch, subject=subject)] == [
        "orders.insert.1.a%2Eb.5.eu%20west",
        "orders.insert.2.%empty.%null.%null",
        "orders.insert.3.%null.%null.%null",
    ]
    assert messages(batch, subject="a.{payload.x.y}")[0][0] == "a.z"
    kept = [s for s, _, _ in messages(batch, subject="a.{payload.kind|dots}.{header.region|dots}")]
    assert kept == ["a.a.b.eu%20west", "a.%empty.%null", "a.%null.%null"]
    template = SubjectTemplate.parse(subject, outbox="o.x")
    assert template.wildcard() == "o%2Ex.*.*.*.*.*"
    assert SubjectTemplate.parse("{stream_table}", outbox="$a").wildcard() == "%24a"


@given(
    st.lists(
        st.dictionaries(st.text(max_size=4), st.text(max_size=4) | st.none(), max_size=3),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["plain", "envelope", "cloudevents", "debezium"]),
)
def test_any_headers_give_whole_frames_or_a_reason(
    headers: list[dict[str, str | None]], form: Format
) -> None:
    block = block_of(rows(*({"headers": each} for each in headers)), format=form)
    for row, names in enumerate(headers):
        frame = bytes(block.frame(row))
        line, _, rest = frame.partition(b"\r\n")
        header, total = map(int, line.split(b" ")[3:])
        assert len(rest) == total + 2
        lines = rest[: header - 4].split(b"\r\n")
        if row not in block.refused:
            sent = [tuple(line.decode().split(": ", 1)) for line in lines[3:]]
            expected_headers = [(n, v) for n, v in names.items() if v is not None]
            if form in ("plain", "envelope"):
                assert sent == expected_headers


def test_groups() -> None:
    batch = rows(
        {"payload": {"c": "1"}, "headers": {"t": "x"}}, {"payload": {"c": 1}}, {"payload": {}}
    )
    assert groups_of(batch, OutboxForm("o")) == [(0,), (0,), (0,)]
    assert groups_of(batch, OutboxForm("o", group_by="none")) is None
    assert groups_of(batch, OutboxForm("o", group_by="payload.c")) == [("1",), ("1",), ("",)]
    assert groups_of(batch, OutboxForm("o", group_by="header.t")) == [("x",), ("",), ("",)]
    assert groups_of(batch.slice(0, 1), OutboxForm("o")) is None


# What is published, and what a subscriber reads of it


@given(
    st.lists(st.tuples(payloads, headers_given, keys), min_size=1, max_size=4),
    st.sampled_from(FORMATS),
)
def test_what_is_read_is_what_was_published(
    published: list[tuple[str, dict[str, Any], str | None]], form: Format
) -> None:
    records = [
        f'{{"id":{at},"dedup_key":{json.dumps(key)},"payload":{payload},"headers":{json.dumps(its_headers)},'
        f'"created_at":"{CREATED}"}}'
        for at, (payload, its_headers, key) in enumerate(published, 1)
    ]
    found = messages(rows(*records), format=form)
    for at, (payload, its_headers, key) in enumerate(published):
        _, sent, body = found[at]
        its_id = f"orders/{TAG}:{key}" if key else f"orders/{TAG}#{at + 1}"
        check(form, payload, its_headers, its_id, sent, body, CREATED, OWNER[1])
