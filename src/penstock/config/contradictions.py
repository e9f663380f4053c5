"""What may not stand beside what: between sources, sinks, consumers, the store and Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from penstock.config.consumers import Consumer
from penstock.config.nats_consumers import NatsConsumer
from penstock.config.sinks import SinkSettings
from penstock.config.sources import PostgresSource
from penstock.core.text import Path, nearest

Contradiction = tuple[Path, str]
"""Where it stands, and what is wrong."""


def of_sinks(
    sources: Mapping[str, PostgresSource],
    sinks: Mapping[str, SinkSettings],
    names: Iterable[str],
) -> Iterator[Contradiction]:
    """Yield what is wrong between sources and sinks; `names` are all sources, wrong ones included."""
    slots: dict[tuple[str, str], str] = {}
    for name, source in sources.items():
        other = slots.setdefault((source.url.get_secret_value(), source.slot), name)
        if other != name:
            message = f"{source.slot!r} is the slot of source {other!r} too: give each its own"
            yield ("sources", name, "slot"), message
    for name, sink in sinks.items():
        if sink.source not in names:
            message = f"there is no source {sink.source!r}: expected one of {', '.join(names)}"
            yield ("sinks", name, "source"), message + nearest(sink.source, names)
        elif sink.source in sources:
            patterns = sources[sink.source].patterns
            for i, pattern in enumerate(sink.patterns or ()):
                if not any(own.covers(pattern) for own in patterns):
                    captured = ", ".join(map(str, patterns))
                    yield (
                        ("sinks", name, "tables", i),
                        f"source {sink.source!r} does not capture {pattern}: it has {captured}; "
                        "add the table to the source's `tables`",
                    )


def of_consumers(
    consumers: Mapping[str, Consumer | NatsConsumer], sinks: Iterable[str], streams: Iterable[str]
) -> Iterator[Contradiction]:
    """Yield what is wrong between consumers and streams; both are given by their names."""
    streams = list(streams)
    for name, consumer in consumers.items():
        if name in streams:
            message = f"stream {name!r} has a consumer of that name, its own: choose another"
            yield ("consumers", name), message
        if consumer.stream not in streams:
            path: Path = ("consumers", name, "stream")
            if consumer.stream in sinks:
                yield path, f"sink {consumer.stream!r} is not of type stream"
            else:
                known = f"expected one of {', '.join(streams)}" if streams else "add a sink of it"
                message = f"there is no stream {consumer.stream!r}: {known}"
                yield path, message + nearest(consumer.stream, streams)


def of_nats_consumers(
    consumers: Mapping[str, NatsConsumer], sinks: Iterable[str], streams: Iterable[str]
) -> Iterator[Contradiction]:
    """Yield what is wrong between NATS consumers, streams and sinks."""
    yield from of_consumers(consumers, sinks, streams)
    for name in consumers:
        if name in sinks and name not in streams:
            # Both have dead letters and a backlog, by their names.
            yield ("consumers", name), f"there is a sink {name!r} too: choose another name"


def of_store(*, has_url: bool, master: str) -> Iterator[Contradiction]:
    """Yield what is wrong between the store, with or without a URL, and Spark."""
    if not has_url and not master.startswith("local"):
        yield (
            ("spark", "master"),
            f"executors of {master} can't reach the embedded store, which is this machine's "
            "own: give a Postgres of yours, `store: ${PENSTOCK_STORE_URL}`",
        )
