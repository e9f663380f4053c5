"""Streams that Penstock makes, and what `penstock check` finds of those that are there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from structlog.testing import capture_logs
from tests.waits import await_true

from penstock.check.config import inspect_config
from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.core.errors import SinkError
from penstock.core.finding import Finding
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.runtime.run import Run
from penstock.runtime.stream_maker import StreamMaker
from penstock.sinks.nats.check import inspect
from penstock.sinks.nats.make_stream import ensure_stream, make_stream

from .nats_servers import Writer, batch

ROWS = {"kind": "rows", "subject": "{source}.{table}.{key}"}


@pytest.fixture(scope="module")
def server(server_dir: Path) -> Iterator[EmbeddedNats]:
    """A server with an account that has JetStream, one that lacks it, and a user with few rights."""
    config = """
    accounts {
      A: { jetstream: enabled, users: [
        { user: a, password: a },
        { user: few, password: a, permissions: { publish:
          ["$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.*", "shop.>"] } } ] }
      B: { users: [ { user: b, password: a } ] }
    }
    """
    with EmbeddedNats(server_dir / "make", config) as server:
        yield server


@pytest.fixture
def streams(server: EmbeddedNats) -> Iterator[JetStream]:
    with JetStream(server.url, user="a", password="a") as handle:
        yield handle
        for name in handle.api("STREAM.NAMES", {})["streams"] or ():
            handle.delete_stream(name)


def sink(server: EmbeddedNats, user: str = "a", **settings: Any) -> NatsSinkSettings:
    login = {"url": server.url, "user": user, "password": "a", "create_stream": True}
    return NatsSinkSettings.model_validate({"type": "nats", "source": "shop", **login, **settings})


def found(settings: NatsSinkSettings, words: str) -> list[Finding]:
    findings = inspect(settings, source="shop", sink="orders")
    return [f for f in findings if words in f"{f.subject}: {f.message}"]


def test_a_stream_is_made_once(server: EmbeddedNats, streams: JetStream) -> None:
    wanted = {
        "max_msgs_per_subject": 1, "max_age": "7d", "duplicate_window": "5m", "storage": "memory",
        "max_bytes": 1_000_000, "max_msgs": 1000, "discard": "new", "retention": "interest",
        "replicas": 1,
    }  # fmt: skip
    settings = sink(server, stream_config=wanted, **ROWS)
    (announced,) = found(settings, "a run makes stream")
    assert (announced.level, announced.subject) == ("ok", "subject shop.*.*")
    assert announced.message.endswith("a run makes stream ORDERS of shop.*.*")
    made = ensure_stream(settings, "orders")
    assert made is not None
    assert (made.name, made.subjects) == ("ORDERS", ("shop.*.*",))
    config = streams.info("ORDERS").config
    assert (config.max_msgs_per_subject, config.max_bytes, config.max_msgs) == (1, 1_000_000, 1000)
    assert (config.max_age, config.duplicate_window) == (604_800, 300)
    assert (config.storage, config.discard, config.retention) == ("memory", "new", "interest")
    assert found(settings, "it is as `stream_config` wants it")[0].level == "ok"
    assert {f.level for f in inspect(settings, source="shop", sink="orders")} == {"ok"}
    # It is there now, and stays as it is whatever is wanted.
    other = sink(server, stream_config=wanted | {"max_age": "1d"}, **ROWS)
    assert ensure_stream(other, "orders") is None
    assert streams.info("ORDERS").config.max_age == 604_800
    (difference,) = found(other, "stream_config wants")
    assert (difference.level, difference.subject) == ("warning", "stream ORDERS")
    assert difference.message == "max_age: stream_config wants 1d, it has 7d"
    assert difference.fix == "nats stream edit ORDERS --max-age 1d"


def test_any_stream_that_takes_the_subjects_will_do(
    server: EmbeddedNats, streams: JetStream
) -> None:
    streams.add_stream("OTHER", ["shop.public.orders.*"])
    assert ensure_stream(sink(server), "orders") is None
    with pytest.raises(SinkError) as caught:
        ensure_stream(sink(server, stream="MINE"), "orders")
    assert caught.value.code == "subjects_overlap"
    assert "stream OTHER takes a part of it (shop.public.orders.*)" in caught.value.message


def test_an_expression_routes_to_the_wanted_subjects(
    server: EmbeddedNats, streams: JetStream
) -> None:
    settings = sink(server, route="'audit.' || record.a", stream_config={"subjects": ["audit.>"]})
    assert ensure_stream(settings, "audit") is not None
    assert ensure_stream(settings, "audit") is None


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"stream_config": {"subjects": ["shop.>", "audit.>"]}}, "subjects_overlap",
         "Stream ORDERS can't be made for audit.>: stream AUDIT takes a part of it (audit.logins)"),
        ({"stream_config": {"name": "AUDIT"}}, "stream_exists",
         "A stream AUDIT is there already: it takes audit.logins."),
        ({"stream_config": {"replicas": 3}}, "stream_limits", "replicas"),
        ({"stream_config": {"max_age": "1s", "duplicate_window": "1s", "max_bytes": 2**62}},
         "stream_limits", "insufficient"),
        ({"user": "b"}, "jetstream_not_enabled", "JetStream is not enabled"),
        ({"user": "few"}, "permission_denied", "$JS.API.STREAM.CREATE.ORDERS"),
    ],
)  # fmt: skip
def test_what_is_refused(
    server: EmbeddedNats, streams: JetStream, settings: dict[str, Any], code: str, words: str
) -> None:
    streams.add_stream("AUDIT", ["audit.logins"])
    with pytest.raises(SinkError) as caught:
        make_stream(sink(server, **settings), "orders")
    assert caught.value.code == code
    # Whoever runs the server may still enable JetStream.
    assert caught.value.transient == (code == "jetstream_not_enabled")
    assert words in str(caught.value)
    assert caught.value.remedy
    if code in ("subjects_overlap", "stream_exists"):  # `check` finds it before
        assert [f.level for f in found(sink(server, **settings), caught.value.message)] == ["error"]


def test_rows_that_would_replace_each_other(server: EmbeddedNats, streams: JetStream) -> None:
    streams.add_stream("SHOP", ["shop.>"], max_msgs_per_subject=1)
    words = "keeps one message per subject"
    (warning,) = found(sink(server, kind="rows"), words)
    assert (warning.level, warning.subject) == ("warning", "subject shop.*.*")
    assert warning.fix.startswith("write {source}.{schema}.{table}.{key}")
    for settings in (ROWS, {"kind": "changes"}, {"kind": "rows", "route": "'shop.a'"}):
        assert found(sink(server, **settings), words) == []
    streams.delete_stream("SHOP")
    streams.add_stream("SHOP", ["shop.>"], max_msgs_per_subject=2)
    assert found(sink(server, kind="rows"), words) == []


def test_one_message_of_each_row_stays(server: EmbeddedNats, streams: JetStream) -> None:
    settings = sink(server, stream_config={"max_msgs_per_subject": 1}, **ROWS)
    assert ensure_stream(settings, "orders") is not None
    keys: list[Any] = [1, "a.b *>", 1, 2, "a.b *>", 1]
    rows = batch(keys)
    pks = [f'{{"record_pks":[{json.dumps(key)}],"unavailable":[]}}' for key in keys]
    at = rows.schema.get_field_index("metadata")
    rows = rows.set_column(at, "metadata", pa.array(pks))
    assert Writer(settings).write(rows).delivered == 6
    there = [(m.subject, m.data[:25]) for m in streams.messages("ORDERS")]
    assert there == [
        ("shop.orders.2", b'{"record":{"id": 2, "n": '),
        ("shop.orders.a%2Eb%20%2A%3E", b'{"record":{"id": "a.b *>"'),
        ("shop.orders.1", b'{"record":{"id": 1, "n": '),
    ]


def test_a_server_that_is_down_is_asked_until_it_answers(server_dir: Path) -> None:
    with EmbeddedNats(server_dir / "late") as late, capture_logs() as logs:
        late.stop()
        stopping = threading.Event()
        maker = StreamMaker(stopping)
        settings = NatsSinkSettings.model_validate(
            {"type": "nats", "source": "shop", "url": late.url, "create_stream": True}
        )
        maker.add("orders", settings)
        maker.add("plain", settings.model_copy(update={"create_stream": False}))
        assert maker.wait()
        assert [line["code"] for line in logs] == ["connection_refused"]
        late.restart()
        await_true(lambda: len(logs) == 2)
        assert logs[1]["event"] == "made the sink's stream"
        assert (logs[1]["sink"], logs[1]["stream"]) == ("orders", "ORDERS")
        # What is refused is logged once, and not tried again.
        refused = {"name": "ORDERS", "subjects": ["shop.x.>"]}
        maker.add("x", NatsSinkSettings.model_validate({
            "type": "nats", "source": "shop", "url": late.url, "create_stream": True,
            "subject": "shop.x.y.z.a", "stream_config": refused,
        }))  # fmt: skip
        assert maker.wait()
        assert [line["code"] for line in logs[2:]] == ["stream_exists"]
        stopping.set()


def test_a_run_makes_the_streams_of_its_sinks(
    server: EmbeddedNats, streams: JetStream, database: Database, tmp_path: Path
) -> None:
    login = {"type": "nats", "source": "shop", "url": server.url, "user": "a", "password": "a"}
    config = Config.model_validate(
        {
            "sources": {"shop": {"type": "postgres", "url": database.url}},
            "sinks": {"orders": login | {"create_stream": True}, "x": login | {"subject": "x"}},
            "spark": {"checkpoint": str(tmp_path)},
        }
    )
    with Run(config, database.url) as run, capture_logs() as logs:
        run.prepare()
    assert streams.api("STREAM.NAMES", {})["streams"] == ["ORDERS"]
    assert [line["stream"] for line in logs if "stream" in line] == ["ORDERS"]


def test_check_reports_what_a_run_makes_for_a_consumer(
    server: EmbeddedNats, streams: JetStream, database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    login = {"type": "nats", "url": server.url, "user": "a", "password": "a"}
    config = Config.model_validate(
        {
            "store": database.url,
            "sources": {"shop": {"type": "postgres", "url": database.url}},
            "sinks": {"events": {"type": "stream", "source": "shop"}},
            "nats_consumers": {"mail": login | {"stream": "events", "create_stream": True}},
            "spark": {"checkpoint": str(tmp_path)},
        }
    )
    of_mail = [f for f in inspect_config(config) if f.subject.startswith("consumer mail: ")]
    assert {f.level for f in of_mail} == {"ok"}
    assert any("MAIL" in f"{f.subject} {f.message}" for f in of_mail), of_mail
    assert streams.api("STREAM.NAMES", {})["streams"] is None  # check makes nothing
