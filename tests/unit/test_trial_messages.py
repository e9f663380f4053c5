"""Messages that a user wrote for `penstock try`: what may be left out, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.config.sinks import StreamSinkSettings
from penstock.config.sources import PostgresSource
from penstock.core.message import WIRE_SCHEMA
from penstock.streams.copy import rows
from penstock.trial.messages import MessageError, read
from penstock.trial.trial import _stored

ONE = ("public.orders",)


def batch(text: str, tables: tuple[str, ...] = ONE) -> Any:
    url = "postgresql://user:hunter6@localhost/shop"
    source = PostgresSource.model_validate({"type": "postgres", "url": url, "tables": tables})
    sink = StreamSinkSettings.model_validate({"type": "stream", "source": "shop"})
    return read(text.encode(), source, sink)


def test_the_least_message() -> None:
    found = batch('{"record": {"id": 1.10}}')
    assert found.schema == WIRE_SCHEMA
    (row,) = found.to_pylist()
    metadata = json.loads(row["metadata"])
    assert row["record"] == '{"id": 1.10}'
    assert (row["changes"], row["action"], row["part"]) == (None, "insert", 0)
    assert (row["table_schema"], row["table_name"]) == ("public", "orders")
    assert metadata["database"] == "shop"
    assert metadata["idempotency_key"] == row["idempotency_key"] == "try-1-0"


def test_what_is_given_stays() -> None:
    given = {
        "table_schema": "s", "table_name": "t", "commit_lsn": 7, "commit_idx": 3,
        "idempotency_key": "k", "record_pks": [1], "unavailable": ["x"], "mine": True,
        "transaction_id": 9,
    }  # fmt: skip
    message = {
        "record": {"id": 1}, "changes": {"id": 2}, "action": "update",
        "metadata": {**given, "consumer": {"id": "c"}, "route": "r"},
    }  # fmt: skip
    (row,) = batch(json.dumps(message)).to_pylist()
    metadata = json.loads(row["metadata"])
    assert given.items() <= metadata.items()
    assert not {"consumer", "route"} & set(metadata)
    assert (row["commit_lsn"], row["commit_idx"], row["action"]) == (7, 3, "update")
    assert row["changes"] == '{"id": 2}'


@pytest.mark.parametrize(
    "text",
    [
        '[{"record": {"id": 1}}, {"record": {"id": 2}}]',
        '{"record": {"id": 1}}\n\n{"record": {"id": 2}}\n',
    ],
)
def test_several(text: str) -> None:
    found = batch(text)
    assert found.column("record").to_pylist() == ['{"id": 1}', '{"id": 2}']
    assert len(set(found.column("idempotency_key").to_pylist())) == 2


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("", "there is no message"),
        ("[]", "there is no message"),
        ("{", "no JSON, line 1, column 2"),
        ('{"record": {}}\n{', "no JSON, line 2"),
        ("7", "message 1: it is no object"),
        ('[{"record": {}}, 7]', "message 2: it is no object"),
        ('{"id": 1}', "message 1: unknown key 'id'"),
        ('{"action": "insert"}', "message 1: it has no record"),
        ('{"record": 5}', "message 1: it has no record"),
        ('{"record": {}, "changes": 5}', "changes is neither an object nor null"),
        ('{"record": {}, "action": "zap"}', "action is 'zap': expected one of insert, update"),
        ('{"record": {}, "action": ["insert"]}', "action is ['insert']: expected one of"),
        ('{"record": {}, "metadata": 5}', "metadata is no object"),
    ],
)
def test_what_is_refused(text: str, output: str) -> None:
    with pytest.raises(MessageError) as caught:
        batch(text)
    assert output in str(caught.value)


def test_the_table_must_be_known() -> None:
    with pytest.raises(MessageError, match="message 1: it names no table"):
        batch('{"record": {}}', ("public.*",))
    row = batch('{"record": {}, "metadata": {"table_name": "t"}}', ("public.*",)).to_pylist()[0]
    assert (row["table_schema"], row["table_name"]) == ("public", "t")


@pytest.mark.parametrize(
    "value", [r'"\ud800"', "1e999", '"' + r"\udfff" + '"', "-1E+400", "1" * 5000]
)
def test_json_that_only_postgres_takes(value: str) -> None:
    message = '{"record": {"id": 1, "v": %s}, "action": "update", "metadata": {"commit_lsn": 7}}'
    (row,) = batch(message % value).to_pylist()
    assert row["record"] == f'{{"id": 1, "v": {value}}}'
    assert (row["action"], row["commit_lsn"]) == ("update", 7)
    lines = batch(f"{message % value}\n{message % 2}")
    assert lines.num_rows == 2


@pytest.mark.parametrize("value", ["1e999", "1.10", "12345678901234567890123"])
def test_metadata_keep_their_digits(value: str) -> None:
    (row,) = batch(f'{{"record": {{}}, "metadata": {{"record_pks": [{value}]}}}}').to_pylist()
    assert f'"record_pks":[{value}]' in row["metadata"]


@pytest.mark.parametrize(
    "text",
    [
        r'{"record": {}, "metadata": {"x": "\ud800"}}',
        '{"record": {}, "metadata": [1e999]}',
        '{"record": {}, "action": 1e999}',
        '{"record": {"a": NaN}}',
        '{"record": ' + "[" * 100_000,
    ],
)
def test_what_cannot_be_read_is_refused_in_words(text: str) -> None:
    with pytest.raises(MessageError):
        batch(text)


@pytest.mark.parametrize("action", ["insert", "update", "delete", "read"])
def test_a_row_is_shown_as_a_stream_of_rows_has_it(action: str) -> None:
    message = batch(f'{{"record": {{"id": 1}}, "action": "{action}", "metadata": {{"x": 1e999}}}}')
    sink = StreamSinkSettings.model_validate({"type": "stream", "source": "shop", "kind": "rows"})
    (sent,) = _stored(message, sink)
    (stored,) = rows(message, "rows")
    assert sent.body.encode() in bytes(stored)
    assert ('"action":"delete"' in sent.body) == (action == "delete")
    assert sent.to is None
