"""Consumers of the desired state, in the table that workers and webhooks are served from.

A consumer whose stream is there is made, changed or deleted in the transaction that changes its
entity. One whose stream is not there yet is made when a run registers the stream.
Those of type nats are not served: a run publishes for them, and is replaced when they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql
from psycopg.types.json import Jsonb

from penstock.config.consumers import Consumer, WebhookConsumer
from penstock.config.document import Spec
from penstock.config.models import CONSUMERS, DEFAULT_TYPES, type_of
from penstock.config.nats_consumers import NatsConsumer
from penstock.config.targets import HttpTarget, joined_webhook
from penstock.config.yaml_lines import Document, filled
from penstock.core import queries
from penstock.core.errors import ConfigError, StoreError
from penstock.desired.entities import Change
from penstock.streams.consumers import sql_filter
from penstock.streams.consumers.types import ConsumerError
from penstock.streams.names import consumer_table

log = structlog.get_logger("penstock")

_SQL: Final = queries.load("penstock.desired", "state.sql")
_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")
_SCHEMA: Final = queries.load("penstock.streams", "schema.sql")


def settings_in(
    spec: Spec, environ: Mapping[str, str], targets: Mapping[str, Spec]
) -> Consumer | None:
    """Return a consumer's settings with its variables filled, and what its target has.

    `targets` are the specs of all targets. None where the settings can't be used here, and for a
    consumer of type nats: a run publishes for it.
    """
    document = Document()
    value = {"type": DEFAULT_TYPES["consumer"]} | filled(spec, environ, (), document)
    model = CONSUMERS.get(type_of("consumer", value))
    if document.problems or model is None:
        return None
    try:
        settings = model.model_validate(value)
        if isinstance(settings, NatsConsumer):
            return None
        if not isinstance(settings, WebhookConsumer) or settings.target is None:
            return settings
        target = filled(targets.get(settings.target, {}), environ, (), document)
        if document.problems:
            return None
        return joined_webhook(settings, settings.target, HttpTarget.model_validate(target))
    except ValueError:  # of pydantic's too
        return None


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
    that consumer alone is left as it was, and refused, until a run can plan it.
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
    made: list[tuple[str, Consumer]] = []
    filtered: list[tuple[int, str, Consumer]] = []
    changed: list[tuple[int, str, Jsonb]] = []
    gone: list[int] = []
    for name, spec in wanted.items():
        old = served.get(name)
        if old is not None and old[5]:
            if spec is None:
                continue
            raise StoreError(
                "name_taken",
                f"Stream {name!r} has a consumer of its own by that name.",
                remedy="Give yours another.",
            )
        if spec is None or type_of("consumer", spec) == "nats":
            # Those of type nats are registered, and removed, by the run that publishes for them.
            if old is not None:
                gone.append(old[0])
            continue
        settings = settings_in(spec, environ, targets)
        if settings is None:
            continue  # the run whose environment has the variables registers it
        text = settings.filters.sql
        if text is not None and settings.stream in streams:
            try:
                sql_filter.plan(connection, streams[settings.stream], text)
            except ConsumerError as error:
                reason = f"consumers.{name}.{error.message}"
                if not lenient:
                    raise ConfigError([reason]) from None
                values = {"kind": "consumer", "name": name, "reason": reason}
                connection.execute(_SQL["refuse"], values)
                log.error("a consumer can't be served as it is", consumer=name, error=reason)
                continue
        if old is not None and old[2] == settings.stream:
            stored = settings.stored()
            if (old[3], old[4]) != (settings.type, stored):
                changed.append((old[0], settings.type, Jsonb(stored)))
                filtered.append((old[0], name, settings))
            continue
        if old is not None:
            gone.append(old[0])
        if settings.stream in streams:
            made.append((name, settings))
    drop(connection, gone)
    if changed:
        columns = [list(column) for column in zip(*changed, strict=True)]
        connection.execute(_SQL["update_consumers"], columns)
        connection.execute(_SQL["notify_consumers"], [columns[0]])
    ids = _make(connection, made, streams)
    filtered += [(id_, *each) for id_, each in zip(ids, made, strict=True)]
    for id_, _, settings in filtered:
        if settings.filters.sql is not None:
            sql_filter.install(connection, id_, streams[settings.stream], settings.filters.sql)
    connection.execute(_STORE_SQL["notify"], ["k"])


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
    made: Sequence[tuple[str, Consumer]],
    streams: Mapping[str, int],
) -> list[int]:
    if not made:
        return []
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
    return ids
