"""Whether two sinks put the same messages into one stream, which takes each once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from penstock.config.nats_consumers import OWN_FILTERS
from penstock.config.sinks import NatsSinkSettings, SinkSettings
from penstock.core.errors import Concern, Mistake, SinkError
from penstock.core.finding import Finding
from penstock.core.tables import TablePattern
from penstock.sinks.nats.jetstream import JetStreamApi, stream_of
from penstock.sinks.nats.login import by_login


def shared_streams(
    source: str, sinks: Mapping[str, SinkSettings], consumers: Mapping[str, SinkSettings]
) -> Iterator[Finding]:
    """Find NATS sinks and consumers that put the same messages into one stream, which takes each once.

    It is a warning where filters may keep their messages apart.
    """
    all_of_them = {**sinks, **consumers}
    of = {n: Concern("consumer" if n in consumers else "sink", n) for n in all_of_them}
    for name, other, stream in _in_one_stream(source, all_of_them):
        # What has the same filter, as consumers of one stream have, is not kept apart by it.
        filters = {all_of_them[name].filter, all_of_them[other].filter}
        filtered = len(filters) > 1 or OWN_FILTERS in filters
        found = Mistake(
            of[name],
            f"it and {of[other]} put the same messages of source {source} into stream "
            f"{stream}, which drops the second of each as a duplicate (both carry the same "
            "Nats-Msg-Id)",
        )
        yield Finding(
            "warning" if filtered else "error",
            str(found.concerns),
            found.reason,
            f"give {name} subjects that another stream captures, or tables or actions that "
            f"{other} does not take",
            found,
        )


def shared_streams_of_outboxes(sinks: Mapping[str, NatsSinkSettings]) -> Iterator[Finding]:
    """Find pipelines that put one outbox's messages into one stream; `sinks` has their names.

    Only those of an outbox that has several are asked for; one that can't be asked is passed by.
    """
    of_outbox: dict[str, dict[str, NatsSinkSettings]] = {}
    for name, sink in sinks.items():
        if sink.form is not None:
            of_outbox.setdefault(sink.form.name, {})[name] = sink
    for outbox, several in of_outbox.items():
        for name, other, stream in _in_one_stream("", several) if len(several) > 1 else ():
            yield Finding(
                "warning",
                f"pipeline {name}",
                f"it and pipeline {other} put the same messages of outbox {outbox} into stream "
                f"{stream}, which drops the second of each as a duplicate (both carry the same "
                "Nats-Msg-Id)",
                f"give {name} a subject that another stream captures, or delete one of the two",
            )


def _in_one_stream(
    source: str, sinks: Mapping[str, SinkSettings]
) -> Iterator[tuple[str, str, str]]:
    """Yield sinks that put the same messages into one stream: the later, the earlier, the stream."""
    streams: dict[str, tuple[str, frozenset[tuple[str, int]]]] = {}
    of_nats = {name: sink for name, sink in sinks.items() if isinstance(sink, NatsSinkSettings)}
    found = _streams_of(source, of_nats)
    for name, sink in of_nats.items():
        if (stream := found.get(name)) is None:
            continue
        behind = "" if sink.reached is None else f"{sink.reached.host}:{sink.reached.port}/"
        servers = frozenset((f"{behind}{server.host}", server.port) for server in sink.servers)
        for other, (other_stream, other_servers) in streams.items():
            if other_stream != stream or not servers & other_servers:
                continue
            if _overlap(sink, sinks[other]):
                yield name, other, stream
        streams[name] = stream, servers


def _streams_of(source: str, sinks: Mapping[str, NatsSinkSettings]) -> dict[str, str]:
    """Return the streams of sinks, over one connection a login; what fails is reported already."""
    found: dict[str, str] = {}
    for names in by_login(sinks):
        with contextlib.suppress(SinkError), JetStreamApi(sinks[names[0]]) as api:
            for name in names:
                with contextlib.suppress(SinkError):
                    found[name] = stream_of(api, sinks[name], source)
    return found


def _overlap(a: SinkSettings, b: SinkSettings) -> bool:
    if not set(a.actions) & set(b.actions):
        return False
    if a.patterns is None or b.patterns is None:
        return True
    # Also tables that are not there yet: two patterns meet where one covers the other.
    return any(_meet(p, q) for p in a.patterns for q in b.patterns)


def _meet(a: TablePattern, b: TablePattern) -> bool:
    return a.covers(b) or b.covers(a)
