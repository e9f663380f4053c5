"""Hostile filters, routes and Lua: each refused or stopped within its limits, the pipeline alive.

What an expression may hold is settled when the file is read, what its names and types are by `penstock
check`. Lua is stopped where it runs: here in a pipeline over real servers, whose other messages, of the
same sink and of the others, arrive meanwhile.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats

from ..cli import fails, listed, write
from ..hostile_lua import MISDEEDS, expects, program
from ..pipeline import PATIENCE, Penstock, left_of, penstock, started

TABLE = (
    "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(10, 2), name text, tags jsonb,"
    " placed timestamptz)"
)
NESTED = 500

# What no expression may hold, with what is reported of it.
REFUSED_WHEN_READ = {
    # A second statement, or a way out of the expression.
    "record.id = 1; drop table orders": "one expression alone",
    "record.id = 1 -- and false": "comments are not allowed",
    "record.id /* */ = 1": "comments are not allowed",
    "record.name = 'a' union select 1": "union",
    "record.name = E'\\x'": "strings with a prefix",
    "record.name = 'a": "a quote that is opened here is not closed",
    "record.name = $$a$$": "strings with a prefix",
    "record.id = $1": "'$' is not allowed",
    "record.id = ?": "'?' is not expected here",
    "record.id = :x": "':' is not allowed",
    "`record`.`id` = 1": "'`' is not allowed",
    "record.id = 1\u0000": "U+0000",
    # Other tables.
    "(select 1) = 1": "no subqueries",
    "record.id in (select id from users)": "no subqueries",
    "exists (select 1)": "no subqueries",
    "with x as (select 1) select 1": "no subqueries",
    # Postgres' and Spark's functions that reach files, the JVM, time or memory.
    "pg_read_file('/etc/passwd') is null": "unknown function pg_read_file",
    "pg_sleep(1000) is null": "unknown function pg_sleep",
    "dblink('host=elsewhere') is null": "unknown function dblink",
    "java_method('java.lang.System', 'exit', 1) is null": "unknown function java_method",
    "reflect('java.lang.Runtime', 'getRuntime') is null": "unknown function reflect",
    "try_reflect('java.lang.System', 'getenv') is null": "unknown function try_reflect",
    "input_file_name() is null": "unknown function input_file_name",
    "read_files('/etc/passwd') is null": "unknown function read_files",
    "current_setting('x') = ''": "unknown function current_setting",
    "transform(record.tags, x -> x) is null": "unknown function transform",
    "pg_catalog.lower(record.name) = 'a'": "plain names",
    # Names and types of something else.
    "current_user = 'a'": "unknown name current_user",
    "env.HOME = 'x'": "unknown name env.HOME",
    "metadata.password = 'x'": "unknown field metadata.password",
    "_spark_metadata is null": "unknown name _spark_metadata",
    "record.id::regclass is null": "unknown type regclass",
    # Depth and size.
    "(" * NESTED + "true" + ")" * NESTED: "nested more than",
    "not " * NESTED + "true": "nested more than",
    "case when " * NESTED + "true" + " then true end" * NESTED: "at most 4,000",
    "case when " * 100 + "true" + " then true end" * 100: "nested more than",
    "-" * NESTED + "1 = 1": "comments are not allowed",
    "- " * NESTED + "1 = 1": "nested more than",
    "record.id = 1 and " * NESTED + "true": "at most 4,000",
    "'" + "x" * 5_000 + "' = ''": "at most 4,000",
    "": "it is empty",
}

# What the catalog's types leave no place for.
REFUSED_BY_CHECK = {
    "record.nmae = 'a'": "unknown column record.nmae",
    "record.name like record.name": "the pattern of like must be",
    # Patterns that could take for ever.
    "record.name ~ '(a+)+$'": "a group can't be repeated without end",
    "record.name similar to '(a+)+'": "a group can't be repeated without end",
    "record.id = 1e999999999": "a number like 12.50 is expected",
    "record.id + " + "9" * 100 + " = 1": "at most 38 digits",
    "round(record.amount, 999999999) = 1": "the places to round to",
    "record.placed > interval '1e999 years'": "'1e999 years'",
    "record.id + record.name = 1": "+ takes numbers",
    "record.amount": "a condition is expected",
}

SINK = "{type: nats, source: shop, url: 'nats://127.0.0.1:1', "


def sinks(key: str, texts: list[str]) -> list[str]:
    """Return a sink for each text, in JSON, which is YAML too."""
    return [f"  s{n}: {SINK}{key}: {json.dumps(text)}}}" for n, text in enumerate(texts)]


@pytest.mark.parametrize("key", ["filter", "route"])
def test_expressions_that_are_refused_when_the_file_is_read(tmp_path: Path, key: str) -> None:
    write(
        tmp_path,
        "sources: {shop: {type: postgres, url: 'postgresql://a@127.0.0.1:1/b', tables: [public.t]}}",
        "sinks:",
        *sinks(key, list(REFUSED_WHEN_READ)),
    )
    started = time.monotonic()
    done = penstock("check", cwd=tmp_path)
    assert done.returncode == 1
    assert time.monotonic() - started < 20
    assert "Traceback" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for number, (text, output) in enumerate(REFUSED_WHEN_READ.items()):
        (line,) = [line for line in lines if f"sinks.s{number}.{key}:" in line]
        # The line of the file, and the position in the text.
        assert f"penstock.yaml:{number + 3}:" in line, line
        assert "position" in line, line
        assert output in line, (text, line)


def test_select_lists_and_templates_that_are_refused(tmp_path: Path) -> None:
    write(
        tmp_path,
        "sources: {shop: {type: postgres, url: 'postgresql://a@127.0.0.1:1/b', tables: [public.t]}}",
        "sinks:",
        f"  a: {SINK}transform: {{sql: 'record.id as id from users'}}}}",
        f"  b: {SINK}transform: {{sql: 'reflect(1) as id'}}}}",
        f"  c: {SINK}transform: {{sql: 'record.*'}}}}",
        f"  d: {SINK}route: [{{to: 'orders.>'}}]}}",
        f"  e: {SINK}route: [{{to: '$JS.API.STREAM.DELETE.x'}}]}}",
        f"  f: {SINK}route: [{{when: 'pg_sleep(1) is null', to: x}}]}}",
        "  g: {type: stream, source: shop, route: [{to: '../admin'}]}",
        "  h: {type: stream, source: shop, route: [{to: 'http://elsewhere/{record.id}'}]}",
        f"  i: {SINK}transform: {{lua: {{file: /etc}}}}}}",
        f"  j: {SINK}transform: {{python: 'os.system(1)'}}}}",
    )
    output = penstock("check", cwd=tmp_path)
    assert output.returncode == 1
    assert "Traceback" not in output.stdout + output.stderr
    for name in "abcdefghij":
        assert f": sinks.{name}." in output.stdout, (name, output.stdout)


def test_expressions_that_are_refused_by_the_catalog(
    tmp_path: Path, database: Database, nats_server: EmbeddedNats
) -> None:
    database.execute(TABLE)
    write(
        tmp_path,
        f"sources: {{shop: {{type: postgres, url: '{database.url}', tables: [public.orders]}}}}",
        "sinks:",
        *sinks("filter", list(REFUSED_BY_CHECK)),
        f"store: {database.url}",
    )
    done = penstock("check", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    for number, (text, output) in enumerate(REFUSED_BY_CHECK.items()):
        lines = [line for line in done.stdout.splitlines() if f"sink s{number}: filter:" in line]
        assert len(lines) == 1, (text, done.stdout)
        assert "position" in lines[0]
        assert output in lines[0], (text, lines)
    assert "record.nmae" in fails(tmp_path, 1, "run", "--once")


def config(folder: Path, database: Database, nats: EmbeddedNats) -> None:
    (folder / "hostile.lua").write_text(program())
    subject = database.name
    write(
        folder,
        "sources:",
        "  shop:",
        "    type: postgres",
        f"    url: {database.url}",
        "    tables: [public.orders]",
        "sinks:",
        f"  hostile: {{type: nats, source: shop, url: '{nats.url}', subject: '{subject}.lua',",
        "    transform: {lua: {file: hostile.lua}}}",
        f"  liked: {{type: nats, source: shop, url: '{nats.url}',",
        "    filter: \"not coalesce(record.name like '%x%x%x%x%x%x%y', false)\",",
        f"    route: \"'{subject}.to.' || coalesce(record.name, 'none')\"}}",
        "  whole: {type: stream, source: shop}",
        f"store: {database.url}",
        "spark: {master: 'local[2]'}",
    )


def test_lua_that_misbehaves_for_some_messages(
    tmp_path: Path, database: Database, nats_server: EmbeddedNats, nats: JetStream
) -> None:
    database.execute(TABLE)
    config(tmp_path, database, nats_server)
    stream = database.name.upper()
    nats.add_stream(stream, [f"{database.name}.lua"])
    nats.add_stream(f"{stream}_TO", [f"{database.name}.to.>"])
    try:
        with started(tmp_path, own_jvm=True) as pipeline:
            kept = workers(pipeline)
            names = list(MISDEEDS)
            # Before, between and behind the misdeeds stands a good message.
            values = [name for misdeed in names for name in ("good", misdeed)] + ["good"]
            insert(database, 0, values)
            good = [number for number, name in enumerate(values) if name == "good"]
            wait(pipeline, nats, stream, len(good))
            assert ids(nats, stream) == good
            dead = letters(pipeline, tmp_path, len(names))
            for number, name in enumerate(names):
                code, reason = dead[2 * number + 1]
                assert code == "transform_failed"
                assert reason.startswith("hostile.lua, ") or name not in ("loop", "os"), reason
                assert expects(name, reason), (name, reason)
            # The other sinks took them all: no value adds a token, and no text takes long.
            wait(pipeline, nats, f"{stream}_TO", len(values))
            tokens = {m.subject.count(".") for m in nats.messages(f"{stream}_TO")}
            assert tokens == {2}
            routes = ["a.b", "*", ">", "a b", "", "$JS", "\r\nPUB x", "x" * 3_000]
            insert(database, len(values), routes)
            count = len(values) + len(routes)
            wait(pipeline, nats, f"{stream}_TO", count)
            assert {m.subject.count(".") for m in nats.messages(f"{stream}_TO")} == {2}
            wait(pipeline, nats, stream, len(good) + len(routes))
            # Counts are reported ten times a second.
            pipeline.wait_for(
                lambda: pipeline.status()["sinks"]["whole"]["delivered"] >= count, 10, "no counts"
            )
            status = pipeline.status()
            assert {n: sink["dead_lettered"] for n, sink in status["sinks"].items()} == {
                "hostile": len(names), "liked": 0, "whole": 0,
            }  # fmt: skip
            assert status["sinks"]["whole"]["delivered"] == count
            # Spark's workers are those of the start; only processes of Lua were started anew.
            assert status["sources"]["shop"]["restarts"] == 0
            assert workers(pipeline) >= kept
            family = pipeline.tree()
            assert pipeline.stop() == 0
            assert left_of(family) == []
            assert pipeline.stray() == []
    finally:
        drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        database.execute(f"{drop} WHERE database = current_database() AND NOT active")


def workers(pipeline: Penstock) -> set[int]:
    """Return Spark's processes and our own: all but those that run Lua."""
    return {p.pid for p in pipeline.tree() if "lua_helper" not in " ".join(p.cmdline())}


