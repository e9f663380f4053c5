"""What messages are made of the rows of the records table, and what they are in streams and in NATS."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from tests.record_rows import HASH, ID, SYNC, batch, captured

from penstock.config.consumers import Filters
from penstock.config.nats import NatsSinkConfig
from penstock.config.sinks import StreamSinkSettings
from penstock.config.syncs import DEFAULT_EVENTS_SUBJECT, DEFAULT_RECORDS_SUBJECT
from penstock.core.blocks import Block
from penstock.core.record_forms import SYNCS, form_of, formed, passing_rows
from penstock.core.subject import SubjectTemplate
from penstock.sinks.nats.few_frames import FEW
from penstock.sinks.nats.frames import Encoder
from penstock.sinks.selected import selected
from penstock.spark.routes import Route
from penstock.spark.steps import Steps
from penstock.streams import copy
from penstock.streams.read import _batch

RECORD: dict[str, Any] = {
    "id": ID,
    "sync_id": SYNC,
    "resource_id": SYNC,
    "provider": "servicenow",
    "collection_id": "servicenow:incident",
    "upstream_id": "inc_2891",
    "upstream_created_at": None,
    "upstream_updated_at": "2026-01-31T12:00:00Z",
    "deleted": False,
    "inserted_at": "2026-01-31T12:00:01Z",
    "updated_at": "2026-01-31T12:00:01Z",
    "data": {"state": "open"},
}
EVENT = {
    "event_id": "0123456789abcdef-7-0",
    "event": "inserted",
    "event_type": "inserted",
    "event_time": "2026-01-31T12:00:02.000000Z",
}


def made(kind: str, *rows: dict[str, Any]) -> pa.RecordBatch:
    """Return the messages of rows."""
    whole = batch(*rows)
    return formed(whole.filter(passing_rows(whole, kind)), kind)


def events(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of rows, parsed."""
    return [json.loads(text) for text in made("changes", *rows).column("record").to_pylist()]


def test_a_record_has_all_columns_but_the_hash_and_the_sync_by_both_names() -> None:
    messages = made("rows", captured(), captured(payload_hash=None))
    for text in messages.column("record").to_pylist():
        assert list(json.loads(text).items()) == list(RECORD.items())
    assert messages.column("table_schema").to_pylist() == [SYNC] * 2
    assert messages.column("table_name").to_pylist() == ["servicenow:incident"] * 2


def test_an_event_is_a_record_with_its_type_id_time_and_changes() -> None:
    assert events(captured()) == [EVENT | RECORD | {"changes": None}]


def test_changes_are_the_prior_values_of_members_and_of_other_columns() -> None:
    old = {
        "upstream_updated_at": "2026-01-30T00:00:00Z",
        "updated_at": "2026-01-30T00:00:00Z",
        "data": {"state": "new", "same": [1.10], "gone": {"a": 1}},
        "payload_hash": HASH,
    }
    (event,) = events(captured("update", old, data={"state": "open", "same": [1.10], "more": 1}))
    assert event["event"] == event["event_type"] == "updated"
    assert event["changes"] == {
        "upstream_updated_at": "2026-01-30T00:00:00Z",
        "updated_at": "2026-01-30T00:00:00Z",
        "data": {"state": "new", "gone": {"a": 1}, "more": None},
    }


def test_the_type_follows_from_whether_it_is_and_was_deleted() -> None:
    was = {"upstream_updated_at": "2026", "deleted": True}
    spoof = {"data": {"deleted": True, "state": "open"}}
    rows = [
        captured("insert", idx=0),
        captured("update", {"deleted": False}, idx=1, deleted=True),
        captured("update", was, idx=2),
        captured("update", spoof, idx=3, data={"state": '","deleted":'}),
        # No event: a tombstone of what was never seen, what changes while deleted, a purge.
        captured("insert", idx=4, deleted=True),
        captured("update", {"upstream_updated_at": "2026"}, idx=5, deleted=True),
        captured("delete", idx=6),
        captured("truncate", idx=7) | {"record": "{}"},
    ]
    assert [(e["event_id"][-1], e["event"]) for e in events(*rows)] == [
        ("0", "inserted"),
        ("1", "deleted"),
        ("2", "inserted"),
        ("3", "updated"),
    ]
    assert made("rows", *rows).num_rows == 7


def test_strings_of_an_api_do_not_pass_for_columns() -> None:
    hostile = '","deleted":true,"data":{"x":"\\",é'
    (event,) = events(
        captured("update", {"data": {"a": 1}}, upstream_id=hostile, data={"a": hostile})
    )
    assert event["upstream_id"] == event["data"]["a"] == hostile
    assert event["event"] == "updated"
    assert event["changes"] == {"data": {"a": 1}}


