"""Outboxes by SQL: the example of the issue, publishing, dedup keys, retention, status."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.outbox_sql import (
    delivered,
    ids,
    lease,
    pipeline,
    quoted,
    raises,
    value,
)
from tests.waits import await_end, await_true

from penstock.embedded.handles import Database
from penstock.outbox.pipelines import find

EXAMPLE = """
select tide.outbox_create('notifications', retention_hours => 24);
select tide.relay_set_outbox('notify', 'notifications', 'nats-group',
  '{"sink_type":"nats","url":"${env:NATS_URL}","subject":"notifications.{op}","stream":"NOTIFICATIONS"}'::jsonb);
select tide.relay_enable('notify');
begin;
  insert into orders values (555);
  select tide.outbox_publish('notifications', '{"type":"order.shipped"}', 'ord-555-shipped');
commit;
"""


@pytest.fixture
def tide(database: Database) -> Database:
    return database


def test_the_example_runs_as_it_is_written(tide: Database) -> None:
    tide.execute("CREATE TABLE orders (id int)")
    tide.execute(EXAMPLE)
    rows = tide.execute(
        "SELECT id, dedup_key, payload, headers, xid::text, created_at"
        " FROM tide.outbox_notifications"
    )
    ((number, key, payload, headers, xid, created_at),) = rows
    assert (number, key, payload, headers) == (1, "ord-555-shipped", {"type": "order.shipped"}, {})
    assert xid == value(tide, "SELECT xmin::text FROM tide.outbox_notifications")
    assert isinstance(created_at, datetime)
    published = "SELECT tablename::text FROM pg_publication_tables WHERE pubname = 'tide'"
    assert value(tide, published) == "outbox_notifications"
    assert value(tide, "SELECT enabled FROM tide.relay_list()") is True


def test_a_rollback_publishes_nothing(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o')")
    with tide.connect() as connection:
        connection.execute("SELECT tide.outbox_publish('o', '1')")
        connection.rollback()
        connection.execute("SAVEPOINT s")
        connection.execute("SELECT tide.outbox_publish('o', '2')")
        connection.execute("ROLLBACK TO s")
        connection.execute("SELECT tide.outbox_publish('o', '3')")
    assert value(tide, "SELECT payload FROM tide.outbox_o") == 3


@pytest.mark.parametrize(
    ("call", "code", "hint"),
    [
        ("outbox_publish('o-p', '{}')", "TD001", "digits and _"),
        ("outbox_publish(null, '{}')", "TD001", "name"),
        ("outbox_publish('', '{}')", "TD001", "letter"),
        (f"outbox_publish('{'o' * 57}', '{{}}')", "TD001", "56"),
        ("outbox_publish('p', '{}')", "TD002", "outbox_create('p')"),
        ("outbox_publish('off', '{}')", "TD004", "outbox_enable('off')"),
        ("outbox_publish('o', null)", "TD005", "JSON"),
        ("outbox_publish('o', '{}', null, '[]')", "TD009", "Name"),
        ("outbox_publish('o', '{}', null, 'null')", "TD009", "Name"),
        ("""outbox_publish('o', '{}', null, '{"a b": "1"}')""", "TD009", "blanks"),
        ("""outbox_publish('o', '{}', null, '{"": "1"}')""", "TD009", "blanks"),
        ("""outbox_publish('o', '{}', null, '{"a": "1\\r\\nb: 2"}')""", "TD009", "payload"),
        ("""outbox_publish('o', '{}', null, '{"a": ["1", "\\n"]}')""", "TD009", "payload"),
        ("""outbox_publish('o', '{}', null, '{"NATS-Rollup": "all"}')""", "TD009", "dedup_key"),
        ("outbox_publish('o', '{}', '')", "TD010", "NULL"),
        ("outbox_publish('o', '{}', ' a')", "TD010", "blank"),
        ("outbox_publish('o', '{}', E'a\\nb')", "TD010", "control"),
        (f"outbox_publish('o', '{{}}', '{'k' * 1001}')", "TD010", "hash"),
        ("outbox_publish('o', '{}', op => 'upsert')", "TD009", '"update"'),
        ("""outbox_publish('o', '{}', null, '{"op": "x"}')""", "TD009", '"update"'),
        ("""outbox_publish('o', '{}', null, '{"op": "insert"}', 'delete')""", "TD009", "one of"),
        ("outbox_publish('o', '{}', null, '[]', 'insert')", "TD009", "Name"),
        ("outbox_create('1o')", "TD001", "Start with a letter"),
        ("outbox_create('o\n')", "TD001", "Start with a letter"),
        ("outbox_create('o', 24)", "TD003", "another name"),
        ("outbox_create('x', -1)", "TD011", "hours"),
        ("outbox_create('x', null)", "TD011", "hours"),
        ("outbox_drop('offf')", "TD002", "'off'"),
        ("outbox_sweep('nothing_like_it')", "TD002", "'o', 'off'"),
        ("outbox_status(null)", "TD001", "name"),
        ("outbox_enable('p')", "TD002", "o"),
        ("outbox_disable('p')", "TD002", "o"),
        ("outbox_grant_publish('o', 'no one''s')", "TD014", "CREATE ROLE"),
        ("outbox_grant_publish('o', 'public')", "TD014", "PUBLIC"),
        ("outbox_revoke_publish('o', null)", "TD014", "role"),
        ("relay_grant('unknown')", "TD014", "role"),
    ],
)
def test_each_mistake_has_its_state_and_its_hint(
    tide: Database, call: str, code: str, hint: str
) -> None:
    tide.execute("SELECT tide.outbox_create('o'), tide.outbox_create('off')")
    tide.execute("SELECT tide.outbox_disable('off')")
    raised = raises(tide, f"SELECT tide.{call}")
    assert raised.state == code, raised
    assert hint in raised.hint
    assert ids(tide, "o") == []


def test_an_operation_goes_along_as_a_header(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o')")
    for arguments in (
        "op => 'update'", "headers => null, op => 'delete'", """headers => '{"op": "update"}'""",
        """headers => '{"op": "update", "a": 1}', op => 'update'""", "op => null",
        """headers => '{"op": null}', op => 'insert'""",
    ):  # fmt: skip
        tide.execute(f"SELECT tide.outbox_publish('o', '{{}}', {arguments})")
    assert [row[0] for row in tide.execute("SELECT headers FROM tide.outbox_o ORDER BY id")] == [
        {"op": "update"}, {"op": "delete"}, {"op": "update"}, {"op": "update", "a": 1}, {},
        {"op": "insert"},
    ]  # fmt: skip


def test_what_may_be_published(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o')")
    publish = "SELECT tide.outbox_publish('o', %s, %s, %s)"
    headers = {"Trace": "a", "N": 1.5, "B": True, "L": ["a", "b"], "Z": None, "path": "C:\\new\\r"}
    tide.execute(publish, ["null", None, json.dumps(headers)])
    tide.execute(publish, ['"text"', "a b:ö:17", "{}"])
    tide.execute(publish, ["[1.10]", "k" * 1000, None])
    tide.execute("SELECT tide.outbox_publish(name => 'o', payload => '{}', headers => '{}')")
    found = tide.execute("SELECT payload::text, headers FROM tide.outbox_o ORDER BY id")
    assert found == [("null", headers), ('"text"', {}), ("[1.10]", {}), ("{}", {})]


def test_a_key_that_is_there_gives_the_first_messages_id(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o'), tide.outbox_create('p')")
    first = value(tide, "SELECT tide.outbox_publish('o', '1', 'k')")
    assert value(tide, "SELECT tide.outbox_publish('o', '2', 'k')") == first
    assert tide.execute("SELECT payload FROM tide.outbox_o") == [(1,)]
    tide.execute("SELECT tide.outbox_publish('p', '3', 'k')")
    assert tide.execute("SELECT payload FROM tide.outbox_p") == [(3,)]


def test_two_with_one_key_at_once_wait_for_each_other_and_one_counts(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o')")
    for ends in ("commit", "rollback"):
        found: list[Any] = []
        with tide.connect() as first, tide.connect(autocommit=True) as second:
            publish = "SELECT tide.outbox_publish('o', '1', %s)"
            (number,) = first.execute(publish, [ends]).fetchone() or (None,)
            thread = _in_thread(second, publish, ends, found)
            _await_waiting(tide, second)
            getattr(first, ends)()
            await_end(thread)
        assert (found == [number]) is (ends == "commit")
        assert ids(tide, "o")[-1:] == found
        assert value(tide, "SELECT count(*) FROM tide.outbox_o WHERE dedup_key = %s", ends) == 1


def test_publishers_do_not_wait_for_an_open_transaction_nor_for_a_switch(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o')")
    with tide.connect() as open_one, tide.connect(autocommit=True) as other:
        other.execute("SET lock_timeout = '1ms'")
        open_one.execute("SELECT tide.outbox_publish('o', '1')")
        open_one.execute("SELECT tide.outbox_publish('o', '2', 'a')")
        other.execute("SELECT tide.outbox_publish('o', '3')")
        other.execute("SELECT tide.outbox_publish('o', '4', 'b')")
        other.execute("SELECT tide.outbox_sweep('o')")
        other.execute("SELECT tide.outbox_status('o')")
        other.execute("SELECT tide.outbox_disable('o')")
        with pytest.raises(psycopg.Error, match="disabled"):
            other.execute("SELECT tide.outbox_publish('o', '5')")
        other.execute("SELECT tide.outbox_enable('o')")
        other.execute("SELECT tide.outbox_publish('o', '6')")
    assert len(ids(tide, "o")) == 5


NAMES = st.one_of(
    st.text(max_size=70),
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,55}", fullmatch=True),
    st.from_regex(r"[a-z]{1,3}(_pkey|_id_seq|_key|'|\"|;|--|\$tide\$|%I|\\)", fullmatch=True),
    st.sampled_from(["es", "create", "publish", "select", "Table", "x" * 56, "x" * 57, "a;drop"]),
).filter(lambda name: "\0" not in name)


def test_any_name_is_taken_or_refused_and_nothing_else(tide: Database) -> None:
    tide.execute("CREATE TABLE public.canary (id int)")
    objects = "SELECT count(*) FROM pg_class WHERE relnamespace = 'tide'::regnamespace"
    before = value(tide, objects)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(name=NAMES, other=NAMES)
    def check(name: str, other: str) -> None:
        made = []
        for one in {name, other}:
            valid = one.isascii() and one.isidentifier() and len(one) <= 56
            create = "SELECT tide.outbox_create(%s), tide.inbox_create(%s)"
            if valid:
                tide.execute(create, [one, one])
                made.append(one)
            else:
                assert raises(tide, create, one, one).state == "TD001"
        for one in {name, other} - set(made):
            assert raises(tide, "SELECT tide.outbox_publish(%s, '{}')", one).state == "TD001"
        for one in made:
            tide.execute("SELECT tide.outbox_publish(%s, '{}', 'k')", [one])
            tide.execute("SELECT tide.outbox_disable(%s), tide.outbox_enable(%s)", [one, one])
            tide.execute("SELECT tide.outbox_sweep(%s), tide.inbox_sweep(%s)", [one, one])
            assert value(tide, "SELECT tide.outbox_status(%s)", one)["rows"] == 1
            table = f"tide.{quoted(f'outbox_{one}')}"
            assert value(tide, f"SELECT count(*) FROM {table}") == 1
        for one in made:
            tide.execute("SELECT tide.outbox_drop(%s), tide.inbox_drop(%s)", [one, one])
        assert value(tide, objects) == before

    check()
    assert value(tide, "SELECT count(*) FROM public.canary") == 0


def test_no_name_is_taken_by_what_hangs_on_another_outbox(tide: Database) -> None:
    for name in ("a", "a_pkey", "a_id_seq", "a_key", "a_dedup_key_key", "A"):
        tide.execute("SELECT tide.outbox_create(%s), tide.inbox_create(%s)", [name, name])
        tide.execute("SELECT tide.outbox_publish(%s, '{}', 'k')", [name])


def _age(tide: Database, hours: float) -> None:
    tide.execute(f"UPDATE tide.outbox_o SET created_at = created_at - interval '{hours} hours'")


def _sweep(tide: Database) -> list[int]:
    before = ids(tide, "o")
    swept = value(tide, "SELECT tide.outbox_sweep('o')")
    left = ids(tide, "o")
    assert len(before) - len(left) == swept
    return left


def test_without_pipelines_age_alone_counts(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o', 2)")
    tide.execute("SELECT tide.outbox_publish('o', '1', 'k')")
    _age(tide, 3)
    tide.execute("SELECT tide.outbox_publish('o', '2')")
    assert _sweep(tide) == [2]
    assert value(tide, "SELECT tide.outbox_publish('o', '3', 'k')") == 3


def test_every_pipeline_must_have_delivered(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o', 1)")
    pipeline(tide, "p", "o")
    pipeline(tide, "q", "o", group="other")
    with tide.connect() as late:
        late.execute("SELECT tide.outbox_publish('o', '1')")
        tide.execute("SELECT tide.outbox_publish('o', '2')")
        snapshot = value(tide, "SELECT pg_current_snapshot()::text")
    _age(tide, 2)
    assert _sweep(tide) == [1, 2]
    delivered(tide, "p")
    assert _sweep(tide) == [1, 2]
    # The first row was committed after this snapshot was taken, though its id is lower.
    delivered(tide, "q", snapshot)
    assert _sweep(tide) == [1]
    delivered(tide, "q")
    assert _sweep(tide) == []


def test_a_pipeline_that_starts_at_the_end_holds_only_what_comes(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o', 1)")
    tide.execute("SELECT tide.outbox_publish('o', '1')")
    pipeline(tide, "p", "o", start="end")
    tide.execute("SELECT tide.outbox_publish('o', '2')")
    _age(tide, 2)
    assert _sweep(tide) == [2]
    tide.execute("SELECT tide.relay_delete('p')")
    assert _sweep(tide) == []


def test_a_place_from_another_cluster_lets_nothing_go(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o', 0)")
    pipeline(tide, "p", "o")
    tide.execute("SELECT tide.outbox_publish('o', '1')")
    delivered(tide, "p", "900000000:900000000:")
    assert _sweep(tide) == [1]
    with tide.connect() as connection:
        assert [found.snapshot for found in find(connection)] == [None]
    delivered(tide, "p")
    with tide.connect() as connection:
        assert [found.snapshot is None for found in find(connection)] == [False]


def test_a_sweep_goes_through_all_windows(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o', 0)")
    tide.execute(
        "INSERT INTO tide.outbox_o (payload, headers)"
        " SELECT '1', '{}' FROM generate_series(1, 25000)"
    )
    assert value(tide, "SELECT tide.outbox_sweep('o')") == 25000
    assert value(tide, "SELECT tide.outbox_sweep('o')") == 0


def test_a_sweep_ends_after_many(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o', 0)")
    tide.execute(
        "INSERT INTO tide.outbox_o (payload, headers)"
        " SELECT '1', '{}' FROM generate_series(1, 100010)"
    )
    assert value(tide, "SELECT tide.outbox_sweep('o')") == 100000
    assert len(ids(tide, "o")) == 10
    assert value(tide, "SELECT tide.outbox_sweep('o')") == 10


def test_times_of_a_clock_that_ran_ahead_hold_up_nothing_else(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o', 1)")
    tide.execute(
        "INSERT INTO tide.outbox_o (payload, headers, created_at)"
        " SELECT '1', '{}', now() + interval '1 year' FROM generate_series(1, 10000)"
    )
    tide.execute("SELECT tide.outbox_publish('o', '2')")
    tide.execute("UPDATE tide.outbox_o SET created_at = now() - interval '2 h' WHERE id = 10001")
    assert len(_sweep(tide)) == 10000


def test_ids_go_on_where_an_outbox_of_the_name_was_dropped(tide: Database) -> None:
    """No id names two messages."""
    publish = "SELECT tide.outbox_publish('o', '1')"
    tide.execute("SELECT tide.outbox_create('o')")
    assert [value(tide, publish) for _ in range(3)] == [1, 2, 3]
    tide.execute("SELECT tide.outbox_drop('o'), tide.outbox_create('p')")
    # One that nothing was published to forgets nothing.
    for _ in range(2):
        tide.execute("SELECT tide.outbox_create('o')")
        tide.execute("SELECT tide.outbox_drop('o')")
    with tide.connect() as connection:
        connection.execute("SELECT tide.outbox_create('o')")
        connection.execute(publish)
        connection.rollback()
    tide.execute("SELECT tide.outbox_create('o')")
    assert [value(tide, publish) for _ in range(2)] == [4, 5]
    assert value(tide, "SELECT tide.outbox_publish('p', '1')") == 1


def test_a_publisher_that_is_dropped_meanwhile_leaves_its_id(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o')")
    with tide.connect() as publisher, tide.connect(autocommit=True) as other:
        publisher.execute("SELECT tide.outbox_publish('o', '1')")
        thread = _in_thread(other, "SELECT tide.outbox_drop(%s)", "o", [])
        _await_waiting(tide, other)
        publisher.execute("SELECT tide.outbox_publish('o', '2')")
        publisher.commit()
        await_end(thread)
    tide.execute("SELECT tide.outbox_create('o')")
    assert value(tide, "SELECT tide.outbox_publish('o', '3')") == 3


def test_the_documented_remedy_after_a_restore(tide: Database) -> None:
    page = Path(__file__).parents[2] / "docs/how-to/outbox.md"
    section = page.read_text().split("## Restore a database")[1].split("## ")[0]
    ids_ahead, mend = re.findall(r"```sql\n(.+?)```", section, re.S)
    tide.execute("SELECT tide.outbox_create('notifications')")
    publish = "SELECT tide.outbox_publish('notifications', '1')"
    tide.execute(publish)
    tide.execute(ids_ahead)
    assert value(tide, publish) > 1000000
    # Of a cluster that had counted further.
    tide.execute("UPDATE tide.outbox_notifications SET xid = '900000000'")
    visible = """SELECT bool_and(pg_visible_in_snapshot(xid, pg_current_snapshot()))
                 FROM tide.outbox_notifications"""
    assert value(tide, visible) is False
    tide.execute(mend)
    assert value(tide, visible) is True


def test_a_transaction_that_was_open_for_long_is_kept_until_it_is_delivered(tide: Database) -> None:
    """Its ids are the lowest and its times the oldest, and it is committed after all the others."""
    tide.execute("SELECT tide.outbox_create('o', 1)")
    for name, group in (("p", "g"), ("q", "g"), ("r", "other")):
        pipeline(tide, name, "o", group=group)
    with tide.connect() as late:
        late.execute("SELECT tide.outbox_publish('o', '1')")
        late.execute("UPDATE tide.outbox_o SET created_at = created_at - interval '9 hours'")
        for number in range(2, 5):
            tide.execute("SELECT tide.outbox_publish('o', %s)", [str(number)])
        _age(tide, 2)
        for name in "pqr":
            delivered(tide, name)
        assert _sweep(tide) == []
    assert ids(tide, "o") == [1]
    for name in "pqr":
        assert _sweep(tide) == [1]
        assert {h["pipeline"] for h in _held(tide)} >= {name}
        delivered(tide, name)
    assert (_sweep(tide), _held(tide)) == ([], [])


def _held(tide: Database) -> list[dict[str, str]]:
    held: list[dict[str, str]] = value(tide, "SELECT tide.outbox_status('o')")["held_by"]
    return held


def test_a_disabled_pipeline_holds_messages_and_the_status_counts_them(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o', 1)")
    pipeline(tide, "on", "o")
    pipeline(tide, "off", "o", group="other")
    pipeline(tide, "late", "o", start="end")
    tide.execute("SELECT tide.relay_enable('on')")
    tide.execute("SELECT tide.outbox_publish('o', '1')")
    delivered(tide, "off")
    for number in "23":
        tide.execute("SELECT tide.outbox_publish('o', %s)", [number])
    delivered(tide, "on")
    delivered(tide, "late")
    _age(tide, 2)
    assert _sweep(tide) == [2, 3]
    (held,) = _held(tide)
    assert (held["pipeline"], held["reason"]) == ("off", "disabled")
    of = value(tide, "SELECT tide.outbox_status('o')")["pipelines"]
    assert {p["pipeline"]: p["pending"] for p in of} == {"on": 0, "off": 2, "late": 0}


def test_status_lists_the_pipelines_that_hold_messages(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o', 1)")
    status: Callable[[], Any] = lambda: value(tide, "SELECT tide.outbox_status('o')")  # noqa: E731 - it is passed on
    assert (status()["rows"], status()["held_by"], status()["oldest"]) == (0, [], None)
    pipeline(tide, "p", "o")
    for number in range(3):
        tide.execute("SELECT tide.outbox_publish('o', %s)", [str(number)])
    _age(tide, 2)
    found = status()
    assert (found["rows"], found["rows_exact"], found["overdue"]) == (3, True, True)
    assert found["pipelines"][0]["pending"] == 3
    (held,) = found["held_by"]
    assert (held["pipeline"], held["reason"]) == ("p", "disabled")
    assert "relay_enable('p')" in held["remedy"]
    tide.execute("SELECT tide.relay_enable('p')")
    assert "No relay has run the group g yet." in status()["held_by"][0]["reason"]
    lease(tide)
    tide.execute(
        "INSERT INTO tide.checkpoints (relay_group, pipeline, outbox, state, code, error, remedy)"
        " VALUES ('g', 'p', 'o', 'error', 'connection_refused', 'Nothing listens.', 'Start it.')"
    )
    assert status()["held_by"] == [
        {"pipeline": "p", "reason": "Nothing listens.", "remedy": "Start it."}
    ]
    delivered(tide, "p")
    found = status()
    assert (found["pipelines"][0]["pending"], found["held_by"]) == (0, [])
    assert _sweep(tide) == []


def test_dropping_is_refused_where_a_pipeline_reads(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('o')")
    pipeline(tide, "p", "o")
    raised = raises(tide, "SELECT tide.outbox_drop('o')")
    assert raised.state == "TD012"
    assert "relay_delete('p')" in raised.hint
    tide.execute("SELECT tide.outbox_drop('o', force => true)")
    assert tide.execute("SELECT * FROM tide.relay_list()") == []
    tide.execute("SELECT tide.outbox_create('o')")
    assert value(tide, "SELECT tide.outbox_publish('o', '{}')") == 1


def _in_thread(
    connection: psycopg.Connection[Any], publish: Any, key: str, found: list[Any]
) -> threading.Thread:
    def run() -> None:
        found.extend(connection.execute(publish, [key]).fetchone() or ())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _await_waiting(tide: Database, connection: psycopg.Connection[Any]) -> None:
    pid = connection.info.backend_pid
    await_true(
        lambda: value(tide, "SELECT cardinality(pg_blocking_pids(%s)) > 0", pid),
        what="the statement waits for another transaction",
    )
