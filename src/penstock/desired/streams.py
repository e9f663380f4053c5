"""Streams of the store, in line with their sinks: how long they keep, and their own groups' settings.

The run of its source makes a stream. Where its sink is changed later, this takes over what matters to
the store alone, in the transaction of the change: no run notices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import psycopg

from penstock.config.document import Spec
from penstock.config.models import type_of
from penstock.config.sinks import StreamSinkSettings
from penstock.config.yaml_lines import Document, filled
from penstock.core import queries
from penstock.desired.entities import Change
from penstock.streams.records import StreamRecord
from penstock.streams.store import Store, change_stream

_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")


def follow(
    connection: psycopg.Connection[Any], changes: Iterable[Change], environ: Mapping[str, str]
) -> None:
    """Bring streams in line with changed sinks, inside their transaction.

    One whose sink has variables that `environ` lacks is left to the run that has them.
    """
    found = {c.name: settings_in(c.after, environ) for c in changes if c.kind == "sink" and c.after}
    _take_over(connection, {name: sink for name, sink in found.items() if sink is not None})


def settings_in(spec: Spec, environ: Mapping[str, str]) -> StreamSinkSettings | None:
    """Return a stream's settings with its variables filled; None where they can't be used here."""
    document = Document()
    value = filled(spec, environ, (), document)
    if document.problems or type_of("sink", value) != "stream":
        return None
    try:
        return StreamSinkSettings.model_validate(value)
    except ValueError:
        return None


def register(store: Store, sinks: Mapping[str, StreamSinkSettings]) -> None:
    """Bring streams in line with these sinks, whose variables this process has; raises `StoreError`."""
    if sinks:
        with store.connection() as connection, connection.transaction():
            _take_over(connection, sinks)


def _take_over(
    connection: psycopg.Connection[Any], sinks: Mapping[str, StreamSinkSettings]
) -> None:
    if not sinks:
        return
    for row in connection.execute(_STORE_SQL["streams"]).fetchall():
        stream = StreamRecord(*row)
        sink = sinks.get(stream.name)
        # One of another source or kind is made anew, by a run.
        if sink is not None and (stream.source, stream.kind) == (sink.source, sink.kind):
            change_stream(connection, stream, sink.retention, sink.group)
