"""Consumers of type nats in the file."""

from __future__ import annotations

import pickle
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.config.file import load
from penstock.config.nats_consumers import NatsConsumer, parse_start
from penstock.config.secret_values import masked
from penstock.config.settings import Config
from penstock.core.errors import ConfigError
from penstock.core.message import Position

FILE = """\
sources:
  shop: {type: postgres, url: "postgres://db/shop"}
  stock: {type: postgres, url: "postgres://db/stock"}
sinks:
  orders: {type: stream, source: shop, tables: [public.orders], group_by: [customer]}
  items: {type: stream, source: stock, kind: rows, filter: record.id > 1}
  out: {type: nats, source: shop}
consumers:
  workers: {stream: orders}
  mail:
    type: nats
    stream: orders
    url: nats://app:s3cret@nats:4222
    subject: "mail.{table}"
    jetstream: MAIL
    batch_size: 10
    detach_after: 5s
    filters: {table: orders, action: [insert]}
  copy: {type: nats, stream: items, user: app, password: s3cret, start_at: "0/16B3748:3"}
"""


def read(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "penstock.yaml"
    file.write_text(text)
    return load(file, {})


def problem(tmp_path: Path, old: str, new: str) -> str:
    assert old in FILE
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, FILE.replace(old, new))
    (text,) = caught.value.problems
    return text


def test_it_is_a_sink_for_what_its_stream_holds(tmp_path: Path) -> None:
    config = read(tmp_path, FILE)
    assert list(config.consumers) == ["workers"]
    assert list(config.nats_consumers) == ["mail", "copy"]
    mail = config.nats_consumers_of("shop")["mail"]
    assert (mail.source, mail.stream, mail.kind, mail.subject) == (
        "shop", "MAIL", "changes", "mail.{table}",
    )  # fmt: skip
    assert (mail.batch_size, mail.detach_after) == (10, timedelta(seconds=5))
    # Groups, filter and transform are the stream's, and done with.
    assert (mail.group_by, mail.transform, mail.route) == (None, None, None)
    assert mail.tables == ("public.orders",)
    assert mail.filter is not None
    copy = config.nats_consumers_of("stock")["copy"]
    assert (copy.kind, copy.subject, copy.filter) == (
        "rows", "{source}.{schema}.{table}", "record.id > 1",
    )  # fmt: skip
    assert copy.password is not None
    assert copy.password.get_secret_value() == "s3cret"
    assert config.nats_consumers["copy"].start == Position(0x16B3748, 3)
    assert config.nats_consumers["mail"].start == "all"
    assert pickle.loads(pickle.dumps(mail)) == mail


