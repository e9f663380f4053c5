"""`penstock check` over the store, and over what streams ask of their source."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo
from tests.streams_help import make_stream

from penstock.check import config as check
from penstock.config.consumers import PullConsumer
from penstock.config.file import load
from penstock.config.settings import StoreSettings
from penstock.core.finding import Finding
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.store import open_store
from penstock.streams.migrate import VERSION
from penstock.streams.store import Store

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, database: Database) -> Write:
    """Write a file with a source, the streams `orders` and `stock`, a consumer, and a store."""

    def write(store: str | None = database.url, **sinks: dict[str, Any]) -> Path:
        config: dict[str, Any] = {
            "sources": {"shop": {"type": "postgres", "url": database.url}},
            "sinks": {
                name: {"type": "stream", "source": "shop", **changes}
                for name, changes in (sinks or {"orders": {}, "stock": {"kind": "rows"}}).items()
            },
            "consumers": {"billing": {"stream": "orders"}},
        }
        path = tmp_path / "penstock.yaml"
        path.write_text(json.dumps(config | ({"store": store} if store else {})))
        return path

    return write


def findings(path: Path, level: str | None = None) -> list[Finding]:
    found = check.inspect(path, {}).findings
    return [f for f in found if level is None or f.level == level]


def of_store(path: Path) -> Finding:
    return only(findings(path), "store: ")


def only(found: Sequence[Finding], words: str) -> Finding:
    (finding,) = [f for f in found if words in f"{f.subject}: {f.message}"]
    return finding


def test_all_well_and_nothing_is_changed(database: Database, write: Write) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    database.execute("ALTER TABLE orders REPLICA IDENTITY FULL")
    path = write()
    assert [f for f in findings(path) if f.level != "ok"] == []
    assert "empty so far" in of_store(path).message
    assert database.execute("SELECT to_regnamespace('penstock')") == [(None,)]
    database.execute("CREATE SCHEMA penstock; CREATE TABLE penstock.other ()")
    assert "empty so far" in of_store(path).message
    Store.open(database.url).close()
    assert f"schema of version {VERSION}" in of_store(path).message
    assert [f for f in findings(path) if f.level != "ok"] == []


def test_the_embedded_one_is_not_started(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finding = of_store(write(store=None))
    assert (finding.level, finding.message) == ("ok", "the embedded Postgres, in .penstock/store")
    assert not (tmp_path / ".penstock").exists()


def test_a_store_that_is_down(write: Write) -> None:
    finding = of_store(write("postgresql://app:never-shown@127.0.0.1:9/store"))
    assert finding.level == "error"
    assert "Nothing answers at 127.0.0.1:9/store" in finding.message
    assert "never-shown" not in str(finding)


def test_a_store_that_is_not_there(database: Database, write: Write) -> None:
    finding = of_store(write(make_conninfo(database.url, dbname="nowhere")))
    assert finding.level == "error"
    assert "no database nowhere" in finding.message


@pytest.fixture
def store_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def test_a_wrong_password(store_dir: Path, write: Write) -> None:
    with open_store(StoreSettings(), store_dir) as url:
        password = (store_dir / "store.password").read_text()
        finding = of_store(write(url.replace(password, "never-shown")))
    assert finding.level == "error"
    assert "refused the login of user postgres" in finding.message
    assert "never-shown" not in str(finding)


def test_a_role_without_rights(
    postgres: EmbeddedPostgres, database: Database, write: Write
) -> None:
    role = f"r_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        path = write(make_conninfo(database.url, user=role))
        refused = of_store(path)
        assert (refused.level, refused.fix) == (
            "error", f'GRANT CREATE ON DATABASE "{database.name}" TO "{role}";',
        )  # fmt: skip
        database.execute(refused.fix)
        assert of_store(path).level == "ok"
        Store.open(database.url).close()  # somebody else makes the schema meanwhile
        refused = of_store(path)
        assert "may not change the schema penstock, which is postgres's" in refused.message
        database.execute(refused.fix)
        assert of_store(path).level == "ok"
        Store.open(make_conninfo(database.url, user=role)).close()
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_streams_of_an_earlier_build(database: Database, write: Write) -> None:
    with Store.open(database.url) as store:
        make_stream(store)
    database.execute("DELETE FROM penstock.migrations WHERE version > 2")
    refused = of_store(write())
    assert refused.level == "error"
    assert "an earlier build" in refused.message
    assert "DROP SCHEMA penstock CASCADE" in refused.fix


def test_a_newer_schema_and_a_wrong_encoding(database: Database, write: Write) -> None:
    Store.open(database.url).close()
    database.execute("INSERT INTO penstock.migrations (version) VALUES (99)")
    assert f"has version 99, and this Penstock supports {VERSION}" in of_store(write()).message
    latin = f"{database.name}_latin"
    database.execute(
        f"CREATE DATABASE {latin} ENCODING 'LATIN1' LOCALE 'C' LOCALE_PROVIDER libc"
        " TEMPLATE template0"
    )
    try:
        finding = of_store(write(make_conninfo(database.url, dbname=latin)))
        assert finding.level == "error"
        assert "has encoding LATIN1" in finding.message
    finally:
        database.execute(f"DROP DATABASE {latin}")


def test_names_that_are_taken(database: Database, write: Write) -> None:
    with Store.open(database.url) as store:
        shop, other = store.register_source("shop", "a"), store.register_source("other", "b")
        store.register_stream("orders", other, "changes", None)
        store.register_stream("stock", shop, "changes", None)
        store.register_consumer("stock", "billing", "pull", {})
        store.register_consumer("stock", "late", "pull", {})
    found = findings(write(orders={}, stock={"kind": "rows"}, late={}), "error")
    assert [f"{f.subject}: {f.message}" for f in found] == [
        "sink orders: the stream exists, with source other, not shop",
        "sink stock: the stream exists, with kind changes, not rows",
        "consumer billing: the name is taken by a consumer of stream stock",
        "sink late: the name is taken by a consumer of stream stock",
    ]


def test_rows_of_tables_without_a_key(database: Database, write: Write) -> None:
    database.execute(
        "CREATE TABLE bare (a int); ALTER TABLE bare REPLICA IDENTITY FULL;"
        "CREATE TABLE keyed (id int PRIMARY KEY); ALTER TABLE keyed REPLICA IDENTITY FULL;"
        "CREATE TABLE indexed (b int NOT NULL); CREATE UNIQUE INDEX i ON indexed (b);"
        "ALTER TABLE indexed REPLICA IDENTITY USING INDEX i"
    )
    found = findings(write(orders={}, stock={"kind": "rows"}), "warning")
    keyless = only(found, "no primary key")
    assert keyless.subject == "source shop: table public.bare"
    assert "every version of its rows stays in stream stock" in keyless.message


def test_group_by_of_a_stream_is_looked_for(database: Database, write: Write) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY); ALTER TABLE a REPLICA IDENTITY FULL")
    error = only(findings(write(orders={"group_by": ["idd"]}), "error"), "has no column idd")
    assert "`group_by` of sink orders" in error.message


def test_what_init_has_commented_out(tmp_path: Path) -> None:
    text = files("penstock.config").joinpath("template.yaml").read_text()
    lines = text.splitlines()
    first, last = (
        next(i for i, x in enumerate(lines) if word in x) for word in ("  # orders:", "# store:")
    )
    # A comment's `# ` is taken away, and what stands behind the value stays a comment.
    lines[first : last + 1] = [re.sub(r"^(\s*)# ", r"\1", line) for line in lines[first : last + 1]]
    path = tmp_path / "penstock.yaml"
    path.write_text("\n".join(lines))
    environ = {"DATABASE_URL": "postgres://db/shop", "PENSTOCK_STORE_URL": "postgres://db/store",
               "CRM_SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}  # fmt: skip
    config = load(path, environ)
    assert config.streams["orders"].retention == timedelta(days=7)
    assert [(n, c.type) for n, c in config.consumers.items()] == [
        ("billing", "pull"), ("crm", "webhook"),
    ]  # fmt: skip
    assert config.store is not None
    defaults = PullConsumer(stream="orders")
    assert config.consumers["billing"].model_copy(update={"filters": defaults.filters}) == defaults
