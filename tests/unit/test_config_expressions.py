"""`filter`, `transform`, `route` and what goes with them, as the file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.file import load
from penstock.config.settings import Config
from penstock.config.texts import Code
from penstock.config.transforms import RouteRule
from penstock.core.errors import ConfigError

FILE = """\
sources: {{shop: {{type: postgres, url: "postgres://db/shop"}}}}
sinks:
  out:
    type: {type}
    source: shop
    {line}
"""


def read(folder: Path, line: str, *, type_: str = "nats") -> Config:
    file = folder / "penstock.yaml"
    file.write_text(FILE.format(type=type_, line=line))
    return load(file, {})


def refused(folder: Path, line: str, *, type_: str = "nats") -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, line, type_=type_)
    (problem,) = caught.value.problems
    start = f"{folder}/penstock.yaml:"
    assert problem.startswith(start)
    return problem.removeprefix(start)


def test_every_key(tmp_path: Path) -> None:
    (tmp_path / "change.lua").write_text("function transform(m) return m end")
    lines = [
        "filter: record.amount > 100 and action <> 'delete'",
        "transform: {lua: {file: change.lua}, time_limit_ms: 20, memory_limit_mib: 8}",
        "kind: rows",
        "sort_by: updated_at",
        "initial_backfill: true",
        "route:",
        "  - {when: record.amount > 1000, to: 'big.{record.id}'}",
        "  - {to: rest}",
    ]
    sink = read(tmp_path, "\n    ".join(lines)).sinks["out"]
    assert sink.filter == "record.amount > 100 and action <> 'delete'"
    assert sink.transform is not None
    assert sink.transform.lua == Code(code="function transform(m) return m end", file="change.lua")
    assert (sink.transform.time_limit_ms, sink.transform.memory_limit_mib) == (20, 8)
    assert sink.route == (
        RouteRule(when="record.amount > 1000", to="big.{record.id}"),
        RouteRule(to="rest"),
    )
    assert (sink.kind, sink.sort_by, sink.initial_backfill) == ("rows", "updated_at", True)


@pytest.mark.parametrize("type_", ["nats", "stream"])
def test_defaults_and_short_forms(tmp_path: Path, type_: str) -> None:
    sink = read(tmp_path, "kind: changes", type_=type_).sinks["out"]
    assert (sink.filter, sink.transform, sink.route, sink.sort_by) == (None,) * 4
    assert (sink.kind, sink.initial_backfill) == ("changes", False)
    sql = read(tmp_path, "transform: {sql: record.id}", type_=type_).sinks["out"].transform
    assert sql is not None
    assert (sql.sql, sql.time_limit_ms, sql.memory_limit_mib) == ("record.id", 100, 64)
    routed = read(tmp_path, "route: \"'a' || record.region\"", type_=type_).sinks["out"]
    assert routed.route == "'a' || record.region"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("filter: record.amount >", "6: sinks.out.filter: position 16: it ends"),
        ("filter: foo(record.amount)", "6: sinks.out.filter: position 1: "),
        ("filter: 5", "6: sinks.out.filter: expected a string, got 5 (a number): put it in quotes"),
        ("filter: ''", "6: sinks.out.filter: position 1: "),
        ("transform: x", "6: sinks.out.transform: expected keys with their values, got 'x'"),
        ("transform: {}", "6: sinks.out.transform: expected one of sql, lua and python"),
        ("transform: {sql: record.a, lua: b}",
         "6: sinks.out.transform: sql and lua are both set: keep one"),
        ("transform: {sql: 'record.a, upper(record.b)'}",
         "6: sinks.out.transform.sql: position 11: a name is missing"),
        ("transform: {sq: record.a}",
         "6: sinks.out.transform.sq: unknown key; did you mean sql?"),
        ("transform: {lua: [1]}",
         "6: sinks.out.transform.lua: expected a Lua program, or {file: path}"),
        ("transform: {lua: {file: none.lua}}",
         "6: sinks.out.transform.lua: none.lua: cannot be read: No such file"),
        ("transform: {lua: ' '}", "6: sinks.out.transform.lua: the program is empty"),
        ("transform: {python: 'a b'}", "6: sinks.out.transform.python: 'a b' names no function"),
        ("transform: {python: 'a:b', time_limit_ms: 5}",
         "6: sinks.out.transform: time_limit_ms is for lua alone: remove it"),
        ("transform: {lua: a, time_limit_ms: 0}",
         "6: sinks.out.transform.time_limit_ms: expected greater than or equal to 1, got 0"),
        ("route: 5", "6: sinks.out.route: expected an expression, or a list of rules"),
        ("route: []", "6: sinks.out.route: expected at least one rule"),
        ("route: \"'a' ||\"", "6: sinks.out.route: position "),
        ("route: \"record.a || '.b c'\"", "6: sinks.out.route: position 13: a blank can't stand in a"),
        ("route: \"'a.*'\"", "6: sinks.out.route: position 1: '*' can't stand in a route"),
        ("route: [{when: record.a >, to: x}]", "6: sinks.out.route[0].when: position 11: it ends"),
        ("route: [{when: record.a > 1}]", "6: sinks.out.route[0].to: missing: this key has no"),
        ("route: [{to: a, if: b}]", "6: sinks.out.route[0].if: unknown key"),
        ("route: [{to: a}, {to: b}]", "6: sinks.out.route: rule 1 has no `when`"),
        ("route: [{when: record.a > 1, to: a}, {to: 'b..c'}]",
         "6: sinks.out.route: rule 2: subject template 'b..c', position 2: "),
        ("route: [{to: 'a.{nope}'}]", "6: sinks.out.route: rule 1: subject template 'a.{nope}'"),
        ("sort_by: updated_at", "6: sinks.out.sort_by: only kind rows has an order of its rows"),
        ("sort_by: ''", "6: sinks.out.sort_by: "),
        ("kind: row", "6: sinks.out.kind: expected 'changes' or 'rows', got 'row'"),
        ("initial_backfill: maybe", "6: sinks.out.initial_backfill: expected true or false"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, line: str, problem: str) -> None:
    assert refused(tmp_path, line).startswith(problem)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("a//b", "none is empty"),
        ("a/../b", "'.' or '..'"),
        ("a b", "position 1: a blank is not allowed"),
        ("a?b=1", "position 1: '?' is not allowed"),
        ("a/{record.id", "without its '}'"),
        ("a/{nope}", "{table} {action} {record.<column>}"),
        ("a/{key}", "{key} is for NATS subjects"),
    ],
)
def test_paths_of_a_stream_that_are_refused(tmp_path: Path, path: str, reason: str) -> None:
    problem = refused(tmp_path, f"route: [{{to: '{path}'}}]", type_="stream")
    assert problem.startswith(f"6: sinks.out.route: rule 1: path template '{path}': ")
    assert reason in problem
    found = refused(tmp_path, "route: \"'a?b/' || record.id\"", type_="stream")
    assert found == "6: sinks.out.route: position 1: '?' can't stand in a route"


def test_kind_rows_takes_no_truncate(tmp_path: Path) -> None:
    problem = refused(tmp_path, "actions: [insert, truncate]\n    kind: rows")
    assert problem == (
        "7: sinks.out.kind: a truncate has no row: remove it from `actions`, or set `kind: changes`"
        " (got 'rows')"
    )
