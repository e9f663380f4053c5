"""What `penstock check` finds in filters, transforms and routes, and what `penstock run` refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.check import config as check
from penstock.config.file import load
from penstock.core.errors import SetupError
from penstock.core.finding import Finding
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.spark import planning

Look = Callable[..., list[Finding]]


@pytest.fixture
def file(tmp_path: Path, database: Database, nats_server: EmbeddedNats) -> Callable[..., Path]:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric, name text, tags text[]);"
        "CREATE TABLE notes (id bigint PRIMARY KEY, body text);"
        "ALTER TABLE notes REPLICA IDENTITY FULL"
    )

    def file(**sink: Any) -> Path:
        source = {"type": "postgres", "url": database.url}
        base = {"type": "nats", "source": "shop", "url": nats_server.url}
        config = {"sources": {"shop": source}, "sinks": {"out": base | sink}}
        path = tmp_path / "penstock.yaml"
        path.write_text(json.dumps(config))
        return path

    return file


@pytest.fixture
def look(file: Callable[..., Path]) -> Look:
    """Return what is found about a sink's filter, transform and route."""

    def look(**sink: Any) -> list[Finding]:
        found = check.inspect(file(**sink)).findings
        return [f for f in found if f.subject == "sink out"]

    return look


def test_all_well(look: Look) -> None:
    (finding,) = look(
        tables=["public.notes"], filter="record.body like 'x%'", route="'n.' || record.body"
    )
    assert (finding.level, finding.message) == (
        "ok", "filter, route: valid, every column exists"
    )  # fmt: skip


def test_filters_of_consumers(
    tmp_path: Path, file: Callable[..., Path], database: Database
) -> None:
    """Before a first run, too: its tables are read from the source."""
    path = file()
    config = json.loads(path.read_text())
    config["sinks"]["events"] = {"type": "stream", "source": "shop", "tables": ["public.orders"]}
    filters = {"big": "record.amount > 100", "typo": "record.amont > 100"}
    config["consumers"] = {
        name: {"stream": "events", "filters": {"sql": text}} for name, text in filters.items()
    }
    path.write_text(json.dumps(config))
    found = {f.subject: f for f in check.inspect(path).findings}
    assert found["consumer big"].level == "ok"
    typo = found["consumer typo"]
    assert (typo.level, typo.fix) == ("error", "correct `filters.sql`, or the source's `tables`")
    assert typo.message.startswith("filters.sql: ")
    assert "amont" in typo.message


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        ({"filter": "record.amuont > 1", "tables": ["public.orders"]},
         "filter: position 1: unknown column record.amuont of public.orders;"
         " did you mean record.amount?"),
        ({"filter": "record.name > 5", "tables": ["public.orders"]}, "filter: position "),
        ({"transform": {"sql": "record.nome"}, "tables": ["public.orders"]},
         "transform.sql: position 1: unknown column record.nome"),
        ({"route": [{"when": "record.x = 1", "to": "a"}], "tables": ["public.orders"]},
         "route[0].when: position 1: unknown column record.x"),
        ({"transform": {"lua": "function transform(m) retrn m end"}}, "transform: "),
        ({"transform": {"python": "no.such.module:f"}}, "transform: "),
    ],
)  # fmt: skip
def test_what_is_refused(
    look: Look, file: Callable[..., Path], sink: dict[str, Any], message: str
) -> None:
    (finding,) = look(**sink)
    assert finding.level == "error"
    assert finding.message.startswith(message)
    assert finding.fix
    config = load(file(**sink), {})
    with pytest.raises(SetupError) as caught:
        planning.refuse(config.sources["shop"], config.sinks)
    assert str(caught.value).startswith(f"sinks.out.{message.split(':', maxsplit=1)[0]}")
    assert caught.value.code in ("expression", "transform")


@pytest.mark.parametrize("option", ["none", "stored"])
@pytest.mark.parametrize("key", ["filter", "route", "transform"])
def test_generated_columns_that_no_message_has(
    database: Database, look: Look, file: Callable[..., Path], option: str, key: str
) -> None:
    database.execute(
        "CREATE TABLE lines (id int PRIMARY KEY, n int, total int GENERATED ALWAYS AS (n * 2) STORED,"
        " half int GENERATED ALWAYS AS (n / 2) VIRTUAL, secret text);"
        "CREATE PUBLICATION penstock_shop FOR TABLE lines, notes (id)"
        f" WITH (publish_generated_columns = {option})"
    )

    def sink(column: str, table: str = "public.lines") -> dict[str, Any]:
        value: Any = {
            "filter": f"{column} is not null", "route": f"'x.' || {column}::text",
            "transform": {"sql": f"{column} as x"},
        }[key]  # fmt: skip
        return {"tables": [table], "actions": ["insert"], key: value}

    stored = look(**sink("record.total"))
    if option == "stored":
        assert [f.level for f in stored] == ["ok"]
    else:
        assert [f.level for f in stored] == ["error"]
        assert (
            "messages of public.lines never have record.total: it is a generated"
            in stored[0].message
        )
        assert "what it is made of instead: (n * 2), or ALTER PUBLICATION" in stored[0].message
        assert "SET (publish_generated_columns = stored)" in stored[0].message
        config = load(file(**sink("record.total")), {})
        with pytest.raises(SetupError) as caught:
            planning.refuse(config.sources["shop"], config.sinks)
        assert caught.value.code == "expression"
    (virtual,) = look(**sink("record.half"))
    assert "it is a virtual generated column, which is not in the WAL" in virtual.message
    (unlisted,) = look(**sink("record.body", "public.notes"))
    assert "it is not in the list of columns of publication penstock_shop" in unlisted.message
    assert [f.level for f in look(**sink("record.n"))] == ["ok"]


