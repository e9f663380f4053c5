"""The configuration file: what it may hold, and that every mistake is named and no secret shown."""

from __future__ import annotations

import pickle
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import yaml_lines
from penstock.config.file import load, load_or_empty, load_store
from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.config.sources import slot_name
from penstock.core.errors import ConfigError

EXAMPLE = """\
sources:
  shop:
    type: postgres
    url: ${DATABASE_URL}
    tables: ["public.*"]
sinks:
  orders:
    type: nats
    source: shop
    tables: [public.orders, public.order_items]
    actions: [insert, update, delete]
    group_by: [customer_id]
    url: nats://localhost:4222
    subject: "shop.{schema}.{table}.{action}"
    stream: null
spark:
  master: local[*]
  checkpoint: .penstock/checkpoints
  conf: {}
"""
MINIMAL = """\
sources: {shop: {type: postgres, url: "postgres://db/shop"}}
sinks: {out: {type: nats, source: shop}}
"""
ENVIRON = {"DATABASE_URL": "postgresql://app:s3cret@db:5433/shop"}


def read(tmp_path: Path, text: str | bytes, **environ: str) -> Config:
    file = tmp_path / "penstock.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(file, environ)


def problems(tmp_path: Path, text: str | bytes, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, **environ)
    assert str(caught.value) == "\n".join(caught.value.problems)
    prefix = str(tmp_path / "penstock.yaml")
    assert all(line.startswith(prefix) for line in caught.value.problems)
    return [line.removeprefix(prefix) for line in caught.value.problems]


def with_source(line: str) -> str:
    return EXAMPLE.replace("    type: postgres\n", f"    type: postgres\n    {line}\n")


def with_sink(line: str) -> str:
    return EXAMPLE.replace("    type: nats\n", f"    type: nats\n    {line}\n")


def test_the_issues_example(tmp_path: Path) -> None:
    config = read(tmp_path, EXAMPLE, **ENVIRON)
    source, sink = config.sources["shop"], config.sinks["orders"]
    assert source.url.get_secret_value() == ENVIRON["DATABASE_URL"]
    assert (source.slot, source.publication) == ("penstock_shop", "penstock_shop")
    assert [str(p) for p in source.patterns] == ["public.*"]
    assert sink.actions == ("insert", "update", "delete")
    assert sink.group_by == ["customer_id"]
    assert isinstance(sink, NatsSinkSettings)
    assert sink.stream is None
    assert config.sinks_of("shop") == {"orders": sink}
    assert config.spark.conf == {}


def test_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAL)
    sink = config.sinks["out"]
    assert config.sources["shop"].tables == ("public.*",)
    assert sink.patterns is None
    assert sink.actions == ("insert", "update", "delete")
    assert isinstance(sink, NatsSinkSettings)
    assert sink.subject == "{source}.{schema}.{table}.{action}"
    assert (config.spark.master, config.spark.checkpoint) == ("local[*]", ".penstock/checkpoints")


def test_spark_conf_becomes_strings(tmp_path: Path) -> None:
    text = MINIMAL + "spark: {conf: {spark.a: true, spark.b: 4, spark.c: x}}"
    assert read(tmp_path, text).spark.conf == {"spark.a": "true", "spark.b": "4", "spark.c": "x"}


def test_empty_spark_section_is_the_default(tmp_path: Path) -> None:
    assert read(tmp_path, MINIMAL + "spark:\n").spark.master == "local[*]"


@pytest.mark.parametrize(
    ("written", "filled"),
    [
        ("a${X}c", "abc"),
        ("${X}${X}", "bb"),
        ("${NOPE:-d}", "d"),
        ("${NOPE:-}", ""),
        ("${EMPTY:-d}", "d"),
        ("${EMPTY}", ""),
        ("$${X}", "${X}"),
        ("$X {x} $$", "$X {x} $$"),
        ("${NOPE:-a:-b}", "a:-b"),
        ("${INNER}", "${X}"),
    ],
)
def test_variables(written: str, filled: str) -> None:
    document = yaml_lines.parse(
        yaml.safe_dump({"key": written}), {"X": "b", "EMPTY": "", "INNER": "${X}"}
    )
    assert document.problems == []
    assert document.value == {"key": filled}


def test_a_variable_is_a_string_whatever_it_looks_like() -> None:
    document = yaml_lines.parse("key: ${X}", {"X": "{a: [1, !!python/object x]}"})
    assert document.value == {"key": "{a: [1, !!python/object x]}"}


