"""What a configuration with a sync has of itself: the source `syncs`, and its two streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Final, Literal, TypeVar

from pydantic import SecretStr

from penstock.config.jetstream import JetStreamSettings
from penstock.config.nats_consumers import NatsConsumer
from penstock.config.sinks import NatsSinkSettings, Sink, SinkSettings, StreamSinkSettings
from penstock.config.sources import PostgresSource
from penstock.config.syncs import RecordsSettings
from penstock.core.record_forms import EVENTS, RECORDS, SYNCS
from penstock.core.subject import SYNC_VARIABLES, SubjectTemplate
from penstock.core.text import Path

TABLE: Final = "penstock.records"
SLOT: Final = "penstock_syncs"
KINDS: Final[Mapping[str, Literal["changes", "rows"]]] = {RECORDS: "rows", EVENTS: "changes"}
"""The reserved streams, and their kinds."""
_NOT_KNOWN: Final = SecretStr("postgresql:///postgres")
"""The URL of the embedded store, before that runs."""

Contradiction = tuple[Path, str]
T = TypeVar("T", NatsSinkSettings, NatsConsumer)


def is_known(of: PostgresSource) -> bool:
    """Return whether it is known where the records store is."""
    return of.url != _NOT_KNOWN


def source(url: SecretStr | None) -> PostgresSource:
    """Return the source `syncs`; `url` is the records store's, None before the embedded one runs."""
    return PostgresSource(
        type="postgres", url=url or _NOT_KNOWN, tables=(TABLE,), slot=SLOT, publication=SLOT
    )


def streams(records: RecordsSettings) -> dict[str, StreamSinkSettings]:
    """Return the streams `records` and `events`."""
    return {
        RECORDS: StreamSinkSettings(type="stream", source=SYNCS, kind="rows"),
        EVENTS: StreamSinkSettings(
            type="stream", source=SYNCS, actions=("insert", "update"), retention=records.retention
        ),
    }


def of_names(
    sources: Iterable[str], sinks: Iterable[str], syncs: Iterable[str]
) -> Iterator[Contradiction]:
    """Yield which of a user's own entities have the names that syncs need."""
    reason = "that name is reserved: choose another one"
    if SYNCS in list(sources):
        # Whether there are syncs or not: the messages of a source of this name have forms of their own.
        yield ("sources", SYNCS), f"the syncs are a source of this name themselves: {reason}"
    if not list(syncs):
        return
    for name in sinks:
        if name in KINDS:
            yield ("sinks", name), f"the syncs have a stream of this name themselves: {reason}"


def of_variables(
    sinks: Mapping[str, SinkSettings],
    consumers: Mapping[str, NatsConsumer],
    sources: Mapping[str, str],
) -> Iterator[Contradiction]:
    """Yield which subjects name what only records and events have; `sources` are those of streams."""
    for name, sink in sinks.items():
        if not isinstance(sink, NatsSinkSettings) or sink.form is not None:
            continue  # an outbox's subjects have variables of their own
        if sink.source != SYNCS:
            for text in sink.templates:
                yield from _wrong(("sinks", name, "subject"), text)
    for name, consumer in consumers.items():
        if sources.get(consumer.stream, SYNCS) != SYNCS:
            yield from _wrong(("consumers", name, "subject"), consumer.subject)


def _wrong(path: Path, text: str) -> Iterator[Contradiction]:
    if found := SubjectTemplate.parse(text).of_syncs:
        yield (
            path,
            f"{{{found[0]}}} is of records and events alone ({SYNC_VARIABLES}), and the messages are of "
            "tables: name a column, as in {record.<column>}",
        )


def with_subjects(sink: Sink, records: RecordsSettings) -> Sink:
    """Return a sink of the source `syncs` with the subject of its messages, if it has none."""
    if not isinstance(sink, NatsSinkSettings) or sink.source != SYNCS:
        return sink
    return sink if "subject" in sink.model_fields_set else _named(sink, sink.kind, records)


def consumer_with_subjects(
    consumer: NatsConsumer, stream: SinkSettings | None, records: RecordsSettings
) -> NatsConsumer:
    """Return a consumer of a stream of the source `syncs` with the subject of its messages."""
    if stream is None or stream.source != SYNCS or "subject" in consumer.model_fields_set:
        return consumer
    return _named(consumer, stream.kind, records)


def _named(of: T, kind: str, records: RecordsSettings) -> T:
    subject = records.records_subject if kind == "rows" else records.events_subject
    wanted = of.stream_config or JetStreamSettings()
    given = wanted.given()
    recommended = {k: v for k, v in jetstream(kind, subject).items() if k not in given}
    config = wanted.model_copy(update=recommended)
    return of.model_copy(update={"subject": subject, "stream_config": config})


def jetstream(kind: str, subject: str) -> dict[str, object]:
    """Return the recommended settings of the JetStream stream of records (rows), or of events."""
    first = subject.split(".", 1)[0]
    shared: dict[str, object] = {"retention": "limits", "storage": "file"}
    if "{" not in first:
        shared["subjects"] = (f"{first}.>",)
    if kind == "rows":
        return shared | {"max_msgs_per_subject": 1}
    return shared | {
        "max_msgs_per_subject": 100,
        "discard": "old",
        "max_age": timedelta(days=7),
    }
