"""Consumers of the desired state, in the table that workers and webhooks are served from.

A consumer whose stream is there is made, changed or deleted in the transaction that changes its
entity. One whose stream is not there yet is made when a run registers the stream. Filters in SQL are
made anew when the tables of the source have changed.
Those of type nats are not served: a run publishes for them, and is replaced when they change.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, LiteralString

import psycopg
import structlog
from psycopg import sql
from psycopg.types.json import Jsonb

from penstock.config.consumers import HttpConsumer
from penstock.config.document import Spec
from penstock.config.models import DEFAULT_TYPES, type_of
from penstock.config.yaml_lines import Document, filled
from penstock.core import queries
from penstock.core.errors import Concern, ConfigError, Mistake, StoreError
from penstock.desired.entities import Change
from penstock.streams.consumers import sql_filter
from penstock.streams.consumers.joined import joined, written
from penstock.streams.consumers.types import ConsumerError
from penstock.streams.names import LOCK_MIGRATE, consumer_table
from penstock.streams.store import Store

if TYPE_CHECKING:
    from penstock.expressions.catalog import Columns
    from penstock.expressions.postgres.translate import Translated

log = structlog.get_logger("penstock")

_SQL: Final = queries.load("penstock.desired", "state.sql")
_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")
_SCHEMA: Final = queries.load("penstock.streams", "schema.sql")


def settings_in(
    spec: Spec, environ: Mapping[str, str], targets: Mapping[str, Spec]
) -> HttpConsumer | None:
    """Return a consumer's settings with its variables filled, and what its target has.

    `targets` are the specs of all targets. None where the settings can't be used here, and for a
    consumer of type nats: a run publishes for it.
    """
    document = Document()
    value = {"type": DEFAULT_TYPES["consumer"]} | filled(spec, environ, (), document)
    if document.problems or type_of("consumer", value) not in ("pull", "webhook"):
        return None
    try:
        settings = written(value)
        target = targets.get(getattr(settings, "target", None) or "")
        return joined(settings, target, environ)
    except (ConsumerError, ValueError):  # of pydantic's too
        return None


def register(
    store: Store, names: Iterable[str] | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """Bring the served consumers of these names, or all, in line with their entities as they are now.

    Their streams may have been made, and the tables of their filters changed. A consumer that can't be
    served is refused alone. Raises `StoreError`.
    """
    values = {"names": None if names is None else list(names)}
    if values["names"] != []:
        with _locked(store) as connection:
            _follow_again(connection, _SQL["consumer_specs"], values, environ)


def note_tables(
    store: Store, source: str, columns: Columns, environ: Mapping[str, str] = os.environ
) -> None:
    """Note the tables of a source; where they have changed, make its consumers' filters in SQL anew.

    One whose filter does not go with them any more is refused, and goes on with what it had; one that
    was refused may be served now. Raises `StoreError`.
    """
    with _locked(store) as connection:
        if store.save_catalog(source, columns):
            _follow_again(connection, _SQL["filtered_consumers"], {"source": source}, environ)


@contextlib.contextmanager
def _locked(store: Store) -> Iterator[psycopg.Connection[Any]]:
    """Lend a connection in a transaction, as a change of the state does: no entity changes meanwhile."""
    with store.connection() as connection, connection.transaction():
        connection.execute(_STORE_SQL["lock"], [LOCK_MIGRATE, 0])
        connection.execute(_STORE_SQL["lock_state"])
        yield connection


def _follow_again(
    connection: psycopg.Connection[Any],
    query: LiteralString,
    values: Mapping[str, Any],
    environ: Mapping[str, str],
) -> None:
    found = connection.execute(query, values).fetchall()
    same = [Change("consumer", name, spec, spec) for name, spec in found]
    follow(connection, same, environ, lenient=True)


def follow(
    connection: psycopg.Connection[Any],
    changes: Iterable[Change],
    environ: Mapping[str, str],
    *,
    lenient: bool = False,
) -> None:
    """Bring the served consumers in line with changed entities, inside their transaction.

    One that takes from another stream than before starts anew. Raises `StoreError` where a stream has
    the name of a consumer, and `ConfigError` for a filter that can't be planned: where it is `lenient`,
    that consumer alone is left as it was, and refused, until it can be served.
    """
    changes = list(changes)
    changed_targets = [c.name for c in changes if c.kind == "target"]
    wanted: dict[str, Spec | None] = {}
    if changed_targets:
        query = _SQL["consumers_of_targets"]
        wanted.update(connection.execute(query, [changed_targets]).fetchall())
    wanted |= {c.name: c.after for c in changes if c.kind == "consumer"}
    if not wanted:
        return
    targets = dict(connection.execute(_SQL["targets"]).fetchall())
    streams = dict(connection.execute(_SQL["streams"]).fetchall())
    served = {row[1]: row for row in connection.execute(_SQL["runtime_consumers"]).fetchall()}
    made: list[tuple[str, HttpConsumer]] = []
    filters: dict[str, Translated] = {}
    changed: list[tuple[int, str, Jsonb]] = []
    gone: list[int] = []
    published = {name for (name,) in connection.execute(_SQL["nats_consumers"]).fetchall()}
    for name, spec in wanted.items():
        if name in published and (spec is None or type_of("consumer", spec) != "nats"):
            connection.execute(_SQL["remove_nats_consumer"], [name])
        old = served.get(name)
        if spec is None and old is not None and old[5]:
            continue
        if spec is None or type_of("consumer", spec) == "nats":
            # Those of type nats are registered, and removed, by the run that publishes for them.
            if spec is not None and not lenient:
                _check_filter(connection, name, spec, streams, environ)
            if old is not None and not old[5]:
                gone.append(old[0])
            continue
        settings = settings_in(spec, environ, targets)
        if settings is None:
            continue  # the run whose environment has the variables registers it
        try:
            if old is not None and old[5]:
                raise StoreError(
                    "name_taken",
                    f"Stream {name!r} has a consumer of its own by that name.",
                    remedy="Give yours another.",
                )
            text = settings.filters.sql
            if text is not None and settings.stream in streams:
                filters[name] = _planned(connection, streams[settings.stream], name, text)
        except (ConfigError, StoreError) as error:
            if not lenient:
                raise
            _refuse(connection, name, error)
            continue
        if lenient:
            connection.execute(_SQL["accept"], {"kind": "consumer", "name": name, "process": 0})
        if old is not None and old[2] == settings.stream:
            stored = settings.stored()
            if (old[3], old[4]) != (settings.type, stored):
                changed.append((old[0], settings.type, Jsonb(stored)))
            continue
        if old is not None:
            gone.append(old[0])
        if settings.stream in streams:
            made.append((name, settings))
    _check_count(connection, len(gone) + len(made))
    drop(connection, gone)
    if changed:
        columns = [list(column) for column in zip(*changed, strict=True)]
        connection.execute(_SQL["update_consumers"], columns)
        connection.execute(_SQL["notify_consumers"], [columns[0]])
    ids = {name: row[0] for name, row in served.items()} | _make(connection, made, streams)
    for name, planned in filters.items():
        connection.execute(sql_filter.create(ids[name], planned))
    if gone or changed or made:
        connection.execute(_STORE_SQL["notify"], ["k"])


def _check_count(connection: psycopg.Connection[Any], count: int) -> None:
    (most,) = connection.execute(_SQL["most_consumers"]).fetchall()[0]
    if count > most:
        raise StoreError(
            "too_many_at_once",
            f"{count} consumers are made or dropped at once; the store's Postgres has locks for {most}.",
            remedy=f"Apply them in parts of at most {most}, or raise max_locks_per_transaction there.",
        )


def _planned(connection: psycopg.Connection[Any], stream: int, name: str, text: str) -> Translated:
    try:
        return sql_filter.plan(connection, stream, text)
    except ConsumerError as error:
        of = Concern("consumer", name, error.field)
        raise ConfigError([Mistake(of, error.reason)]) from None


def _refuse(
    connection: psycopg.Connection[Any], name: str, error: ConfigError | StoreError
) -> None:
    values = {"kind": "consumer", "name": name, "reason": error.message, "process": 0}
    if connection.execute(_SQL["refuse"], values).rowcount:
        log.error("a consumer can't be served as it is", consumer=name, error=error.message)


def check_filters(store: Store, changes: Iterable[Change], environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for filters in SQL that `follow` would refuse. Raises `StoreError`."""
    specs = {c.name: c.after for c in changes if c.kind == "consumer" and c.after is not None}
    if not any(spec.get("filters") for spec in specs.values()):
        return
    mistakes: list[str | Mistake] = []
    with store.connection() as connection:
        streams = dict(connection.execute(_SQL["streams"]).fetchall())
        for name, spec in specs.items():
            try:
                _check_filter(connection, name, spec, streams, environ)
            except ConfigError as error:
                mistakes += error.mistakes
    if mistakes:
        raise ConfigError(mistakes)