def test_missing_variable_is_named_once(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, EXAMPLE)
    assert line.startswith(":4: sources.shop.url: the environment variable DATABASE_URL is not set")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            with_source("tabels: [a.b]"),
            ":4: sources.shop.tabels: unknown key; did you mean tables?",
        ),
        (EXAMPLE + "sprak: {}\n", ":20: sprak: unknown key; did you mean spark?"),
        (with_source("slot: Penstock"), ":4: sources.shop.slot: 'Penstock' is not a slot name"),
        (with_source("slot: [a]"), ":4: sources.shop.slot: expected string, got a list"),
        (with_source(f"publication: {'é' * 32}"), "longer than the 63 bytes"),
        (EXAMPLE.replace('["public.*"]', "public.*"), ":5: sources.shop.tables: expected a list"),
        (EXAMPLE.replace("[insert, ", "[inserts, "), "actions[0]: expected 'insert', 'update', "),
        (EXAMPLE.replace("[insert, ", "[inserts, "), "got 'inserts'; did you mean insert?"),
        (
            EXAMPLE.replace("type: nats", "type: nat"),
            ":8: sinks.orders.type: expected 'nats' or 'stream', got",
        ),
        (EXAMPLE.replace("source: shop", "source: shpo"), "no source 'shpo': expected one of shop"),
        (EXAMPLE.replace("source: shop", "source: shpo"), "did you mean shop?"),
        (EXAMPLE.replace("[public.orders, ", "[other.orders, "), "does not capture other.orders"),
        (
            EXAMPLE.replace("[public.orders, ", "[public.orders, orders, "),
            "did you mean public.ord",
        ),
        (EXAMPLE.replace("{table}", "{tabel}"), ":14: sinks.orders.subject: "),
        (EXAMPLE.replace("stream: null", "stream: no"), "got False (a boolean): put it in quotes"),
        (
            EXAMPLE.replace("stream: null", "ack_timeout: soon"),
            ":15: sinks.orders.ack_timeout: exp",
        ),
        (EXAMPLE.replace("stream: null", "password: x"), ":7: sinks.orders: user is missing"),
        (EXAMPLE.replace("stream: null", "stream: !x y"), ":15: sinks.orders.stream: YAML reads"),
        (EXAMPLE.replace("    source: shop\n", ""), ":7: sinks.orders.source: missing"),
        (EXAMPLE.replace("  conf: {}", "  conf: []"), ":19: spark.conf: expected"),
        (
            EXAMPLE.replace("  conf: {}", "  master: a\n  master: b"),
            ":19: spark.master: this key is",
        ),
        (
            with_sink("nope: 1"),
            ":9: sinks.orders.nope: unknown key; expected one of: source, tables, ",
        ),
        ("sources: [\n", "not valid YAML"),
        ("a:\n\tb: c\n", ":2: not valid YAML: a tab indents this line: write blanks instead"),
        ("a: b\n\tc: d\n", ":2: not valid YAML: a tab indents this line: write blanks instead"),
        ("a: b\rc:\r\td: e\r", ":3: not valid YAML: a tab indents this line: write blanks instead"),
        ("a: b: c\n", ":1: not valid YAML: mapping values are not allowed here"),
        ("- a\n", ":1: expected the keys sources and sinks"),
        ("sources: {}\n", ": sources: missing: expected at least one source"),
        ("sources: [a]\n", ":1: sources: expected sources by name, got a list"),
        ("sources: {a: }\n", ":1: sources.a: expected the source's keys, got nothing"),
        ("sources: {'a b': {}}\n", ":1: sources.a b: 'a b' is not a name"),
        ("a: &x [*x]\n", ":1: a[0]: an alias that contains itself"),
        ("? [a]\n: b\n", ":1: a key must be a name"),
        ("a: ${9}\n", ":1: a: `${` starts a variable"),
        ("# nothing\n", ":1: the file is empty: write one with `penstock init`"),
        ("", ":1: the file is empty"),
        (b"a: b\nc: \xff\n", ":2: not UTF-8"),
        ("a: b\nc: \x00\n", ":2: not valid YAML: a character that YAML does not allow"),
        ("[" * 3000, "not valid YAML: nested too deeply"),
        ("a: 0b9\nb: 1_\n", ":1: a: unknown key"),
    ],
)
def test_mistakes_name_line_and_key(tmp_path: Path, text: str | bytes, expected: str) -> None:
    found = problems(tmp_path, text, **ENVIRON)
    assert any(expected in line for line in found), found


def test_all_mistakes_at_once_in_the_files_order(tmp_path: Path) -> None:
    text = EXAMPLE.replace("tables: [", "tabels: [").replace(": postgres\n", ": oracle\n")
    found = problems(tmp_path, text + "more: 1\n")
    assert [line.split(":")[1] for line in found] == ["3", "4", "5", "10", "20"]


@pytest.mark.parametrize("path", ["none.yaml", "."])
def test_unreadable_file(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"no such file: write one|cannot be read"):
        load(tmp_path / path, {})


