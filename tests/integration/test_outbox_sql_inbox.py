"""Inboxes by SQL: messages are marked, tried again, given up, replayed and swept."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.outbox_sql import SOURCE, raises, value
from tests.waits import await_end, await_true

from penstock.embedded.handles import Database


@pytest.fixture
def tide(database: Database) -> Database:
    database.execute("SELECT tide.inbox_create('i', max_retries => 2)")
    return database


def receive(tide: Database, *messages: str) -> None:
    for message in messages:
        tide.execute(
            "INSERT INTO tide.inbox_i (message_id, subject, payload) VALUES (%s, 's', '{}')"
            " ON CONFLICT (message_id) DO NOTHING",
            [message],
        )


def state(tide: Database, message: str) -> tuple[str, int, str | None, bool]:
    ((status, attempts, error, done),) = tide.execute(
        "SELECT status, attempts, error, processed_at IS NOT NULL FROM tide.inbox_i"
        " WHERE message_id = %s",
        [message],
    )
    return status, attempts, error, done


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("inbox_create('i-j')", "TD001"),
        ("inbox_create('i')", "TD003"),
        ("inbox_create('j', max_retries => -1)", "TD011"),
        ("inbox_create('j', retention_hours => null)", "TD011"),
        ("inbox_drop('j')", "TD008"),
        ("inbox_status('j')", "TD008"),
        ("inbox_sweep('j')", "TD008"),
        ("inbox_replay('j')", "TD008"),
        ("inbox_replay('i', 'none')", "TD013"),
        ("inbox_mark_processed('j', 'a')", "TD008"),
        ("inbox_mark_processed('i', 'a')", "TD013"),
        ("inbox_mark_processed('i', 7)", "TD013"),
        ("inbox_mark_processed('i', null::text)", "TD013"),
        ("inbox_mark_failed('i', 7, 'x')", "TD013"),
        ("inbox_mark_failed(null, 'a', 'x')", "TD001"),
        ("inbox_grant_process('i', 'unknown')", "TD014"),
    ],
)
def test_each_mistake_has_its_state_and_its_hint(tide: Database, call: str, code: str) -> None:
    raised = raises(tide, f"SELECT tide.{call}")
    assert raised.state == code, raised
    assert raised.hint


def test_a_message_is_there_once_and_can_be_done(tide: Database) -> None:
    receive(tide, "a", "a")
    assert state(tide, "a") == ("pending", 0, None, False)
    tide.execute("SELECT tide.inbox_mark_processed('i', 'a')")
    assert state(tide, "a") == ("processed", 1, None, True)
    receive(tide, "a")
    # Marks that come late change nothing.
    tide.execute("SELECT tide.inbox_mark_processed('i', 'a')")
    assert value(tide, "SELECT tide.inbox_mark_failed('i', 'a', 'late')") == "processed"
    assert state(tide, "a") == ("processed", 1, None, True)


def test_a_message_that_fails_too_often_is_a_dead_letter_until_it_is_replayed(
    tide: Database,
) -> None:
    receive(tide, "a", "b", "c")
    failed = "SELECT tide.inbox_mark_failed('i', %s, 'oh')"
    assert value(tide, failed, "a") == "pending"
    assert state(tide, "a") == ("pending", 1, "oh", False)
    assert value(tide, failed, "a") == "failed"
    assert [value(tide, failed, 2) for _ in "12"] == ["pending", "failed"]
    status = value(tide, "SELECT tide.inbox_status('i')")
    assert (status["pending"], status["processed"], status["failed"]) == (1, 0, 2)
    assert value(tide, "SELECT tide.inbox_replay('i', 'a')") == 1
    assert state(tide, "a") == ("pending", 0, None, False)
    assert state(tide, "b")[0] == "failed"
    assert value(tide, "SELECT tide.inbox_replay('i')") == 1
    assert value(tide, "SELECT tide.inbox_replay('i')") == 0
    tide.execute("SELECT tide.inbox_mark_processed('i', 2)")
    assert state(tide, "b") == ("processed", 1, None, True)


def test_a_dead_letter_can_still_be_marked_as_done(tide: Database) -> None:
    receive(tide, "a")
    for _ in range(2):
        tide.execute("SELECT tide.inbox_mark_failed('i', 'a', 'oh')")
    tide.execute("SELECT tide.inbox_mark_processed('i', 'a')")
    assert state(tide, "a") == ("processed", 3, None, True)


def test_the_states_follow_a_model(tide: Database) -> None:
    receive(tide, "m")

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=st.lists(st.sampled_from(["processed", "failed", "replay"]), max_size=8))
    def check(steps: list[str]) -> None:
        tide.execute("UPDATE tide.inbox_i SET status = 'pending', attempts = 0, error = NULL,"
                     " processed_at = NULL")  # fmt: skip
        status, attempts = "pending", 0
        for step in steps:
            if step == "replay":
                tide.execute("SELECT tide.inbox_replay('i')")
                status, attempts = ("pending", 0) if status == "failed" else (status, attempts)
                continue
            args = "'i', 'm'" if step == "processed" else "'i', 'm', 'x'"
            tide.execute(f"SELECT tide.inbox_mark_{step}({args})")
            if status != "processed":
                attempts += 1
                bad = "failed" if attempts >= 2 else "pending"
                status = "processed" if step == "processed" else bad
        assert state(tide, "m")[:2] == (status, attempts)
        assert state(tide, "m")[3] is (status == "processed")

    check()


def test_only_what_was_processed_long_ago_is_swept(tide: Database) -> None:
    receive(tide, "a", "b", "c")
    tide.execute("SELECT tide.inbox_mark_processed('i', 'a'), tide.inbox_mark_processed('i', 'b')")
    tide.execute(
        "UPDATE tide.inbox_i SET received_at = received_at - interval '1 year',"
        " processed_at = processed_at - CASE message_id WHEN 'a' THEN interval '8 days' ELSE '0' END"
    )
    assert value(tide, "SELECT tide.inbox_sweep('i')") == 1
    assert tide.execute("SELECT message_id FROM tide.inbox_i ORDER BY 1") == [("b",), ("c",)]


def test_a_sweep_ends_after_many(tide: Database) -> None:
    tide.execute(
        "INSERT INTO tide.inbox_i (message_id, subject, status, processed_at)"
        " SELECT n, 's', 'processed', now() - interval '9 days' FROM generate_series(1, 100010) n"
    )
    assert value(tide, "SELECT tide.inbox_sweep('i')") == 100000
    assert value(tide, "SELECT tide.inbox_sweep('i')") == 10


IN_ORDER = """
select id, subject, message_id from tide.inbox_i i
where status = 'pending' and not exists (
    select from tide.inbox_i b where b.status = 'pending' and b.subject = i.subject and b.id < i.id)
