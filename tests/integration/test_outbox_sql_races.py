"""What several sessions do to outboxes, inboxes and pipelines at the same time."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from tests.integration.outbox_sql import CONFIG, SOURCE, pipeline, raises, role, value
from tests.waits import Later, at_once, await_true

from penstock.embedded.handles import Database
from penstock.outbox.sql.install import DIGEST, VERSION, install, script

SET_OUTBOX = f"SELECT tide.relay_set_outbox('p', 'o', 'g', '{json.dumps(CONFIG)}')"
SET_INBOX = f"SELECT tide.relay_set_inbox('p', 'i', 'g', '{json.dumps(SOURCE)}')"


@pytest.fixture
def tide(database: Database) -> Database:
    database.execute("SELECT tide.outbox_create('o'), tide.inbox_create('i')")
    return database


class Waiting:
    """A call that waits in a session of its own for a lock of another transaction."""

    def __init__(
        self, tide: Database, call: str | Callable[[psycopg.Connection[Any]], object], *before: str
    ) -> None:
        self._connection = tide.connect(autocommit=True)
        for statement in before:
            self._connection.execute(statement.encode())
        self._call: Later[object] = Later(
            partial(self._connection.execute, call.encode())
            if isinstance(call, str)
            else partial(call, self._connection)
        )
        pid = self._connection.info.backend_pid

        def waits() -> bool:
            assert not self._call.done, (call, self.end())
            return bool(value(tide, "SELECT cardinality(pg_blocking_pids(%s)) > 0", pid))

        await_true(waits, what=f"it waits for another transaction: {call}")

    def end(self) -> str | None:
        """Wait for its end; return the SQLSTATE of its error."""
        try:
            self._call.result()
        except psycopg.Error as error:
            return error.sqlstate
        finally:
            self._connection.close()
        return None


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        ("SELECT tide.outbox_drop('o')", SET_OUTBOX, "TD002"),
        ("SELECT tide.inbox_drop('i')", SET_INBOX, "TD008"),
        (SET_OUTBOX, "SELECT tide.outbox_drop('o')", "TD012"),
        (SET_INBOX, "SELECT tide.inbox_drop('i')", "TD012"),
        ("SELECT tide.outbox_drop('o')", "SELECT tide.outbox_drop('o')", "TD002"),
        ("SELECT tide.outbox_drop('o')", "SELECT tide.outbox_sweep('o')", "TD002"),
        ("SELECT tide.outbox_drop('o')", "SELECT tide.outbox_disable('o')", "TD002"),
        ("SELECT tide.inbox_drop('i')", "SELECT tide.inbox_sweep('i')", "TD008"),
        ("SELECT tide.relay_delete('q')", "SELECT tide.relay_enable('q')", "TD007"),
        ("SELECT tide.relay_delete('q')", "SELECT tide.relay_delete('q')", "TD007"),
        ("SELECT tide.outbox_create('n')", "SELECT tide.outbox_create('n')", "TD003"),
        ("SELECT tide.inbox_create('n')", "SELECT tide.inbox_create('n')", "TD003"),
        ("SELECT tide.outbox_disable('o')", "SELECT tide.outbox_enable('o')", None),
    ],
)
def test_the_second_finds_what_the_first_left(
    tide: Database, first: str, second: str, state: str | None
) -> None:
    tide.execute("SELECT tide.outbox_create('other')")
    pipeline(tide, "q", "other")
    with tide.connect() as one:
        one.execute(first.encode())
        two = Waiting(tide, second)
        one.commit()
        assert two.end() == state


def test_a_publisher_whose_transaction_is_open_holds_up_a_drop(tide: Database) -> None:
    with tide.connect() as publisher:
        publisher.execute("SELECT tide.outbox_publish('o', '{}')")
        drop = Waiting(tide, "SELECT tide.outbox_drop('o')")
        publisher.commit()
        assert drop.end() is None
    assert raises(tide, "SELECT tide.outbox_publish('o', '{}')").state == "TD002"


def test_pipelines_of_one_outbox_are_set_up_side_by_side(tide: Database) -> None:
    with tide.connect() as one, tide.connect(autocommit=True) as two:
        one.execute(SET_OUTBOX.encode())
        two.execute("SET lock_timeout = '1ms'")
        two.execute(SET_OUTBOX.replace("'p'", "'q'").encode())
        two.execute("SELECT tide.outbox_sweep('o'), tide.outbox_disable('o')")


def test_an_upgrade_and_what_is_done_meanwhile_wait_for_each_other(tide: Database) -> None:
    with role(tide) as (name, _), tide.connect() as one:
        one.execute("SELECT tide.outbox_grant_publish('o', %s)", [name])
        upgrade = Waiting(tide, "BEGIN;" + script(VERSION) + "COMMIT;")
        one.execute("SELECT tide.outbox_disable('o')")
        one.commit()
        assert upgrade.end() is None
        assert raises(tide, "SELECT tide.outbox_publish('o', '{}')").state == "TD004"
        with tide.connect() as publisher:
            publisher.execute(script(VERSION).encode())
            for statement in (
                f"SELECT tide.outbox_grant_publish('o', '{name}')",
                f"SELECT tide.relay_grant('{name}')",
                "SELECT tide.outbox_create('n')",
            ):
                waiting = Waiting(tide, statement)
                publisher.rollback()
                assert waiting.end() is None
                publisher.execute(script(VERSION).encode())


def test_an_installation_that_a_deadlock_ends_is_made_again(tide: Database) -> None:
    tide.execute("UPDATE tide.migrations SET functions = ''")
    with tide.connect() as holder:
        holder.execute("LOCK TABLE tide.inboxes")
        upgrade = Waiting(tide, install, "SET deadlock_timeout = '1ms'")  # it has tide.outboxes
        other = Waiting(
            tide, "LOCK TABLE tide.outboxes",
            "SET deadlock_timeout = '1h'", "BEGIN", "LOCK TABLE tide.relays",
        )  # fmt: skip
        holder.rollback()
        assert other.end() is None, "the deadlock ends the installation's transaction"
    assert upgrade.end() is None
    assert value(tide, "SELECT functions FROM tide.migrations") == DIGEST


KNOWN = {"TD002", "TD003", "TD004", "TD007", "TD008", "TD012"}
DROPPED = {"42P01", "42883"}
"""Errors of publishers, of status and of workers while an outbox or inbox is dropped."""


def _steps(number: int) -> Iterator[tuple[str, set[str]]]:
    chosen = random.Random(number)
    while True:
        box, name = chosen.choice("ab"), chosen.choice("pq")
        config, source = json.dumps(CONFIG), json.dumps(SOURCE)
        yield chosen.choice([
            (f"outbox_create('{box}', 0)", set()),
            (f"outbox_drop('{box}')", set()),
            (f"outbox_drop('{box}', force => true)", set()),
            (f"outbox_publish('{box}', '{{}}')", DROPPED),
            (f"outbox_publish('{box}', '{{}}', 'k')", DROPPED),
            (f"outbox_enable('{box}')", set()),
            (f"outbox_disable('{box}')", set()),
            (f"outbox_sweep('{box}')", set()),
            (f"outbox_status('{box}')", DROPPED),
            (f"outbox_grant_publish('{box}', current_user::text)", set()),
            (f"relay_set_outbox('{name}', '{box}', 'g', '{config}')", set()),
            (f"relay_set_inbox('{name}', '{box}', 'g', '{source}')", set()),
            (f"relay_enable('{name}')", set()),
            (f"relay_disable('{name}')", set()),
            (f"relay_delete('{name}')", set()),
            (f"relay_status('{name}')", set()),
            ("relay_list()", set()),
            (f"inbox_create('{box}')", set()),
            (f"inbox_drop('{box}', force => true)", set()),
            (f"inbox_status('{box}')", DROPPED),
            (f"inbox_sweep('{box}')", set()),
            (f"inbox_replay('{box}')", DROPPED),
        ])  # fmt: skip


def test_eight_sessions_leave_a_whole_and_hear_only_what_is_documented(tide: Database) -> None:
    odd: list[tuple[str, str | None, str]] = []
    done = [0]

    def work(number: int) -> None:
        with tide.connect(autocommit=True) as connection:
            steps = _steps(number)
            for _ in range(60):
                call, allowed = next(steps)
                try:
                    connection.execute(f"SELECT tide.{call}".encode())
                    done[0] += 1
                except psycopg.Error as error:
                    if error.sqlstate not in KNOWN | allowed:
                        odd.append((call, error.sqlstate, str(error)))
            if number == 0:
                connection.execute("UPDATE tide.migrations SET functions = ''")
                install(connection)

    at_once(*[partial(work, number) for number in range(8)])
    assert odd == []
    assert done[0] > 50
    check(tide)


def check(tide: Database) -> None:
    """Each box has its table, its function as it is switched, and its place in the publication."""
    made = "SELECT 'tide.' || quote_ident('outbox_' || name) FROM tide.outboxes ORDER BY 1"
    tables = {row[0] for row in tide.execute(made)}
    found: list[tuple[Any, ...]] = tide.execute(
        "SELECT format('tide.%I', relname) FROM pg_class WHERE relname LIKE 'outbox!_%' ESCAPE '!'"
        " AND relkind = 'r' AND relnamespace = 'tide'::regnamespace"
    )
    assert {row[0] for row in found} == tables
    published = (
        "SELECT format('tide.%I', tablename) FROM pg_publication_tables WHERE pubname = 'tide'"
    )
    assert {row[0] for row in tide.execute(published)} == tables
    functions = "SELECT proname FROM pg_proc WHERE starts_with(proname, 'append_')"
    assert len(tide.execute(functions)) == len(tables)
    for name, enabled in tide.execute("SELECT name, enabled FROM tide.outboxes"):
        publish = "SELECT tide.outbox_publish(%s, '{}')"
        if enabled:
            tide.execute(publish, [name])
        else:
            assert raises(tide, publish, name).state == "TD004"
    with contextlib.closing(tide.connect()) as connection:
        connection.execute("SELECT tide.outbox_drop(name, true) FROM tide.outboxes")
        connection.execute("SELECT tide.inbox_drop(name, true) FROM tide.inboxes")