def _check_filter(
    connection: psycopg.Connection[Any],
    name: str,
    spec: Spec,
    streams: Mapping[str, int],
    environ: Mapping[str, str],
) -> None:
    """Raise `ConfigError` for a filter in SQL that can't be planned.

    Where `environ` lacks a variable of it, the run that has the variable checks it.
    """
    filters = spec.get("filters")
    text = filters.get("sql") if isinstance(filters, Mapping) else None
    document = Document()
    text = filled(text, environ, (), document)
    stream = streams.get(str(spec.get("stream")))
    if isinstance(text, str) and not document.problems and stream is not None:
        _planned(connection, stream, name, text)


def drop(connection: psycopg.Connection[Any], ids: Sequence[int]) -> None:
    """Delete consumers with their logs and dead letters; the logs first, as a step locks them."""
    if not ids:
        return
    logs = sql.SQL(", ").join(map(consumer_table, ids))
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(logs))
    connection.execute(sql.SQL(";\n").join(map(sql_filter.drop, ids)))
    connection.execute(_SQL["delete_consumers"], [list(ids)])


def _make(
    connection: psycopg.Connection[Any],
    made: Sequence[tuple[str, HttpConsumer]],
    streams: Mapping[str, int],
) -> dict[str, int]:
    if not made:
        return {}
    values = [
        [streams[settings.stream] for _, settings in made],
        [name for name, _ in made],
        [settings.type for _, settings in made],
        [False] * len(made),
        [Jsonb(settings.stored()) for _, settings in made],
    ]
    ids = [row[0] for row in connection.execute(_SQL["insert_consumers"], values).fetchall()]
    table = sql.SQL(_SCHEMA["consumer_table"])
    statements = [table.format(table=sql.Identifier(f"consumer_{id_}")) for id_ in ids]
    connection.execute(sql.SQL(";\n").join(statements))
    return {name: id_ for (name, _), id_ in zip(made, ids, strict=True)}
