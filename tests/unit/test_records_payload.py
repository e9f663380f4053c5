"""What of an object's JSON Postgres can hold, its hash, and what of a batch is written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from penstock.syncs.connectors.contract import Record
from penstock.syncs.records.payload import MAX_BYTES, Unfit, check_payload
from penstock.syncs.records.rows import Ids, checked, record_id, rows_of

SYNC = UUID("902261b0-6b22-48a0-8d6b-2fdb16cf8402")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a":"b\\u0000c"}', "NUL"),
        (b'{"a\\u0000":1}', "NUL"),
        (b'{"a":"\\ud800"}', "can't be read"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b"[1]", "can't be read"),
        (b"", "can't be read"),
        (b'{"a":1e131072}', "out of the range"),
        (b'{"a":1e-16384}', "out of the range"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "levels"),
        (b'{"a":"' + b"x" * MAX_BYTES + b'"}', "at most"),
    ],
)
def test_what_postgres_can_not_hold_is_unfit(data: bytes, reason: str) -> None:
    with pytest.raises(Unfit, match=reason):
        check_payload(data)


def test_an_escaped_backslash_is_no_nul() -> None:
    check_payload(b'{"a":"\\\\u0000"}')


def test_an_id_is_a_stable_uuid_of_sync_collection_and_object() -> None:
    made = record_id(SYNC, "stripe:customers", "cus_1")
    assert made.version == 5
    assert made == record_id(SYNC, "stripe:customers", "cus_1")
    others = {
        record_id(SYNC, "stripe:customers", "cus_2"),
        record_id(SYNC, "stripe:invoices", "cus_1"),
        record_id(UUID(int=1), "stripe:customers", "cus_1"),
    }
    assert len(others | {made}) == 4


def test_of_an_object_that_comes_twice_the_newest_counts_else_the_last() -> None:
    later = NOON + timedelta(seconds=1)
    rows, refused = rows_of(
        [
            Record("a", b'{"v":2}', updated_at=later),
            Record("a", b'{"v":1}', updated_at=NOON),
            Record("b", b'{"v":1}'),
            Record("b", b'{"v":2}'),
            Record("c", b'{"v":1}', updated_at=NOON),
            Record("c", b'{"v":2}', updated_at=NOON),
        ],
        Ids(SYNC, "x:y"),
    )
    assert not refused
    assert {row.record.upstream_id: row.record.data for row in rows} == dict.fromkeys(
        "abc", b'{"v":2}'
    )
    assert [row.id for row in rows] == sorted(row.id for row in rows)


def test_what_is_refused_does_not_hold_back_the_others() -> None:
    records = [Record("a\0", b"{}"), Record("", b"{}"), Record("b", b"[]"), Record("c", b"{}")]
    rows, refused = rows_of([*records, Record("d" * 1001, b"{}")], Ids(SYNC, "x:y"))
    fit, unfit = checked(rows)
    assert [row.record.upstream_id for row in fit] == ["c"]
    assert [of.upstream_id[:2] for of in refused + unfit] == ["a?", "", "dd", "b"]