def test_a_row_of_another_table_is_an_error() -> None:
    row = captured() | {"record": '{"id":1}'}
    with pytest.raises(ValueError, match="no row of the records table"):
        formed(batch(row), "rows")


@pytest.mark.parametrize("kind", ["rows", "changes"])
def test_a_replayed_message_is_not_made_again(kind: str) -> None:
    messages = made(kind, captured())
    assert passing_rows(messages, kind).to_pylist() == [True]
    assert formed(messages, kind) == messages


@pytest.mark.parametrize("copies", [1, FEW + 1])
@pytest.mark.parametrize(
    ("kind", "template", "subject", "member"),
    [
        (
            "rows",
            DEFAULT_RECORDS_SUBJECT,
            f"sequin-records.default.{SYNC}.servicenow.servicenow:incident.inc_2891",
            "record",
        ),
        (
            "changes",
            DEFAULT_EVENTS_SUBJECT,
            f"sequin-events.default.{SYNC}.servicenow.servicenow:incident.inc_2891.inserted",
            "event",
        ),
    ],
)
def test_nats_messages_byte_for_byte(
    kind: str, template: str, subject: str, member: str, copies: int
) -> None:
    config = NatsSinkConfig(kind=kind, subject=template)
    encoder = Encoder(config, "out", SYNCS, b"_INBOX.")
    messages = made(kind, *[captured()] * copies)
    block = encoder.block(messages, 0, 0)
    frame = bytes(block.frame(copies - 1))
    assert frame.split(b" ")[1].decode() == subject
    body = frame.split(b"\r\n\r\n")[1].removesuffix(b"\r\n")
    assert list(json.loads(body)) == [member, "metadata"]
    assert body.startswith(b'{"%b":%b,' % (member.encode(), _text(messages)))
    size = int(frame.split(b"\r\n")[0].split(b" ")[-1])
    assert len(frame) == len(frame.split(b"\r\n")[0]) + 2 + size + 2


def _text(messages: pa.RecordBatch) -> bytes:
    text: str = messages.column("record")[0].as_py()
    return text.encode()


def test_ids_are_escaped_in_subjects_as_all_values_are() -> None:
    messages = made("rows", captured(upstream_id="a.b c>*%"))
    found = SubjectTemplate.parse("x.{upstream_id}.{provider}").render(
        messages, source=SYNCS, database=None
    )
    assert found.to_pylist() == [b"x.a%2Eb%20c%3E%2A%25.servicenow"]


@pytest.mark.parametrize(("kind", "member"), [("rows", "record"), ("changes", "event")])
def test_a_stream_keeps_what_nats_gets_and_gives_it_back(kind: str, member: str) -> None:
    messages = made(kind, captured())
    (text,) = copy.texts(messages, form_of(SYNCS, kind))
    assert list(json.loads(text)) == [member, "metadata"]
    row = (7, 1, 1, None, SYNC, "servicenow:incident", "insert", text)
    assert _batch([row], kind).column("record") == messages.column("record")
    placed = copy.placed(messages, kind, 0)
    assert text.encode() in b"".join(bytes(p) for p in copy.rows(placed, form_of(SYNCS, kind)))


@pytest.mark.parametrize(
    ("filters", "taken"),
    [
        ({"collection_id": "servicenow:incident", "resource_id": "*"}, True),
        ({"collection_id": ["a:b", "servicenow:incident"]}, True),
        ({"collection_id": "incident"}, False),
        ({"collection_id": "servicenow:in.cident"}, False),
        ({"sync_id": SYNC}, True),
        ({"sync_id": [ID]}, False),
        ({"resource_id": [SYNC, ID]}, True),
        ({"provider": "servicenow"}, True),
        ({"provider": ["stripe", "hubspot"]}, False),
    ],
)
def test_filters_of_consumers(filters: dict[str, Any], taken: bool) -> None:
    messages = made("rows", captured())
    assert selected(Filters.model_validate(filters), messages).num_rows == taken


@pytest.mark.parametrize(("kind", "count"), [("rows", 2), ("changes", 1)])
def test_the_steps_of_a_sink_make_them(kind: str, count: int) -> None:
    given = {"type": "stream", "source": SYNCS, "kind": kind}
    route = Route("out", StreamSinkSettings.model_validate(given), 1)
    block = Block(None, batch(captured(), captured(idx=1, deleted=True)))
    messages = Steps(route, None, SYNCS)(block).messages
    assert messages.num_rows == count
    assert messages.column("table_schema").to_pylist() == [SYNC] * count
    assert Steps(route, None, "shop")(block).messages == block.messages