def test_no_secret_is_shown(tmp_path: Path) -> None:
    for consumer in read(tmp_path, FILE).nats_consumers.values():
        assert "s3cret" not in f"{consumer!r}{consumer.shown()}"
    shown = read(tmp_path, FILE).nats_consumers["mail"].shown()
    assert (shown["url"], shown["detach_after"]) == ("nats://nats:4222", "5s")
    assert shown["filters"]["table"] == ["orders"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("jetstream: MAIL", "kind: rows", "`kind` is that of the stream: remove it"),
        ("jetstream: MAIL", "group_by: [id]", "`group_by` is that of the stream: remove it"),
        ("jetstream: MAIL", "jetstream: a.b", "'a.b' cannot name a stream"),
        ("jetstream: MAIL", "start_at: soon", "'soon' is no place in a stream"),
        ("jetstream: MAIL", "start_at: 2026-01-31T12:00:00", "with its offset"),
        ("jetstream: MAIL", 'start_at: "0/0"\n    deliver_policy: new', "remove one"),
        ("jetstream: MAIL", "jetstrem: MAIL", "did you mean jetstream"),
        ("stream: orders\n", "stream: order\n", "there is no stream 'order'"),
        ("stream: orders\n", "stream: out\n", "sink 'out' is not of type stream"),
        ("  mail:\n", "  out:\n", "there is a sink 'out' too"),
        ("  mail:\n", "  items:\n", "stream 'items' has a consumer of that name"),
        ("detach_after: 5s", "detach_after: 5", "a number and its unit"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert expected in problem(tmp_path, old, new)


def test_places() -> None:
    assert parse_start("0/16B3748") == Position(0x16B3748, 0)
    assert parse_start("2026-01-31T13:00:00+01:00") == datetime(2026, 1, 31, 12, tzinfo=UTC)
    model = {"type": "nats", "stream": "orders", "start_at": "2026-01-31T12:00:00Z"}
    assert NatsConsumer.model_validate(model).start == datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_a_condition_is_a_filter_as_of_other_consumers(tmp_path: Path) -> None:
    text = FILE.replace("{table: orders, action: [insert]}", "{sql: record.id > 5}")
    config = read(tmp_path, text)
    assert config.nats_consumers["mail"].filters.sql == "record.id > 5"
    assert config.nats_consumers_of("shop")["mail"].filter is not None
    assert "filters.sql" in problem(tmp_path, "{table: orders, action: [insert]}", "{sql: 1 +}")


def test_the_jetstream_stream_is_made_as_a_sinks_is(tmp_path: Path) -> None:
    of = "create_stream: true\n    stream_config: {subjects: [SUBJECT], replicas: 3}\n    batch_size: 10"
    text = FILE.replace("batch_size: 10", of)
    mail = read(tmp_path, text.replace("SUBJECT", '"mail.>"')).nats_consumers_of("shop")["mail"]
    assert mail.create_stream
    assert mail.stream_config is not None
    assert (mail.stream_config.subjects, mail.stream_config.replicas) == (("mail.>",), 3)
    for old, new, expected in (
        ("SUBJECT", "post.x", "take nothing of what is published to mail.*"),
        ("subjects: [SUBJECT]", "name: POST", "`jetstream` is MAIL and stream_config.name POST"),
    ):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            read(tmp_path, text.replace(old, new))
    text = text.replace('    subject: "mail.{table}"\n', "").replace("SUBJECT", "shop.>")
    assert read(tmp_path, text).nats_consumers_of("shop")["mail"].stream_config is not None


TARGET = """\
targets:
  jet: {type: nats, url: "nats://far:4222", user: app, password: s3cret, bastion: {host: b, user: u}}
  web: {type: http, url: "https://far"}
"""


def test_a_target_has_the_servers_the_login_and_the_bastion(tmp_path: Path) -> None:
    text = FILE.replace("url: nats://app:s3cret@nats:4222", "target: jet") + TARGET
    sink = read(tmp_path, text).nats_consumers_of("shop")["mail"]
    assert (sink.url, sink.user, sink.subject) == ("nats://far:4222", "app", "mail.{table}")
    assert sink.reached is not None
    assert (sink.reached.owner, sink.reached.host) == ("jet", "b")
    for old, new, expected in (
        ("target: jet", "target: jit", "there is no target 'jit'"),
        ("target: jet", "target: web", "target 'web' is of type http"),
        ("target: jet", "target: jet\n    url: nats://here", "target and url"),
    ):
        with pytest.raises(ConfigError, match=expected):
            read(tmp_path, text.replace(old, new))


def test_deletes_are_of_a_stream_of_kind_rows(tmp_path: Path) -> None:
    text = FILE.replace("stream: items,", "stream: items, deletes: true,")
    config = read(tmp_path, text)
    assert config.nats_consumers_of("stock")["copy"].deletes
    assert not read(tmp_path, FILE).nats_consumers_of("stock")["copy"].deletes
    assert "only kind rows" in problem(
        tmp_path,
        "type: nats\n    stream: orders",
        "type: nats\n    deletes: true\n    stream: orders",
    )


def test_no_login_of_any_server_is_shown() -> None:
    urls = "nats://a:one@h1:4222,nats://b:two@h2:4222"
    shown = masked("consumer", {"type": "nats", "stream": "s", "url": urls, "password": "three"})
    assert not any(secret in str(shown) for secret in ("one", "two", "three"))
    assert "h2:4222" in shown["url"]
