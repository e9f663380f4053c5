"""Who may do what in the schema `tide`: a publisher, a worker, a relay, and everybody else."""

from __future__ import annotations

import threading

import psycopg
import pytest
from tests.integration.outbox_sql import pipeline, raises, role, value
from tests.waits import await_end, await_true

from penstock.embedded.handles import Database
from penstock.outbox.pipelines import find_inboxes

DENIED = "42501"


@pytest.fixture
def tide(database: Database) -> Database:
    database.execute("SELECT tide.outbox_create('o'), tide.outbox_create('other')")
    database.execute("SELECT tide.inbox_create('i')")
    pipeline(database, "p", "o")
    return database


def calls(tide: Database) -> list[str]:
    """Every function of the schema, called with nulls; also those that outboxes have."""
    found = tide.execute(
        "SELECT format('tide.%I(%s)', proname, (SELECT string_agg(format('NULL::%s',"
        " format_type(t, NULL)), ', ' ORDER BY n)"
        " FROM unnest(proargtypes) WITH ORDINALITY AS a (t, n)))"
        " FROM pg_proc WHERE pronamespace = 'tide'::regnamespace"
        " AND prorettype <> 'trigger'::regtype ORDER BY 1"
    )
    return [row[0] for row in found]


def tables(tide: Database) -> list[str]:
    found = tide.execute(
        "SELECT format('tide.%I', relname) FROM pg_class"
        " WHERE relnamespace = 'tide'::regnamespace AND relkind IN ('r', 'S') ORDER BY 1"
    )
    return [row[0] for row in found]


def test_a_role_has_no_right_that_was_not_granted(tide: Database) -> None:
    with role(tide) as (name, session):
        for call in calls(tide):
            assert raises(session, f"SELECT {call}").state == DENIED, call
        # Not even with the right on the schema, which may have been granted for something else.
        tide.execute(f"GRANT USAGE ON SCHEMA tide TO {name}")
        assert len(calls(tide)) > 40
        for call in calls(tide):
            assert raises(session, f"SELECT {call}").state == DENIED, call
        for table in tables(tide):
            assert raises(session, f"SELECT * FROM {table}").state == DENIED, table


def test_a_publisher_may_publish_to_its_outbox_and_nothing_else(tide: Database) -> None:
    with role(tide) as (name, session):
        tide.execute("SELECT tide.outbox_grant_publish('o', %s)", [name])
        session.execute("SELECT tide.outbox_publish('o', '{}', 'k', '{\"a\": \"b\"}')")
        assert value(session, "SELECT tide.outbox_publish('o', '{}', 'k')") == 1
        assert raises(session, "SELECT tide.outbox_publish('o', null)").state == "TD005"
        assert raises(session, "SELECT tide.outbox_publish('o', '1', '')").state == "TD010"
        assert raises(session, "SELECT tide.outbox_publish('nope', '1')").state == "TD002"
        assert raises(session, "SELECT tide.outbox_publish('no-pe', '1')").state == "TD001"
        assert raises(session, "SELECT tide.outbox_publish('other', '{}')").state == DENIED
        for table in tables(tide):
            assert raises(session, f"SELECT 1 FROM {table}").state == DENIED, table
        for statement in (
            "INSERT INTO tide.outbox_o (payload, headers) VALUES ('{}', '{}')",
            "UPDATE tide.outbox_o SET payload = '1'",
            "DELETE FROM tide.outbox_o",
            "TRUNCATE tide.outbox_o",
            "SELECT nextval('tide.ids_o')",
            "CREATE TABLE tide.mine ()",
        ):
            assert raises(session, statement).state == DENIED, statement
        allowed = []
        for call in calls(tide):
            try:
                session.execute(f"SELECT {call}")
            except psycopg.Error as error:
                if error.sqlstate == DENIED:
                    continue
            allowed.append(call.partition("(")[0])
        assert allowed == ["tide._check_name", "tide.append_o", "tide.outbox_publish"]
        status = value(tide, "SELECT tide.outbox_status('o')")
        assert status["publishers"] == [name]
        tide.execute("SELECT tide.outbox_revoke_publish('o', %s)", [name])
        assert raises(session, "SELECT tide.outbox_publish('o', '{}')").state == DENIED
        assert value(tide, "SELECT tide.outbox_status('o')")["publishers"] == []


def test_a_grant_lasts_while_the_outbox_is_switched(tide: Database) -> None:
    with role(tide) as (name, session):
        tide.execute("SELECT tide.outbox_grant_publish('o', %s)", [name])
        tide.execute("SELECT tide.outbox_disable('o')")
        assert raises(session, "SELECT tide.outbox_publish('o', '{}')").state == "TD004"
        assert raises(session, "SELECT tide.outbox_publish('other', '{}')").state == DENIED
        tide.execute("SELECT tide.outbox_enable('o')")
        session.execute("SELECT tide.outbox_publish('o', '{}')")


