"""The schema `tide` in a test's database, and what its functions raise."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import sql

from penstock.embedded.handles import Database
from penstock.outbox.sql.install import install

CONFIG = {"sink_type": "nats", "url": "nats://localhost:4222"}
SOURCE = {"source_type": "nats", "url": "nats://localhost:4222", "stream": "S"}


def installed(database: Database) -> Database:
    with database.connect(autocommit=True) as connection:
        assert install(connection).changed
    return database


class Raised(NamedTuple):
    """An error as a client sees it."""

    state: str
    message: str
    hint: str


def raises(database: Database, query: str, *params: Any) -> Raised:
    """Run a statement that must fail; the error must say what to do."""
    with pytest.raises(psycopg.Error) as caught:
        database.execute(query, params or None)
    error = caught.value
    assert error.sqlstate is not None
    return Raised(error.sqlstate, error.diag.message_primary or "", error.diag.message_hint or "")


def value(database: Database, query: str, *params: Any) -> Any:
    ((found,),) = database.execute(query, params or None)
    return found


def ids(database: Database, outbox: str) -> list[int]:
    return [
        row[0] for row in database.execute(f'SELECT id FROM tide."outbox_{outbox}" ORDER BY id')
    ]


def pipeline(
    database: Database, name: str, outbox: str, *, group: str = "g", **config: Any
) -> None:
    database.execute(
        "SELECT tide.relay_set_outbox(%s, %s, %s, %s)",
        [name, outbox, group, json.dumps(CONFIG | config)],
    )


def delivered(database: Database, name: str, snapshot: str | None = None) -> None:
    """Do as a relay does that has delivered what is visible in `snapshot`, by default all."""
    database.execute(
        """INSERT INTO tide.checkpoints (relay_group, pipeline, outbox, delivered_snapshot, state)
           SELECT relay_group, pipeline, outbox,
                  coalesce(%s::pg_snapshot, pg_current_snapshot()), 'running'
           FROM tide.relays WHERE pipeline = %s
           ON CONFLICT (relay_group, pipeline, outbox)
           DO UPDATE SET delivered_snapshot = excluded.delivered_snapshot""",
        [snapshot, name],
    )


def lease(
    database: Database,
    state: str = "running",
    *,
    group: str = "g",
    age: float = -3600,
    instance: str = "one",
    **columns: Any,
) -> None:
    """Do as a relay's process does, so many seconds ago; by default it stays alive for the test."""
    given = {"host": "h1", "pid": 4711, "warm": True, **columns}
    names = sql.SQL(", ").join(map(sql.Identifier, given))
    query = sql.SQL(
        "INSERT INTO tide.leases (relay_group, instance, state, heartbeat, since, {})"
        " SELECT %s, %s, %s, t.at, t.at - interval '1 h', {}"
        " FROM (SELECT clock_timestamp() - make_interval(secs => %s)) AS t (at)"
        " ON CONFLICT (relay_group, instance) DO UPDATE"
        " SET state = excluded.state, heartbeat = excluded.heartbeat, warm = excluded.warm"
    ).format(names, sql.SQL(", ").join(sql.Placeholder() * len(given)))  # fmt: skip
    with database.connect(autocommit=True) as connection:
        connection.execute(query, [group, instance, state, *given.values(), age])


@contextlib.contextmanager
def role(database: Database) -> Iterator[tuple[str, Database]]:
    """A role without any right, and a session of it; both are gone at the end."""
    name = f"role_{uuid.uuid4().hex[:8]}"
    database.execute(f"CREATE ROLE {name}")
    session = Database(database.name, database.url)
    session.execute(f"SET ROLE {name}")
    try:
        yield name, session
    finally:
        session.close()
        database.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def quoted(name: str) -> str:
    return sql.Identifier(name).as_string(None)