def test_two_sources_may_not_share_a_slot(tmp_path: Path) -> None:
    one = "{type: postgres, url: 'postgres://db/shop', slot: s}"
    text = f"sources:\n  a: {one}\n  b: {one}\nsinks: {{out: {{type: nats, source: a}}}}\n"
    assert problems(tmp_path, text) == [
        ":3: sources.b.slot: 's' is the slot of source 'a' too: give each its own"
    ]


def test_merge_keys_and_anchors(tmp_path: Path) -> None:
    text = MINIMAL.replace("sinks: {out:", "sinks: {a: &a").replace("}}\n", "}}\n", 1)
    text = text.rstrip()[:-1] + ", b: {<<: *a, stream: S, source: shop}}\n"
    config = read(tmp_path, text)
    sink = config.sinks["b"]
    assert isinstance(sink, NatsSinkSettings)
    assert sink.stream == "S"


# What a message says itself would hide that a secret stands in it, so secrets here are unlike it.
secrets = st.text(string.ascii_letters + string.digits + "@/:%#?!'*& ", min_size=6).map(
    "zQ".__add__
)


def forbidden(secret: str) -> str:
    return secret[:5]


@given(secret=secrets, place=st.integers(0, 9))
def test_no_secret_in_any_error(
    tmp_path_factory: pytest.TempPathFactory, secret: str, place: int
) -> None:
    source: dict[str, Any] = {"type": "postgres", "url": "postgres://db/shop"}
    sink: dict[str, Any] = {"type": "nats", "source": "shop", "nope": 1}
    if place == 0:
        source["url"] = f"postgres://app:{secret}@db/shop"
    elif place == 1:
        source["url"] = f"mysql://app:{secret}@db/shop"
    elif place == 2:
        source["url"] = f"host=db port=x password='{secret}'"
    elif place == 3:
        source["url"] = secret
    elif place == 4:
        sink["url"] = f"nats://app:{secret}@host:port,nats://app:{secret}@host"
    elif place == 5:
        sink["url"] = f"nats://{secret}@host:port"
    elif place == 6:
        sink["password"] = [secret]
    elif place == 7:
        sink |= {"token": secret, "user": "a", "password": secret}
    elif place == 8:
        sink["url"] = "nats://a:${SECRET}@host:port"
    else:
        source["slot"] = "${SECRET}"
    text = yaml.safe_dump({"sources": {"shop": source}, "sinks": {"out": sink}})
    file = tmp_path_factory.mktemp("c") / "p.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file, {"SECRET": secret})
    if place != 9:  # a slot is no secret, even if one is put there
        assert forbidden(secret) not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        "*zQsecret",
        "!zQsecret",
        "!zQsecret!x y",
        "&zQsecret\n    password: &zQsecret x",
        "%zQsecret",
        "@zQsecret",
        "[zQsecret",
        "'zQsecret",
        '"\\zQsecret"',
        "zQ: secret",
    ],
)
def test_a_password_that_yaml_reads_as_something_else(tmp_path: Path, value: str) -> None:
    assert "zQ" not in "".join(problems(tmp_path, with_sink(f"password: {value}"), **ENVIRON))


def test_no_secret_in_a_repr_or_dump(tmp_path: Path) -> None:
    text = EXAMPLE.replace("stream: null", "user: u\n    password: hunter22")
    config = read(tmp_path, text, **ENVIRON)
    shown = repr(config) + str(config) + str(config.model_dump(exclude={"sinks"}))
    assert "s3cret" not in shown
    assert "hunter22" not in shown


@given(st.text())
def test_any_text_gives_a_document(text: str) -> None:
    document = yaml_lines.parse(text, {})
    assert all(line >= 1 for line, _, _ in document.problems)


@given(st.text(min_size=1))
def test_slot_names_are_what_postgres_takes(text: str) -> None:
    name = slot_name(f"penstock_{text}")
    assert len(name) <= 63
    assert set(name) <= set(string.ascii_lowercase + string.digits + "_")


def test_errors_and_configs_pickle(tmp_path: Path) -> None:
    config = read(tmp_path, EXAMPLE, **ENVIRON)
    assert pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(ConfigError(["a", "b"]))).problems == ["a", "b"]


def test_a_file_without_content_configures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock run` follows the store then; another name than the default must be a file's."""
    monkeypatch.chdir(tmp_path)
    assert load_or_empty("penstock.yaml", {}).sources == {}
    with pytest.raises(ConfigError, match="no such file"):
        load_or_empty("penstok.yaml", {})
    with pytest.raises(ConfigError, match="no such file"):
        load_store("penstock.yaml", {})
    Path("penstock.yaml").write_text("# nothing\n")
    assert load_or_empty("penstock.yaml", {}).sources == {}
    assert load_store("penstock.yaml", {}).store is None
    Path("penstock.yaml").write_text("sources: {}\n")
    with pytest.raises(ConfigError, match="expected at least one source"):
        load_or_empty("penstock.yaml", {})