def test_a_column_that_a_table_lacks(look: Look) -> None:
    found = look(filter="action = 'delete' or record.amount > 1")
    assert [f.level for f in found] == ["warning"]
    assert found[0].message == (
        "filter: record.amount is null in messages of public.notes, which lack the column"
    )


def test_columns_that_deletes_lack(look: Look) -> None:
    (finding,) = look(tables=["public.orders"], filter="record.amount > 1 and record.id > 0")
    assert finding.level == "warning"
    assert finding.message == (
        "filter, public.orders: a DELETE lacks amount: where that decides, it becomes a dead letter"
    )
    assert finding.fix.splitlines() == [
        'ALTER TABLE "public"."orders" REPLICA IDENTITY FULL;',
        "or decide about deletes in the expression: action = 'delete' or …",
    ]
    for sink in (
        {"actions": ["insert", "update"], "filter": "record.amount > 1"},
        {"filter": "action <> 'delete' and record.amount > 1"},
        {"filter": "action <> 'delete'", "transform": {"sql": "record.amount * 2 as a"}},
        {"transform": {"sql": "record.id, record.amount"}},  # what passes through is left out
    ):
        assert [f.level for f in look(tables=["public.orders"], **sink)] == ["ok"], sink
    (finding,) = look(tables=["public.orders"], transform={"sql": "record.amount * 2 as a"})
    assert "transform.sql, public.orders: a DELETE lacks amount" in finding.message


def test_old_values_that_the_wal_does_not_have(look: Look) -> None:
    (finding,) = look(tables=["public.orders"], filter="changes.amount is not null")
    assert finding.level == "warning"
    assert "the WAL has no old values of amount: `changes` never holds them" in finding.message


def test_templates_name_columns_of_what_the_transform_makes(look: Look) -> None:
    sink: dict[str, Any] = {
        "tables": ["public.notes"], "transform": {"sql": "record.id, upper(record.body) as text"},
        "route": [{"when": "record.body = 'a'", "to": "n.{record.body}"}],
        "subject": "n.{record.txt}",
    }  # fmt: skip
    found = look(**sink)
    assert [f.message for f in found] == [
        "subject names record.txt, which the transform does not make; did you mean text?",
        "route names record.body, which the transform does not make",
    ]


def test_subjects_of_rules_need_a_stream(file: Callable[..., Path], nats: JetStream) -> None:
    nats.add_stream("ROUTED_RULES", ["routed.a.>"])
    rules = [{"when": "record.id > 1", "to": "routed.a.{record.id}"}, {"to": "routed.b"}]
    found = check.inspect(file(tables=["public.notes"], route=rules)).findings
    # One finding for the stream, one for the right to publish.
    assert {(f.subject, f.level) for f in found if "subject" in f.subject} == {
        ("sink out: subject routed.a.*", "ok"),
        ("sink out: subject routed.b", "ok"),
        ("sink out: subject routed.b", "error"),
    }
    found = check.inspect(
        file(tables=["public.notes"], route="'routed.a.' || record.body")
    ).findings
    finding, allowed = [f for f in found if "subject" in f.subject]
    assert (finding.level, allowed.level) == ("warning", "ok")
    assert "it is used where `route` gives nothing" in finding.message


def test_filters_may_separate_two_sinks_of_one_stream(
    tmp_path: Path, database: Database, nats: JetStream
) -> None:
    nats.add_stream("APART", ["apart.>"])
    base = {"type": "nats", "source": "shop", "url": nats.url, "subject": "apart.x"}
    database.execute("CREATE TABLE items (id bigint PRIMARY KEY)")
    for filters, level in (
        (("record.id > 1", "record.id <= 1"), "warning"),
        (("record.id > 1", "record.id > 1"), "error"),
        ((None, None), "error"),
    ):
        sinks = {f"s{n}": {**base, "filter": f} for n, f in enumerate(filters)}
        path = tmp_path / "penstock.yaml"
        path.write_text(
            json.dumps({"sources": {"shop": {"type": "postgres", "url": database.url}},
                        "sinks": sinks})
        )  # fmt: skip
        found = check.inspect(path).findings
        (finding,) = [f for f in found if "put the same messages" in f.message]
        assert finding.level == level
