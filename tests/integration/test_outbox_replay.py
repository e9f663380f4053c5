"""Dead letters of an outbox's pipelines: a replay sends the message that the relay would have sent."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import SecretStr

from penstock.config.file import load
from penstock.config.settings import Config
from penstock.config.sources import OutboxSource
from penstock.core.errors import ConfigError, SetupError, SinkError
from penstock.embedded.handles import Database, JetStream, Msg
from penstock.embedded.nats import EmbeddedNats
from penstock.outbox.configured import configuration, pipelines
from penstock.outbox.settings import OutboxSinkSettings
from penstock.outbox.sql.install import install
from penstock.sinks.nats.sink import NatsSink
from penstock.streams.store import Store
from penstock.trial import live
from penstock.trial.replay import Replay

PADDING = "x" * 2_000
Made = tuple[str, dict[str, str], bytes]
Published = tuple[str, str | None, dict[str, Any]]


class App:
    """An application's database with the outbox `orders`, and streams for its pipelines."""

    def __init__(self, database: Database, server: EmbeddedNats, nats: JetStream) -> None:
        self.source = OutboxSource(type="outbox", url=SecretStr(database.url))
        self.database = database
        self.nats = nats
        self._server = server

    def stream(self, **config: Any) -> str:
        name = f"R{uuid.uuid4().hex[:8]}"
        self.nats.add_stream(name, f"{name}.>", **config)
        return name

    def set(self, pipeline: str, outbox: str = "orders", **config: Any) -> None:
        given = {"sink_type": "nats", "url": self._server.url, **config}
        self.database.execute(
            "select tide.relay_set_outbox(%s, %s, 'group', %s)",
            [pipeline, outbox, json.dumps(given)],
        )

    def captured(self, *messages: Published) -> pa.RecordBatch:
        """Publish messages, JSON, keys and headers, and return what the capture makes of them."""

        def publish() -> None:
            for payload, key, headers in messages:
                self.database.execute(
                    "select tide.outbox_publish('orders', %s::jsonb, %s, %s::jsonb)",
                    [payload, key, json.dumps(headers)],
                )

        sink, config = self.sink("notify")
        found = live.read(
            config.sources[sink.source], lambda batch: batch, len(messages), 30, publish
        )
        assert found is not None
        assert found.num_rows == len(messages)
        return found

    def sink(self, pipeline: str) -> tuple[OutboxSinkSettings, Any]:
        config = configuration(self.source, pipelines(self.source)[pipeline])
        sink = config.sinks[pipeline]
        assert isinstance(sink, OutboxSinkSettings)
        return sink, config

    def send(self, pipeline: str, rows: pa.RecordBatch, store: Store) -> int:
        """Publish as the relay does, keep the dead letters, and return how many there are."""
        settings, _ = self.sink(pipeline)
        sink = NatsSink(settings, name=pipeline, source=settings.source)
        written = sink.write(rows)
        sink.close()
        store.letters.add(pipeline, written.dead)
        return len(written.dead)

    def configuration(self) -> Config:
        return Config(sources={}, sinks={}, outboxes={"outbox": self.source})

    def replay(self, store: Store) -> int:
        letters = [letter for letter in store.letters.page() if letter.replayed_at is None]
        with Replay(store, self.configuration) as replay:
            for letter in letters:
                replay.send(letter)
        return len(letters)

    def read(self, stream: str) -> list[Made]:
        """Return what a consumer has of messages, whichever of the relay's ways they came."""
        return [made(message) for message in self.nats.messages(stream)]


def made(message: Msg) -> Made:
    way = ("Nats-Expected-", "Nats-Batch-")
    headers = {n: v for n, v in message.headers.items() if not n.startswith(way)}
    return message.subject, headers, message.data


@pytest.fixture
def app(database: Database, nats_server: EmbeddedNats, nats: JetStream) -> App:
    with database.connect(autocommit=True) as connection:
        install(connection)
    database.execute("select tide.outbox_create('orders'), tide.outbox_create('others')")
    return App(database, nats_server, nats)


@pytest.fixture
def store(app: App) -> Iterator[Store]:
    with Store.open(app.database.url) as opened:
        yield opened


DEEP = "[" * 2_000 + "]" * 2_000
BIG: list[Published] = [
    (f'{{"type": "é", "n": 1.10, "pad": "{PADDING}"}}', "key-1", {"Trace": "é: b", "n": 5}),
    (f'{{"big": 123456789012345678901234567890.5, "a": {DEEP}}}', None, {"many": ["a", "b"]}),
    (f'{{"type": "t", "pad": "{PADDING}"}}', None, {}),
]


@pytest.mark.parametrize("form", ["plain", "envelope", "cloudevents", "debezium"])
def test_a_replay_is_the_message_that_the_relay_sends(app: App, store: Store, form: str) -> None:
    """Too large for the stream; then the pipeline is given another one, by another subject."""
    small = app.stream(max_msg_size=1_000)
    app.set("notify", format=form, subject=f"{small}.x")
    rows = app.captured(*BIG)
    assert app.send("notify", rows, store) == 3
    assert app.read(small) == []

    large = app.stream()
    app.set("notify", format=form, subject=f"{large}.{{payload.type}}", stream=large)
    assert app.replay(store) == 3
    replayed = app.read(large)
    ids = [headers["Nats-Msg-Id"] for _, headers, _ in replayed]
    tag = ids[0][:15]
    assert re.fullmatch("orders/[0-9a-f]{8}", tag)
    assert ids == [f"{tag}:key-1", f"{tag}#2", f"{tag}#3"]
    assert replayed[0][1]["Trace"] == "é: b"
    assert app.replay(store) == 0

    app.nats.delete_stream(large)  # and with it what it knows of ids
    app.nats.add_stream(large, f"{large}.>")
    assert app.send("notify", rows, store) == 0
    assert app.read(large) == replayed


