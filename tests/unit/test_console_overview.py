"""The overview: which consumers stand on it, how streams lag, and what is offered about a problem."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.console.overview import MOST, _lags, _worst_consumers
from penstock.api.console.remedies import actionable, commands_in
from penstock.api.console.syncs import level_of
from penstock.postgres.connect import drop_slot

KNOWN = {
    "source": {"shop"}, "sink": {"orders", "a/b"}, "consumer": {"mail": {}}, "sync": {"billing"},
}  # fmt: skip


def http(lag: int) -> dict[str, Any]:
    return {"stream": "s", "type": "pull", "lag_messages": lag, "lag_seconds": 1.0, "in_flight": 2,
            "dead_letters": 3}  # fmt: skip


def test_the_worst_consumers_of_either_type_come_first() -> None:
    nats = {
        "out": {"stream": "s", "lag_messages": 500, "lag_seconds": 7.0, "dead_lettered": 7,
                "state": "attached"}
    }  # fmt: skip
    every = [*((f"c{n}", http(n)) for n in range(2 * MOST)), *nats.items()]
    parts = {"consumer s/c1": "degraded", "consumer s/c2": "failed", "consumer other/c3": "failed"}
    rows = _worst_consumers(every, nats, parts)
    names = [row["name"] for row in rows]
    rest = [f"c{n}" for n in range(2 * MOST - 1, -1, -1)]
    assert names == ["c2", "c1", "out", *rest][:MOST]
    assert [row["level"] for row in rows[:4]] == ["failed", "degraded", "ready", "ready"]
    shown = {"type": "nats", "dead_letters": 7, "lag_seconds": 7.0, "in_flight": None}
    assert rows[2].items() >= shown.items()
    assert rows[0] == {"name": "c2", "level": "failed", **http(2)}


def test_consumers_that_are_alike_keep_their_order() -> None:
    rows = _worst_consumers([("b", http(1)), ("a", http(1))], {}, {})
    assert [row["name"] for row in rows] == ["b", "a"]


def test_a_stream_lags_as_its_last_reader_does() -> None:
    late = {"stream": "s", "lag_messages": 2, "lag_seconds": 9.0}
    other = {"stream": "other", "lag_messages": 1, "lag_seconds": 0.5}
    assert _lags([("a", http(7)), ("b", late), ("c", other)]) == {
        "s": {"lag_messages": 7, "lag_seconds": 9.0},
        "other": {"lag_messages": 1, "lag_seconds": 0.5},
    }


@pytest.mark.parametrize(("remedy", "commands"), [
    ("Start nats-server there, or set `url` to where it is.", []),
    ("Correct the consumer.", []),
    ("Start nats-server: `penstock target show orders`.", ["penstock target show orders"]),
    ("Let it go on: penstock consumer resume mail.v2", ["penstock consumer resume mail.v2"]),
    ("Agree: penstock sync resume billing. Or sweep again: penstock sync run billing",
     ["penstock sync resume billing", "penstock sync run billing"]),
    ("Stop `penstock run` if it still runs, and recover the source. Run: penstock recover shop"
     " --config 'a b.yaml'", ["penstock recover shop --config 'a b.yaml'"]),
    ("Start penstock run again, which makes it.", []),
    ("See whether a process hangs (ps -o pid,stat,cmd): where one is killed, it starts again.",
     ["ps -o pid,stat,cmd"]),
    ("Repair the endpoint, then POST /v1/http-consumers/mail/resume.",
     ['curl -X POST -H "Authorization: Bearer $PENSTOCK_TOKEN"'
      ' "$PENSTOCK_URL/v1/http-consumers/mail/resume"']),
    ('ALTER ROLE "odd; one" REPLICATION', ['ALTER ROLE "odd; one" REPLICATION']),
    ("ALTER ROLE <role> REPLICATION.", ["ALTER ROLE <role> REPLICATION"]),
    ("ALTER ROLE <role> BYPASSRLS, or exempt the role.", ["ALTER ROLE <role> BYPASSRLS"]),
    ("ALTER SYSTEM SET wal_level = 'logical'; then restart Postgres (on Amazon RDS: set it there).",
     ["ALTER SYSTEM SET wal_level = 'logical';"]),
    (f"{drop_slot('a')} Delete the checkpoint.", ["SELECT pg_drop_replication_slot('a');"]),
    (f"Drop the slot ({drop_slot('a')}), and start again.",
     ["SELECT pg_drop_replication_slot('a');"]),
    ("Give it one: ALTER TABLE public.a ADD PRIMARY KEY (…), and publish it.",
     ["ALTER TABLE public.a ADD PRIMARY KEY (…)"]),
    ("ALTER TABLE <partition> REPLICA IDENTITY DEFAULT (or FULL).",
     ["ALTER TABLE <partition> REPLICA IDENTITY DEFAULT"]),
    ("Give t its own: ALTER PUBLICATION p DROP TABLE a, then ADD TABLE t WHERE (…); or not.",
     ["ALTER PUBLICATION p DROP TABLE a"]),
    ('GRANT SELECT ON "public"."a" TO reader', ['GRANT SELECT ON "public"."a" TO reader']),
    ("GRANT SELECT on the table to the source's role.", []),
    ("It is a VACUUM FULL or an ALTER TABLE, perhaps.", []),
    ("Name another in `store`, or DROP SCHEMA penstock CASCADE: sources go on.",
     ["DROP SCHEMA penstock CASCADE"]),
    ("End it: SELECT pid, query FROM pg_stat_activity; or again: SELECT pid, query FROM"
     " pg_stat_activity;", ["SELECT pid, query FROM pg_stat_activity;"]),
])  # fmt: skip
def test_what_a_remedy_says_is_there_to_copy(remedy: str, commands: list[str]) -> None:
    assert commands_in(remedy) == commands


@pytest.mark.parametrize(("subject", "code", "action", "link"), [
    ("consumer orders/mail", "paused", "overview/resume/mail", "consumers/mail"),
    ("consumer orders/mail", "disabled", "overview/resume/mail", "consumers/mail"),
    ("consumer orders/mail", "deliveries_fail", None, "consumers/mail"),
    ("consumer gone", "refused", None, None),
    ("sink orders", "paused", "sinks/orders/resume", "sinks/orders"),
    ("sink orders", "connection_refused", None, "sinks/orders"),
    ("sink a/b", "paused", "sinks/a%2Fb/resume", "sinks/a%2Fb"),
    ("source shop", "stalled", None, "sources/shop"),
    ("source gone", "slot_left", None, None),
    ("source syncs", "stalled", None, "syncs"),
    ("sync billing", "unauthorized", "syncs/billing/resume", "syncs/billing"),
    ("sync billing", "mass_delete", None, "syncs/billing/resume"),
    ("sync billing", "refused", None, "syncs/billing"),
    ("syncs", "query", None, "syncs"),
    ("backfill 7", "backfill_failed", "backfills/7/resume", "backfills"),
    ("store", "store_down", None, None),
    ("run", "java", None, None),
])  # fmt: skip
def test_a_problem_has_a_button_or_a_page(
    subject: str, code: str, action: str | None, link: str | None
) -> None:
    problem = {"subject": subject, "code": code, "remedy": "Do this.", "level": "degraded"}
    found = actionable(problem, KNOWN)
    assert found.items() >= problem.items()
    assert found["commands"] == []
    assert (found["action"] or {}).get("path") == action
    assert (found["link"] or {}).get("path") == link


def test_a_button_and_a_link_name_what_they_are_about() -> None:
    problem = {"subject": "sync billing", "code": "mass_delete", "remedy": ""}
    assert actionable(problem, KNOWN)["link"]["text"] == "Agree or not…"
    problem = {"subject": "backfill 7", "code": "backfill_failed", "remedy": ""}
    assert actionable(problem, KNOWN)["action"]["text"] == "Resume backfill 7"
    problem = {"subject": "sink orders", "code": "paused", "remedy": ""}
    assert actionable(problem, KNOWN)["link"]["text"] == "Open sink orders"


@pytest.mark.parametrize(("changes", "parts", "level"), [
    ({}, {}, "ready"),
    ({"refusal": {"reason": "no"}}, {}, "degraded"),
    ({"health": {"code": "unauthorized"}}, {}, "degraded"),
    ({"collections": [{"phase": "waiting"}]}, {}, "starting"),
    ({"collections": [{"phase": "waiting"}, {"phase": "polling"}]}, {}, "ready"),
    ({"collections": [{"phase": "waiting"}], "status": "paused"}, {}, "ready"),
    ({"collections": [{"phase": "waiting"}]}, {"sync billing": "ready"}, "ready"),
    ({}, {"sync billing": "degraded", "sync other": "failed"}, "degraded"),
])  # fmt: skip
def test_a_sync_is_as_the_status_has_it(
    changes: dict[str, Any], parts: dict[str, str], level: str
) -> None:
    sync = {
        "name": "billing", "refusal": None, "health": None, "status": "active",
        "collections": [{"phase": "polling"}], **changes,
    }  # fmt: skip
    assert level_of(sync, parts) == level