order by id limit 10 for update skip locked
"""
ANY_ORDER = """
select id, subject, message_id from tide.inbox_i where status = 'pending'
order by id limit 10 for update skip locked
"""


@pytest.mark.parametrize("take", [ANY_ORDER, IN_ORDER])
def test_four_workers_do_each_message_once(tide: Database, take: str) -> None:
    """By the reader of the docs; one that fails is tried again, and at last given up."""
    receive(tide, *(f"m{number}" for number in range(60)))
    tide.execute("UPDATE tide.inbox_i SET subject = 's' || id % 7")
    tide.execute("CREATE TABLE public.done (number serial, id bigint, subject text)")

    def work() -> None:
        with tide.connect() as connection:
            while connection.execute(
                "SELECT 1 FROM tide.inbox_i WHERE status = 'pending'"
            ).fetchone():
                failed = []
                for number, subject, message in connection.execute(take.encode()).fetchall():
                    if message in ("m11", "m30"):
                        failed.append(number)
                        continue
                    connection.execute(
                        "INSERT INTO public.done (id, subject) VALUES (%s, %s)", [number, subject]
                    )
                    connection.execute("SELECT tide.inbox_mark_processed('i', %s)", [number])
                connection.commit()
                for number in failed:
                    connection.execute(
                        "SELECT tide.inbox_mark_failed('i', %s::bigint, 'oh')", [number]
                    )
                connection.commit()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    await_end(*threads)
    done = tide.execute("SELECT id, subject FROM public.done ORDER BY number")
    assert sorted(number for number, _ in done) == [n for n in range(1, 61) if n not in (12, 31)]
    assert [state(tide, m)[0] for m in ("m11", "m30")] == ["failed", "failed"]
    if take == IN_ORDER:
        for subject in range(7):
            ids = [number for number, of in done if of == f"s{subject}"]
            assert ids == sorted(ids)
    assert value(tide, "SELECT tide.inbox_replay('i')") == 2


def test_two_that_fail_one_message_at_once_are_both_counted(tide: Database) -> None:
    receive(tide, "a")
    failed = "SELECT tide.inbox_mark_failed('i', 'a', 'oh')"
    with tide.connect() as one:
        assert one.execute(failed).fetchone() == ("pending",)
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(value(tide, failed)), daemon=True)
        thread.start()
        with tide.connect(autocommit=True) as watcher:
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            await_true(
                lambda: watcher.execute(waiting).fetchone() != (0,),
                what="the second failure waits for the first",
            )
        one.commit()
        await_end(thread)
    assert found == ["failed"]
    assert state(tide, "a") == ("failed", 2, "oh", False)


def test_dropping_asks_where_something_fills_it(tide: Database) -> None:
    tide.execute("SELECT tide.relay_set_inbox('in', 'i', 'g', %s)", [json.dumps(SOURCE)])
    (found,) = value(tide, "SELECT tide.inbox_status('i')")["pipelines"]
    assert (found["pipeline"], found["direction"]) == ("in", "in")
    raised = raises(tide, "SELECT tide.inbox_drop('i')")
    assert (raised.state, "force => true" in raised.hint) == ("TD012", True)
    tide.execute("SELECT tide.inbox_drop('i', force => true)")
    tide.execute("SELECT tide.inbox_create('i')")
    assert tide.execute("SELECT * FROM tide.relay_list()") == []
