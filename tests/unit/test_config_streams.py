"""The configuration of streams, consumers and the store."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.consumers import WebhookConsumer
from penstock.config.file import load, load_store, sink_names
from penstock.config.settings import Config, SparkSettings
from penstock.config.sinks import NatsSinkSettings, StreamSinkSettings
from penstock.core.errors import ConfigError

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
EXAMPLE = f"""\
sources:
  shop: {{type: postgres, url: "postgres://db/shop"}}
sinks:
  jetstream: {{type: nats, source: shop}}
  orders:
    type: stream
    source: shop
    tables: [public.orders]
    actions: [insert, delete]
    group_by: [customer_id]
    kind: changes
    retention: 12h
  stock:
    type: stream
    source: shop
    kind: rows
consumers:
  billing:
    stream: orders
    ack_wait_ms: 500
    filters: {{table: orders, action: [insert]}}
  crm:
    type: webhook
    stream: stock
    url: https://crm.example/hook
    headers: {{Authorization: Bearer t0ken}}
    secrets: [{SECRET}]
store: postgresql://app:s3cret@db/store
"""


def read(tmp_path: Path, text: str, **environ: str) -> Config:
    file = tmp_path / "penstock.yaml"
    file.write_text(text)
    return load(file, environ)


def problems(tmp_path: Path, text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, **environ)
    return [line.removeprefix(f"{tmp_path}/penstock.yaml") for line in caught.value.problems]


def test_all_that_can_be_given(tmp_path: Path) -> None:
    config = read(tmp_path, EXAMPLE)
    orders, stock = config.sinks["orders"], config.sinks["stock"]
    assert isinstance(orders, StreamSinkSettings)
    assert isinstance(stock, StreamSinkSettings)
    assert config.streams == {"orders": orders, "stock": stock}
    assert (orders.kind, orders.retention) == ("changes", timedelta(hours=12))
    assert (orders.actions, orders.group_by) == (("insert", "delete"), ["customer_id"])
    assert [str(p) for p in orders.patterns or ()] == ["public.orders"]
    assert (stock.kind, stock.retention, stock.patterns) == ("rows", None, None)
    assert list(config.sinks_of("shop")) == ["jetstream", "orders", "stock"]
    billing, crm = config.consumers["billing"], config.consumers["crm"]
    assert (billing.type, billing.stream, billing.max_deliver) == ("pull", "orders", -1)
    assert billing.stored()["ack_wait_ms"] == 500
    assert isinstance(crm, WebhookConsumer)
    assert crm.stored() == {
        "url": "https://crm.example/hook",
        "headers": {"Authorization": "Bearer t0ken"},
        "secrets": [SECRET],
    }
    assert config.store is not None
    assert config.store.get_secret_value() == "postgresql://app:s3cret@db/store"
    assert pickle.loads(pickle.dumps(config)) == config
    shown = f"{config!r}{config}{config.model_dump()}"
    assert not [word for word in ("s3cret", "t0ken", SECRET, "crm.example") if word in shown]


def test_defaults(tmp_path: Path) -> None:
    text = EXAMPLE[: EXAMPLE.index("consumers:")].replace("    retention: 12h\n", "")
    config = read(tmp_path, text.replace("    kind: changes\n", ""))
    jetstream = config.sinks["jetstream"]
    assert isinstance(jetstream, NatsSinkSettings)
    assert jetstream.detach_after == timedelta(seconds=30)
    assert config.streams["orders"].kind == "changes"
    assert config.streams["orders"].retention == timedelta(days=7)
    assert config.consumers == {}
    assert config.store is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("90s", timedelta(seconds=90)),
        ("30m", timedelta(minutes=30)),
        ("12h", timedelta(hours=12)),
        ("7d", timedelta(days=7)),
    ],
)
def test_durations(tmp_path: Path, written: str, meant: timedelta) -> None:
    text = EXAMPLE.replace("12h", written).replace("nats,", f"nats, detach_after: {written},")
    config = read(tmp_path, text)
    jetstream = config.sinks["jetstream"]
    assert isinstance(jetstream, NatsSinkSettings)
    assert (config.streams["orders"].retention, jetstream.detach_after) == (meant, meant)


@pytest.mark.parametrize(
    "written",
    ["7", "7 d", "-1d", "1.5h", "1w", "7D", "P7D", "''", "[7d]", "0s", "36501d", "999999999d"],
)
def test_what_is_no_duration(tmp_path: Path, written: str) -> None:
    (line,) = problems(tmp_path, EXAMPLE.replace("12h", written))
    assert line.startswith(":12: sinks.orders.retention: expected ")


@given(st.text(max_size=6))
def test_any_text_for_a_duration_is_taken_or_named(text: str) -> None:
    try:
        settings = NatsSinkSettings.model_validate(
            {"type": "nats", "source": "shop", "detach_after": text}
        )
    except ValueError:
        return
    assert timedelta(seconds=1) <= settings.detach_after <= timedelta(days=36_500)


def change(old: str, new: str) -> str:
    assert old in EXAMPLE
    return EXAMPLE.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("kind: rows", "kind: rows\n    retention: 7d", ":17: sinks.stock.retention: kind rows"),
        (
            "kind: changes",
            "kind: changes\n    deletes: true",
            ":12: sinks.orders.deletes: only kind rows leaves deletes out: kind changes sends what",
        ),
        (
            "kind: rows",
            "kind: rows\n    actions: [insert]\n    deletes: true",
            ":18: sinks.stock.deletes: the sink takes no deletes: add `delete` to `actions`",
        ),
        ("kind: rows", "kind: rows\n    max_deliver: 0", ":17: sinks.stock.max_deliver: 0 would"),
        (
            "    ack_wait_ms: 500\n",
            "    deletes: true\n",
            ":20: consumers.billing.deletes: only kind rows leaves deletes out",
        ),
        ("retention: 12h", "retention:", ":12: sinks.orders.retention: retention has an end"),
        (
            "kind: rows",
            "kind: rows\n    actions: [insert, truncate]",
            ":16: sinks.stock.kind: a truncate has no row",
        ),
        ("kind: rows", "kind: row", "expected 'changes' or 'rows', got 'row'; did you mean rows?"),
        ("group_by: [customer_id]", "group_by: []", ":10: sinks.orders.group_by: []: name one"),
        ("kind: rows", "subject: x", ":16: sinks.stock.subject: unknown key; expected one of: sou"),
        ("kind: rows", "detach_after: 3s", ":16: sinks.stock.detach_after: unknown key"),
        ("type: nats", "type: kafka", ":4: sinks.jetstream.type: expected 'nats' or 'stream', got"),
        ("{type: nats, ", "{", ":4: sinks.jetstream.type: missing: this key has no default; expe"),
        (
            "    type: webhook",
            "    type: [a]",
            ".type: expected 'pull' or 'webhook' or 'nats', got a list",
        ),
        ("    type: webhook", "    type: webhok", "got 'webhok'; did you mean webhook?"),
        ("    stream: stock\n", "", ":22: consumers.crm.stream: missing: this key has no default"),
        (
            "stream: orders",
            "stream: order",
            "there is no stream 'order': expected one of orders, s",
        ),
        ("stream: orders", "stream: jetstream", "stream: sink 'jetstream' is not of type stream"),
        ("  billing:", "  orders:", ":18: consumers.orders: stream 'orders' has a consumer of tha"),
        ("  billing:", "  'a b':", ":18: consumers.a b: 'a b' is not a name"),
        ("table: orders,", "tabel: orders,", "unknown key; did you mean table?; expected one of"),
        ("[insert]", "[inserted]", "filters.action[0]: 'inserted' is not an action"),
        ("ack_wait_ms: 500", "ack_wait_ms: 0", ":20: consumers.billing.ack_wait_ms: expected grea"),
        ("ack_wait_ms: 500", "max_deliver: 0", "max_deliver: 0 would deliver nothing"),
        ("store: postgresql:", "store: mysql:", ":28: store: not a Postgres URL"),
        ("store: postgresql://app:s3cret@db/store", "store: ''", ":28: store: empty: expected pos"),
        ("store: postgresql://app:s3cret@db/store", "store: 5", ":28: store: expected "),
        ("store: postgresql", "stroe: postgresql", ":28: stroe: unknown key; did you mean store?"),
    ],
)
def test_mistakes_name_line_and_key(tmp_path: Path, old: str, new: str, expected: str) -> None:
    found = problems(tmp_path, change(old, new))
    assert any(expected in line for line in found), found
    assert len(found) == 1


def test_consumers_as_a_list_or_nothing(tmp_path: Path) -> None:
    start = EXAMPLE[: EXAMPLE.index("consumers:")]
    assert read(tmp_path, f"{start}consumers:\n").consumers == {}
    assert problems(tmp_path, f"{start}consumers: [a]\n") == [
        ":17: consumers: expected consumers by name, got a list"
    ]


def test_a_remote_master_needs_a_store(tmp_path: Path) -> None:
    remote = "spark: {master: 'spark://host:7077'}\n"
    start = EXAMPLE[: EXAMPLE.index("store:")]
    (line,) = problems(tmp_path, start + remote)
    assert line.startswith(":28: spark.master: executors of spark://host:7077 can't reach")
    assert "store: ${PENSTOCK_STORE_URL}" in line
    assert read(tmp_path, EXAMPLE + remote).spark.master == "spark://host:7077"
    config = read(tmp_path, start)
    with pytest.raises(ValueError, match="can't reach the embedded store"):
        Config(
            sources=config.sources,
            sinks=config.sinks,
            spark=SparkSettings(master="yarn", checkpoint="x"),
        )


def test_a_missing_variable_in_a_list_is_reported_once(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, EXAMPLE.replace(SECRET, '"${SECRET}"'))
    assert "secrets[0]: the environment variable SECRET is not set" in found


def test_no_secret_in_an_error(tmp_path: Path) -> None:
    text = change("https://crm.example/hook", "htps://crm.example/zQpath?zQquery")
    text = text.replace("Bearer t0ken", "[zQheader]").replace(SECRET, "zQsecret")
    text = text.replace("postgresql://app:s3cret", "mysql://app:zQpassword")
    found = problems(tmp_path, text)
    assert len(found) == 4
    assert "zQ" not in "".join(found)


def test_the_store_alone_needs_nothing_else_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("sources: {shop: {url: '${UNSET}', nope: 1}}\nstore: ${STORE}\n")
    store = load_store(file, {"STORE": "postgres://db/store"}).store
    assert store is not None
    assert store.get_secret_value() == "postgres://db/store"
    assert sink_names(file, {}) == []
    with pytest.raises(ConfigError, match=r":2: store: the environment variable STORE is not set"):
        load_store(file, {})
    file.write_text(EXAMPLE)
    assert sink_names(file, {}) == ["jetstream", "orders", "stock"]
    file.write_text("sinks: [\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_store(file, {})
    file.write_text("sources: {}\n")
    assert load_store(file, {}).store is None
    for text, reported in (("- a\n", "expected the keys"), ("stroe: x\n", "did you mean store?")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=reported):
            load_store(file, {})
    with pytest.raises(ConfigError, match="no such file"):
        load_store(tmp_path / "nowhere.yaml", {})


def test_the_settings_of_a_streams_own_group(tmp_path: Path) -> None:
    keys = (
        "ack_wait_ms: 500",
        "max_deliver: 3",
        "max_ack_pending: 7",
        "max_waiting: 2",
        "deletes: true",
    )
    lines = "".join(f"\n    {key}" for key in keys)
    config = read(tmp_path, EXAMPLE.replace("kind: rows", f"kind: rows{lines}"))
    assert config.streams["stock"].group == {
        "ack_wait_ms": 500, "max_deliver": 3, "max_ack_pending": 7, "max_waiting": 2, "deletes": True,
    }  # fmt: skip
    assert config.streams["orders"].group == {"deletes": False}