def test_one_that_the_relay_sent_after_all_is_not_sent_twice(app: App, store: Store) -> None:
    stream = app.stream(max_msg_size=1_000)
    app.set("notify", subject=f"{stream}.x")
    rows = app.captured(*BIG)
    app.send("notify", rows, store)
    app.nats.delete_stream(stream)
    app.nats.add_stream(stream, f"{stream}.>")
    app.send("notify", rows, store)
    assert app.replay(store) == 3
    assert len(app.read(stream)) == 3


def test_what_no_server_takes_is_replayed_by_todays_subject(app: App, store: Store) -> None:
    stream = app.stream()
    app.set("notify", subject=f"{stream}.{{payload.s}}")
    rows = app.captured((json.dumps({"s": "x" * 4_000}), "k", {}))
    assert app.send("notify", rows, store) == 1
    (letter,) = store.letters.page("notify")
    assert (letter.code, letter.subject) == ("subject_too_long", "")
    assert json.loads(letter.message)["record"]["dedup_key"] == "k"
    with pytest.raises(SinkError) as caught:
        app.replay(store)
    assert caught.value.code == "subject_too_long"
    assert "fails again" in str(caught.value)
    app.set("notify", subject=f"{stream}.y")
    assert app.replay(store) == 1
    ((subject, headers, _),) = app.read(stream)
    assert subject == f"{stream}.y"
    assert headers.keys() == {"Nats-Msg-Id", "Penstock-Pipeline"}
    assert re.fullmatch("orders/[0-9a-f]{8}:k", headers["Nats-Msg-Id"])
    assert headers["Penstock-Pipeline"] == "notify"


def test_a_replay_is_not_done_by_anothers_message_of_its_key(app: App, store: Store) -> None:
    """Another pipeline has put the row into the stream: the letter stays as it was."""
    small, shared = app.stream(max_msg_size=1_000), app.stream()
    app.set("notify", subject=f"{small}.x")
    app.set("other", subject=f"{shared}.other")
    rows = app.captured(BIG[0])
    assert app.send("notify", rows, store) == 1
    assert app.send("other", rows, store) == 0
    app.set("notify", subject=f"{shared}.mine")
    with pytest.raises(SinkError) as caught:
        app.replay(store)
    assert caught.value.code == "duplicate_key"
    assert all(name in str(caught.value) for name in ("'notify'", "'other'", ":key-1'", shared))
    assert store.letters.page("notify")[0].replayed_at is None
    assert len(app.read(shared)) == 1


def test_a_replay_that_has_no_pipeline(app: App, store: Store, tmp_path: Path) -> None:
    """Deleted, of another outbox by now, with a reference to nothing; the letter stays."""
    stream = app.stream(max_msg_size=1_000)
    app.set("notify", subject=f"{stream}.x")
    app.send("notify", app.captured(BIG[0]), store)

    def fails(code: str) -> str:
        with pytest.raises(SinkError) as caught:
            app.replay(store)
        assert caught.value.code == code
        assert store.letters.page("notify")[0].replayed_at is None
        return str(caught.value)

    app.set("notify", subject=f"{stream}.x", token="${env:NOWHERE_AT_ALL}")
    assert "${env:NOWHERE_AT_ALL}" in fails("unresolved_reference")
    app.database.execute("select tide.relay_delete('notify')")
    assert "There is no pipeline 'notify' any more" in fails("no_sink")
    app.set("notify", "others", subject=f"{stream}.x")
    assert "is not for notify any more" in fails("passed_by")


def test_a_database_without_the_schema(database: Database) -> None:
    source = OutboxSource(type="outbox", url=SecretStr(database.url))
    with pytest.raises(SetupError) as caught:
        pipelines(source)
    assert caught.value.code == "not_installed"


def test_the_outboxes_of_the_file_are_searched(
    app: App, store: Store, tmp_path: Path, database: Database
) -> None:
    """The sinks of a `penstock.yaml` with outboxes are in their databases; two may have one name."""
    large, small = app.stream(), app.stream(max_msg_size=1_000)
    app.set("notify", subject=f"{small}.x")
    app.send("notify", app.captured(BIG[2]), store)
    app.set("notify", subject=f"{large}.x")
    (letter,) = store.letters.page("notify")
    file = tmp_path / "penstock.yaml"

    def configuration() -> Config:
        return load(file)

    with pytest.raises(ConfigError), Replay(store, configuration) as replay:
        replay.send(letter)
    outbox = f"{{type: outbox, url: '{database.url}'}}"
    file.write_text(f"sources: {{a: {outbox}, b: {outbox}}}")
    with (
        pytest.raises(SinkError, match="2 of the outboxes"),
        Replay(store, configuration) as replay,
    ):
        replay.send(letter)
    file.write_text(f"sources: {{a: {outbox}}}")
    with Replay(store, configuration) as replay:
        replay.send(letter)
    assert len(app.read(large)) == 1
