"""Messages that a user wrote, as batches; what the file leaves out is made up.

A message is `{"record", "changes", "action", "metadata"}` as consumers get it; only `record` has to be
there, and the table's name where the sink takes more than one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import orjson
import pyarrow as pa
from psycopg.conninfo import conninfo_to_dict

from penstock.config.sinks import SinkSettings
from penstock.config.sources import PostgresSource
from penstock.core.json_members import members
from penstock.core.message import ACTIONS, INSERT, WIRE_SCHEMA
from penstock.core.tables import TablePattern

Raw = msgspec.Raw
_FIELDS: Final = ("record", "changes", "action", "metadata")
_object: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_encode: Final = msgspec.json.Encoder().encode
_READ: Final = {"table_schema", "table_name", "commit_lsn", "commit_idx", "idempotency_key"}
_EXPECTED: Final = 'expected {"record": {…}, "changes": …, "action": …, "metadata": {…}}'


class MessageError(ValueError):
    """A file that holds no messages; the text names the part, and what is expected there."""


def read(text: bytes, source: PostgresSource, sink: SinkSettings) -> pa.RecordBatch:
    """Return the messages of a JSON text as a batch of `WIRE_SCHEMA`.

    The text is one message, a list of them, or one a line. Raises `MessageError`.
    """
    table = _only_table(source, sink)
    rows = [_row(number, raw, table, source) for number, raw in enumerate(_messages(text), 1)]
    if not rows:
        raise MessageError(f"there is no message: {_EXPECTED}")
    columns = list(zip(*rows, strict=True))
    fields = zip(columns, WIRE_SCHEMA, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in fields], schema=WIRE_SCHEMA
    )


def _messages(text: bytes) -> Sequence[Raw]:
    """Return the text of each message."""
    stripped = text.strip()
    if not stripped:
        return ()
    try:
        orjson.loads(stripped)
    except orjson.JSONDecodeError as error:
        if _is_object(stripped):
            return [Raw(stripped)]
        lines = [line for line in stripped.splitlines() if line.strip()]
        if len(lines) > 1 and all(_is_object(line) for line in lines):
            return [Raw(line) for line in lines]
        raise MessageError(
            f"no JSON, line {error.lineno}, column {error.colno}: {error.msg}; {_EXPECTED}"
        ) from None
    if stripped[:1] == b"[":
        return msgspec.json.decode(stripped, type=list[Raw])
    return [Raw(stripped)]


def _is_object(text: bytes) -> bool:
    # Postgres takes what stricter parsers refuse: half of a surrogate pair, numbers beyond a double.
    try:
        return isinstance(json.loads(text, parse_constant=_no_json, parse_int=str), dict)
    except RecursionError:  # of thousands of levels
        return members("record")(text)["record"] is not None
    except ValueError:
        return False


def _no_json(name: str) -> None:
    raise ValueError(name)


def _row(
    number: int, raw: Raw, table: tuple[str, str] | None, source: PostgresSource
) -> tuple[Any, ...]:
    def wrong(what: str) -> MessageError:
        return MessageError(f"message {number}: {what}")

    text = bytes(raw)
    try:
        message = _object(text)
    except (msgspec.MsgspecError, RecursionError):
        if not _is_object(text):
            raise wrong(f"it is no object: {_EXPECTED}") from None
        message = {n: Raw(v) for n, v in members(*_FIELDS)(text).items() if v is not None}
    if unknown := [name for name in message if name not in _FIELDS]:
        raise wrong(f"unknown key {unknown[0]!r}: {_EXPECTED}")
    values = {name: bytes(value).strip() for name, value in message.items()}
    record = values.get("record", b"null")
    if record[:1] != b"{":
        raise wrong(f"it has no record: {_EXPECTED}")
    changes = values.get("changes", b"null")
    if changes[:1] != b"{" and changes != b"null":
        raise wrong("changes is neither an object nor null")
    action = _value(values.get("action", b"null"))
    if action is None:
        action = INSERT
    if action not in ACTIONS:
        raise wrong(f"action is {action!r:.40}: expected one of {', '.join(ACTIONS)}")
    try:
        given = _given(values.get("metadata", b"null"))
    except (msgspec.MsgspecError, RecursionError):
        raise wrong("metadata is no object that can be read") from None
    schema, name = given.get("table_schema"), given.get("table_name")
    if name is None and table is not None:
        schema, name = table
    if not isinstance(name, str):
        raise wrong(
            "it names no table, and the sink takes several: add "
            '"metadata": {"table_schema": …, "table_name": …}'
        )
    schema = schema if isinstance(schema, str) else "public"
    metadata = _metadata(number, given, schema, name, source)
    return (
        record.decode(), None if changes == b"null" else changes.decode(), action, schema, name,
        _encode(metadata).decode(), metadata["idempotency_key"], metadata["commit_lsn"],
        metadata["commit_idx"], number, None, None, 0,
    )  # fmt: skip


def _given(text: bytes) -> dict[str, Any]:
    """Return metadata: what is read here as values, all else as the JSON that it is."""
    given: dict[str, Any] = {} if text == b"null" else dict(_object(text))
    for name in _READ & given.keys():
        given[name] = _value(bytes(given[name]))
    return given


def _value(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.decode()


def _metadata(
    number: int, given: dict[str, Any], schema: str, name: str, source: PostgresSource
) -> dict[str, Any]:
    """Return the metadata as the capture writes it, with what is given over it, in its order."""
    lsn = _integer(given.get("commit_lsn"), 1)
    idx = _integer(given.get("commit_idx"), number - 1)
    fixed = {
        "table_schema": schema,
        "table_name": name,
        "commit_lsn": lsn,
        "commit_idx": idx,
    }
    made: dict[str, Any] = {
        "table_schema": schema,
        "table_name": name,
        "database": _database(source),
        "commit_timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "commit_lsn": lsn,
        "transaction_id": 0,
        "idempotency_key": f"try-{lsn}-{idx}",
        "commit_idx": idx,
        "record_pks": [],
        "unavailable": [],
    }
    values = made | given | fixed
    metadata = {name: values[name] for name in given | made}
    # What a sink has added to the message that the file was copied from.
    for added in ("consumer", "route"):
        metadata.pop(added, None)
    metadata["idempotency_key"] = str(metadata["idempotency_key"])
    return metadata


def _integer(value: object, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else default


def _database(source: PostgresSource) -> str:
    return str(conninfo_to_dict(source.url.get_secret_value()).get("dbname") or "")


def _only_table(source: PostgresSource, sink: SinkSettings) -> tuple[str, str] | None:
    """Return the table that every message of the sink is of, or None if there may be several."""
    patterns = list(_patterns(source, sink))
    if len(patterns) == 1 and patterns[0].table is not None:
        return patterns[0].schema, patterns[0].table
    return None


def _patterns(source: PostgresSource, sink: SinkSettings) -> Iterator[TablePattern]:
    yield from source.patterns if sink.patterns is None else sink.patterns
