"""The store: its schema is made once, and what is registered in it is found again."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import string
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from tests.pipeline import PATIENCE
from tests.streams_help import make_stream, writer_of
from tests.waits import at_once, await_true

from penstock.core import queries
from penstock.core.delivery import DeadLetter
from penstock.core.errors import SinkError, StoreError
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.sinks.stream import StreamWriter
from penstock.streams.claim import Claim
from penstock.streams.migrate import VERSION
from penstock.streams.store import Store


def test_many_that_open_at_once_make_the_schema_once(database: Database) -> None:
    together = threading.Barrier(6, timeout=PATIENCE)

    def open_one() -> None:
        together.wait()
        Store.open(database.url).close()

    at_once(*[open_one] * 6)
    versions = database.execute("SELECT version FROM penstock.migrations ORDER BY version")
    assert versions == [(version,) for version in range(1, VERSION + 1)]


def test_opening_again_changes_nothing_and_needs_no_rights(
    store: Store, database: Database
) -> None:
    before = database.execute("SELECT oid, relname FROM pg_class ORDER BY oid")
    Store.open(database.url).close()
    assert database.execute("SELECT oid, relname FROM pg_class ORDER BY oid") == before


def test_a_newer_schema_is_refused(store: Store, database: Database) -> None:
    database.execute("INSERT INTO penstock.migrations (version) VALUES (99)")
    with pytest.raises(StoreError) as refused:
        Store.open(database.url)
    assert refused.value.code == "schema_newer"
    assert "99" in refused.value.message


def test_streams_of_an_earlier_build_are_refused(database: Database) -> None:
    """They keep their messages at other places; a store that has none is taken over."""
    schema = queries.load("penstock.streams", "schema.sql")

    def earlier_build() -> None:
        database.execute("DROP SCHEMA IF EXISTS penstock CASCADE")
        database.execute(queries.load("penstock.streams", "store.sql")["create_schema"])
        for version in (1, 2):
            database.execute(schema[f"migration_{version}"])
            database.execute(f"INSERT INTO penstock.migrations (version) VALUES ({version})")

    earlier_build()
    Store.open(database.url).close()
    earlier_build()
    database.execute(
        "INSERT INTO penstock.sources (name, tag) VALUES ('shop', 't');"
        "INSERT INTO penstock.streams (name, source_id, kind) SELECT 'orders', id, 'changes'"
        " FROM penstock.sources"
    )
    with pytest.raises(StoreError) as refused:
        Store.open(database.url)
    assert refused.value.code == "old_streams"
    assert not refused.value.transient
    assert "DROP SCHEMA penstock CASCADE" in refused.value.remedy
    assert database.execute("SELECT max(version) FROM penstock.migrations") == [(2,)]


def test_dead_letters_of_an_earlier_build_become_their_consumers(database: Database) -> None:
    schema = queries.load("penstock.streams", "schema.sql")
    database.execute(queries.load("penstock.streams", "store.sql")["create_schema"])
    for version in range(1, 17):
        database.execute(schema[f"migration_{version}"])
        database.execute(f"INSERT INTO penstock.migrations (version) VALUES ({version})")
    database.execute(
        "INSERT INTO penstock.sources (name, tag) VALUES ('shop', 't');"
        "INSERT INTO penstock.streams (name, source_id, kind) SELECT 'orders', id, 'changes'"
        " FROM penstock.sources;"
        "INSERT INTO penstock.nats_consumers (stream_id, name, settings) SELECT id, 'mail', '{}'"
        " FROM penstock.streams;"
        "INSERT INTO penstock.dead_letters (sink, idempotency_key, subject, code, reason, message)"
        " SELECT sink, 'k', 's', 'too_large', 'why', '{}' FROM unnest('{mail,out}'::text[]) AS s (sink)"
    )
    with Store.open(database.url) as store:
        found = [(letter.sink, letter.consumer) for letter in store.letters.page()]
    assert found == [(None, "mail"), ("out", None)]


def test_a_role_that_may_not_create_is_reported(database: Database) -> None:
    database.execute("CREATE ROLE visitor LOGIN")
    try:
        with pytest.raises(StoreError) as refused:
            Store.open(database.url.replace("postgres@", "visitor@"))
        assert refused.value.code == "permission_denied"
        assert "GRANT CREATE ON DATABASE" in refused.value.remedy
    finally:
        database.execute("DROP ROLE visitor")


def test_a_database_that_is_not_utf8_is_refused(postgres: EmbeddedPostgres) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute(
            "CREATE DATABASE latin ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C'"
            " TEMPLATE template0"
        )
        try:
            with pytest.raises(StoreError) as refused:
                Store.open(postgres.database_url("latin"))
            assert (refused.value.code, "LATIN1" in refused.value.message) == ("encoding", True)
        finally:
            admin.execute("DROP DATABASE latin")


@pytest.mark.parametrize(
    ("url", "code", "transient"),
    [
        ("postgresql://postgres:hidden@127.0.0.1:1/x", "connection_refused", True),
        ("postgresql://postgres:hidden@127.0.0.1:{port}/nowhere", "database_missing", False),
        ("postgresql://nobody:hidden@127.0.0.1:{port}/postgres", "authentication_failed", False),
    ],
)
def test_what_keeps_it_from_connecting_is_reported_without_the_password(
    postgres: EmbeddedPostgres, url: str, code: str, transient: bool
) -> None:
    with pytest.raises(StoreError) as refused:
        Store.open(url.format(port=postgres.port))
    assert (refused.value.code, refused.value.transient) == (code, transient)
    assert "hidden" not in str(refused.value)
    assert refused.value.remedy


def test_a_connection_that_was_lost_is_made_again(store: Store, database: Database) -> None:
    end = "SELECT pg_terminate_backend(%s, 5000)"
    with store.connection() as connection:
        pid = connection.info.backend_pid
    database.execute(end, [pid])
    assert store.sources() == []  # it was idle, so that nothing is to be reported
    with pytest.raises(StoreError) as lost:
        _in_a_session_that_ends(store, lambda pid: database.execute(end, [pid]))
    assert (lost.value.code, lost.value.transient) == ("connection_lost", True)
    assert store.sources() == []


def _in_a_session_that_ends(store: Store, end: Callable[[int], object]) -> None:
    with store.connection() as connection:
        end(connection.info.backend_pid)
        connection.execute("SELECT 1")


def test_a_source_is_run_once(store: Store, database: Database) -> None:
    source = store.register_source("shop", "tag")
    with store.claim_source(source.id) as first, Store(database.url) as other:
        with other.claim_source(source.id) as second:
            assert (first, second) == (True, False)
        with other.claim_source(source.id + 1) as another:
            assert another
    with store.claim_source(source.id) as again:
        assert again


def test_a_stream_is_found_again_and_stays_what_it_is(store: Store) -> None:
    made = make_stream(store, retention=timedelta(days=7))
    assert make_stream(store, retention=timedelta(hours=1)).retention == timedelta(hours=1)
    assert [stream.id for stream in store.streams()] == [made.id]
    assert [(c.name, c.own, c.stream) for c in store.consumers()] == [("events", True, "events")]
    for source, kind in (("shop", "rows"), ("crm", "changes")):
        with pytest.raises(StoreError, match="give the sink another name"):
            make_stream(store, source=source, kind=kind)


def test_consumers_of_the_configuration_are_taken_over(store: Store, database: Database) -> None:
    make_stream(store)
    made = store.register_consumer("events", "billing", "pull", {"max_deliver": 3})
    assert store.register_consumer("events", "billing", "pull", {"max_deliver": 3}) == made
    changed = store.register_consumer("events", "billing", "webhook", {"url": "http://x"})
    assert (changed.id, changed.type, changed.settings) == (made.id, "webhook", {"url": "http://x"})
    assert database.execute(f"SELECT * FROM penstock.consumer_{made.id}") == []
    make_stream(store, "orders")
    for stream, name, code in [
        ("nothing", "billing", "no_stream"),
        ("orders", "billing", "name_taken"),
        ("orders", "events", "name_taken"),
    ]:
        with pytest.raises(StoreError) as refused:
            store.register_consumer(stream, name, "pull", {})
        assert refused.value.code == code
    with pytest.raises(StoreError) as taken:
        make_stream(store, "billing")
    assert taken.value.code == "name_taken"
    assert store.stream("billing") is None


def test_dead_letters_of_sinks(store: Store) -> None:
    letters = [DeadLetter(f"k{n}", "a.b", "too_large", "why", '{"é": "\0"}') for n in range(3)]
    store.letters.add("nats", letters)
    store.letters.add("other", letters[:1])
    first, second, third = store.letters.page("nats")
    assert (first.idempotency_key, first.subject, first.code) == ("k0", "a.b", "too_large")
    assert store.letters.page("nats", limit=1, offset=1) == [second]
    store.letters.mark_replayed(first.id)
    store.letters.mark_replayed(second.id)
    store.letters.add("nats", letters[:1])  # the replay failed
    again = store.letters.get(first.id)
    assert again is not None
    assert again.replayed_at is None
    assert store.letters.purge("nats", replayed=True) == 1
    assert store.letters.purge(id=third.id) == 1
    assert [letter.id for letter in store.letters.page("nats")] == [first.id]
    assert store.letters.get(second.id) is None
    assert store.letters.page(consumer="nats") == []
    # A consumer of type nats of that name has its own, of the same message too.
    store.letters.add("nats", letters[:1], "consumer")
    (of,) = store.letters.page(consumer="nats")
    assert (of.sink, of.consumer, of.publisher) == (None, "nats", "nats")
    assert [letter.id for letter in store.letters.page("nats")] == [first.id]
    causes = {(cause.sink, cause.consumer): cause.waiting for cause in store.letters.causes()}
    assert causes == {("nats", None): 1, ("other", None): 1, (None, "nats"): 1}
    store.letters.add("nats", letters[:2], "consumer")  # the first one again
    assert store.letters.purge(consumer="nats") == 2
    assert store.letters.purge() == 2


def test_a_dead_letter_with_a_long_subject(store: Store) -> None:
    """No index keeps it out, and it is one, whatever its subject was before."""
    long = "".join(random.Random(1).choices(string.ascii_letters, k=4_000))
    store.letters.add("nats", [DeadLetter("k", "a", "too_large", "why", "{}")])
    store.letters.add("nats", [DeadLetter("k", long, "too_large", "why", "{}")])
    store.letters.add("nats", [DeadLetter("l", "a\0", "too_large", "\0", "{}")])
    assert [letter.subject for letter in store.letters.page()] == [
        long,
        "a\N{REPLACEMENT CHARACTER}",
    ]


def test_sessions_have_what_they_need_whatever_is_set(database: Database) -> None:
    """Waiting for a lock and then seeing what its holder did, and not holding one for hours."""
    for name, value in {
        "default_transaction_isolation": "repeatable read",
        "idle_session_timeout": "1s",
        "idle_in_transaction_session_timeout": "0",
        "tcp_keepalives_idle": "7200",
    }.items():
        database.execute(f"ALTER DATABASE {database.name} SET {name} = '{value}'")
    with Store.open(database.url) as store, store.connection() as connection:
        writer = writer_of(store, make_stream(store))
        writer.begin()
        for session in (connection, writer.connection):
            found = dict(
                session.execute(
                    "SELECT name, setting FROM pg_settings WHERE name IN ('transaction_isolation',"
                    " 'idle_session_timeout', 'idle_in_transaction_session_timeout',"
                    " 'tcp_keepalives_idle', 'tcp_keepalives_interval', 'tcp_keepalives_count',"
                    " 'tcp_user_timeout')"
                ).fetchall()
            )
            assert found == {
                "transaction_isolation": "read committed",
                "idle_session_timeout": "0",
                "idle_in_transaction_session_timeout": "60000",
                "tcp_keepalives_idle": "20",
                "tcp_keepalives_interval": "5",
                "tcp_keepalives_count": "4",
                "tcp_user_timeout": "30000",
            }
        with socket.socket(fileno=os.dup(connection.fileno())) as client:
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20
        writer.close()


def test_tokens_are_shown_once_and_stored_hashed(store: Store, database: Database) -> None:
    token = store.tokens.create("ci", "worker", ["billing"])
    assert token.startswith("pst_")
    assert len(token) > 40
    assert database.execute("SELECT hash FROM penstock.tokens") == [
        (hashlib.sha256(token.encode()).digest(),)
    ]
    with pytest.raises(StoreError, match="already"):
        store.tokens.create("ci", "admin")
    assert [(t.name, t.role, t.consumers) for t in store.tokens.all()] == [
        ("ci", "worker", ["billing"])
    ]
    with database.connect(autocommit=True) as listener:
        listener.execute("LISTEN penstock")
        assert [store.tokens.revoke("ci"), store.tokens.revoke("ci")] == [True, False]
        assert next(listener.notifies(timeout=60)).payload == "t"
    assert store.tokens.all()[0].revoked_at is not None


def test_the_settings_of_a_streams_own_group_are_those_of_its_sink(store: Store) -> None:
    source = store.register_source("shop", "tag")

    def settings(group: dict[str, Any] | None) -> dict[str, Any]:
        store.register_stream("events", source, "rows", None, group)
        (own,) = store.consumers()
        return dict(own.settings)

    given = {"max_waiting": 3, "deletes": True}
    assert settings(given) == given
    assert settings({"ack_wait_ms": 50, "deletes": False}) == {"ack_wait_ms": 50}
    # A stream that no sink fills.
    assert settings(None) == {"ack_wait_ms": 50}
    assert settings({}) == {}


def test_a_source_changes_hands_with_a_new_epoch(store: Store, database: Database) -> None:
    """What writes for the epoch before is refused; a process that only claims it again is not."""
    source = store.register_source("shop", "tag")
    claim = Claim(database.url, source.id, beats=True)
    assert claim.acquire()
    epoch = claim.epoch
    assert claim.beat()
    assert not claim.took_over
    claim.close()
    again = Claim(database.url, source.id, beats=True)
    await_true(again.acquire)  # once the server has seen the first one go
    assert again.epoch == epoch
    writer = StreamWriter(database.url, source.id, source.base, [], epoch)
    writer.begin()
    writer.rollback()
    # Another process takes it from one that is gone: its token is another one.
    database.execute("UPDATE penstock.leases SET token = 'other', holder = 'other host'")
    assert not again.beat()
    again.close()
    other = Claim(database.url, source.id, beats=True)
    await_true(other.acquire)
    assert other.took_over
    assert other.epoch != epoch
    with pytest.raises(SinkError) as refused:
        writer.begin()
    assert refused.value.code == "lease_lost"
    writer.close()
    other.close()


def test_a_lease_ends_by_the_stores_clock(store: Store, database: Database) -> None:
    """Where the holder's machine is gone the server may have its session for long."""
    source = store.register_source("shop", "tag")
    held = Claim(database.url, source.id, beats=True)
    assert held.acquire()
    late = Claim(database.url, source.id, beats=True)
    assert not late.acquire()
    update = "UPDATE penstock.leases SET token = 'gone', holder = 'gone', beat_at = "
    database.execute(update + "clock_timestamp() + interval '1 hour'")
    assert not late.acquire()
    assert late.holder == "gone"
    assert not held.is_lost
    # Its last beat is long ago, but the server has just started: it has a lease's time from then on.
    database.execute(update + "clock_timestamp() - interval '1 day'")
    await_true(late.acquire)
    assert late.took_over
    assert held.is_lost
    late.close()
    held.close()