def insert(database: Database, first: int, names: list[str]) -> None:
    database.execute(
        "INSERT INTO orders (id, name) SELECT n - 1 + %s, v"
        " FROM unnest(%s::text[]) WITH ORDINALITY AS t (v, n) ORDER BY n",
        [first, names],
    )


def wait(pipeline: Penstock, nats: JetStream, stream: str, count: int) -> None:
    pipeline.wait_for(
        lambda: nats.info(stream).state.messages >= count,
        PATIENCE,
        f"at {count} messages in {stream}",
    )


def ids(nats: JetStream, stream: str) -> list[int]:
    return sorted(json.loads(m.data)["record"]["id"] for m in nats.messages(stream))


def letters(pipeline: Penstock, folder: Path, count: int) -> dict[int, tuple[str, str]]:
    """Wait for the dead letters, and return the code and reason of each by its record's id."""
    found: list[dict[str, Any]] = []

    def are_there() -> bool:
        found[:] = listed(folder, "dead-letters list --limit 1000")
        return len(found) >= count

    pipeline.wait_for(are_there, PATIENCE, f"at {count} dead letters")
    assert len(found) == count
    return {
        int(letter["idempotency_key"].rsplit("-", 1)[1]): (letter["code"], letter["reason"])
        for letter in found
    }