def test_grants_at_the_same_time_are_one_after_the_other(tide: Database) -> None:
    with role(tide) as (name, session), tide.connect() as first, tide.connect() as second:
        grant = "SELECT tide.outbox_grant_publish(%s, %s)"
        first.execute(grant, ["o", name])
        thread = threading.Thread(target=second.execute, args=(grant, ["other", name]), daemon=True)
        thread.start()
        blocked, pid = "SELECT pg_blocking_pids(%s) <> '{}'", second.info.backend_pid
        await_true(lambda: value(tide, blocked, pid), what="the second grant waits for the first")
        first.commit()
        await_end(thread)
        second.commit()
        for outbox in ("o", "other"):
            session.execute("SELECT tide.outbox_publish(%s, '{}')", [outbox])


def test_a_search_path_with_traps_changes_nothing(tide: Database) -> None:
    with role(tide) as (name, session):
        tide.execute("SELECT tide.outbox_grant_publish('o', %s)", [name])
        tide.execute(f"CREATE SCHEMA traps AUTHORIZATION {name}")
        session.execute(
            "CREATE FUNCTION traps.trap(jsonb, jsonb) RETURNS bool LANGUAGE plpgsql AS"
            " 'BEGIN RAISE ''trapped''; END';"
            "CREATE OPERATOR traps.<> (LEFTARG = jsonb, RIGHTARG = jsonb, FUNCTION = traps.trap);"
            "CREATE FUNCTION traps.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS"
            " 'BEGIN RAISE ''trapped''; END';"
            "CREATE FUNCTION traps.quote_ident(text) RETURNS text LANGUAGE plpgsql AS"
            " 'BEGIN RAISE ''trapped''; END';"
            "SET search_path = traps, pg_catalog"
        )
        session.execute("SELECT tide.outbox_publish('o', '{}', 'k', '{\"a\": \"b\"}')")
        session.execute("SELECT tide.append_o('{}', 'l', '{\"a\": \"b\"}')")


def test_every_function_has_its_search_path_pinned(tide: Database) -> None:
    loose = tide.execute(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'tide'::regnamespace AND NOT"
        " coalesce(proconfig, '{}') @> ARRAY['search_path=pg_catalog, pg_temp']"
    )
    assert loose == []


def test_a_worker_may_work_through_its_inbox_and_nothing_else(tide: Database) -> None:
    tide.execute("SELECT tide.inbox_create('j')")
    tide.execute("INSERT INTO tide.inbox_i (message_id, subject) VALUES ('a', 's'), ('b', 's')")
    with role(tide) as (name, session):
        tide.execute("SELECT tide.inbox_grant_process('i', %s)", [name])
        take = "SELECT message_id FROM tide.inbox_i WHERE status = 'pending' FOR UPDATE SKIP LOCKED"
        assert session.execute(take) == [("a",), ("b",)]
        session.execute("SELECT tide.inbox_mark_processed('i', 'a')")
        session.execute("SELECT tide.inbox_mark_failed('i', 2, 'oh')")
        session.execute("SELECT tide.inbox_replay('i')")
        assert raises(session, "SELECT tide.inbox_mark_processed('k', 'a')").state == "TD008"
        for statement in (
            "SELECT tide.inbox_mark_processed('j', 'a')",
            "SELECT * FROM tide.inbox_j",
            "DELETE FROM tide.inbox_i",
            "UPDATE tide.inbox_i SET payload = '1'",
            "SELECT tide.inbox_drop('i')",
            "SELECT tide.outbox_publish('o', '{}')",
            "SELECT config FROM tide.relays",
        ):
            assert raises(session, statement).state == DENIED, statement
        tide.execute("SELECT tide.inbox_revoke_process('i', %s)", [name])
        assert raises(session, "SELECT tide.inbox_mark_processed('i', 'a')").state == DENIED
        assert raises(session, take).state == DENIED


def test_a_relays_role_may_do_what_relays_do_also_later(tide: Database) -> None:
    with role(tide) as (name, session):
        tide.execute("SELECT tide.relay_grant(%s)", [name])
        tide.execute("SELECT tide.outbox_create('later'), tide.inbox_create('later')")
        for box in ("o", "later"):
            session.execute(f"SELECT * FROM tide.outbox_{box}")
            session.execute(f"SELECT tide.outbox_sweep('{box}')")
        for box in ("i", "later"):
            session.execute(
                f"INSERT INTO tide.inbox_{box} (message_id, subject) VALUES ('a', 's')"
                " ON CONFLICT (message_id) DO NOTHING"
            )
            session.execute(f"SELECT tide.inbox_sweep('{box}')")
        session.execute(
            "INSERT INTO tide.checkpoints (relay_group, pipeline, outbox) SELECT relay_group, pipeline,"
            " outbox FROM tide.relays ON CONFLICT (relay_group, pipeline, outbox)"
            " DO UPDATE SET delivered = 1"
        )
        assert session._connection is not None
        assert find_inboxes(session._connection) == []
        assert raises(session, "SELECT tide.relay_delete('p')").state == DENIED
        assert raises(session, "DELETE FROM tide.outbox_o").state == DENIED
        for box in ("o", "later"):
            insert = f"INSERT INTO tide.outbox_{box} (payload, headers) VALUES ('1', '{{}}')"
            assert raises(session, insert).state == DENIED
