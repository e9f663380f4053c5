"""What may not stand beside what: between sources, sinks, consumers, syncs, the store and Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from penstock.config.collections import collections_of
from penstock.config.consumers import HttpConsumer
from penstock.config.deletes import OF_CHANGES
from penstock.config.nats_consumers import NatsConsumer
from penstock.config.providers import READY, ProviderSettings
from penstock.config.sinks import SinkSettings
from penstock.config.sources import OutboxSource, PostgresSource
from penstock.config.syncs import Credential, Sync
from penstock.config.targets import HttpTarget, Target, bastion_of
from penstock.core.record_forms import EVENTS, RECORDS
from penstock.core.text import Path, nearest

Contradiction = tuple[Path, str]
"""Where it stands, and what is wrong."""


def of_sinks(
    sources: Mapping[str, PostgresSource],
    sinks: Mapping[str, SinkSettings],
    names: Iterable[str],
) -> Iterator[Contradiction]:
    """Yield what is wrong between sources and sinks; `names` are all sources, wrong ones included."""
    names = list(names)
    slots: dict[tuple[str, str, str], str] = {}
    for name, source in sources.items():
        # One name may be two servers behind two bastions.
        behind = "" if source.bastion is None else f"{source.bastion.host}:{source.bastion.port}"
        other = slots.setdefault((source.url.get_secret_value(), behind, source.slot), name)
        if other != name:
            message = f"{source.slot!r} is the slot of source {other!r} too: give each its own"
            yield ("sources", name, "slot"), message
    for name, sink in sinks.items():
        if sink.source not in names:
            known = f"expected one of {', '.join(names)}" if names else "add it"
            message = f"there is no source {sink.source!r}: {known}"
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
    consumers: Mapping[str, HttpConsumer | NatsConsumer],
    sinks: Iterable[str],
    streams: Mapping[str, str],
) -> Iterator[Contradiction]:
    """Yield what is wrong between consumers and streams; `streams` has the kind of each."""
    for name, consumer in consumers.items():
        if name in streams:
            message = f"stream {name!r} has a consumer of that name, its own: choose another"
            yield ("consumers", name), message
        if consumer.deletes and streams.get(consumer.stream) == "changes":
            yield ("consumers", name, "deletes"), OF_CHANGES
        if consumer.stream not in streams:
            path: Path = ("consumers", name, "stream")
            if consumer.stream in sinks:
                yield path, f"sink {consumer.stream!r} is not of type stream"
            elif consumer.stream in (EVENTS, RECORDS):
                yield (
                    path,
                    f"there is no stream {consumer.stream!r} without a sync: keep or add one, which may"
                    " have `status: disabled`, or delete the consumer",
                )
            else:
                known = f"expected one of {', '.join(streams)}" if streams else "add a sink of it"
                message = f"there is no stream {consumer.stream!r}: {known}"
                yield path, message + nearest(consumer.stream, streams)


def of_nats_consumers(
    consumers: Mapping[str, NatsConsumer], sinks: Iterable[str], streams: Mapping[str, str]
) -> Iterator[Contradiction]:
    """Yield what is wrong between NATS consumers, streams and sinks."""
    yield from of_consumers(consumers, sinks, streams)
    for name in consumers:
        if name in sinks and name not in streams:
            # Both have dead letters and a backlog, by their names.
            yield ("consumers", name), f"there is a sink {name!r} too: choose another name"


def of_targets(
    targets: Mapping[str, Target],
    sources: Mapping[str, PostgresSource | OutboxSource],
    sinks: Mapping[str, SinkSettings],
    consumers: Mapping[str, HttpConsumer | NatsConsumer],
    names: Iterable[str] | None = None,
) -> Iterator[Contradiction]:
    """Yield what is wrong between targets, what names them, and the keys of their bastions.

    `names` are all targets, wrong ones included.
    """
    known = list(targets if names is None else names)
    users: list[tuple[str, str, SinkSettings | HttpConsumer | NatsConsumer]] = [
        *(("sinks", name, sink) for name, sink in sinks.items()),
        *(("consumers", name, consumer) for name, consumer in consumers.items()),
    ]
    for kind, user, settings in users:
        if (name := getattr(settings, "target", None)) is None:
            continue
        path: Path = (kind, user, "target")
        if name not in known:
            expected = f"expected one of {', '.join(known)}" if known else "add it to `targets`"
            yield path, f"there is no target {name!r}: {expected}{nearest(name, known)}"
            continue
        if isinstance(settings, NatsConsumer):
            what, type_ = "a consumer of type nats", "nats"
        else:
            what, type_ = ("a NATS sink", "nats") if kind == "sinks" else ("a webhook", "http")
        if name in targets and targets[name].type != type_:
            yield path, f"target {name!r} is of type {targets[name].type}, and {what} needs {type_}"
    for name, target in targets.items():
        # Keys that Penstock keeps for a bastion are found by this one name.
        if target.bastion is not None and name in sources and sources[name].bastion is not None:
            message = f"source {name!r} has a bastion under that name too: rename one of the two"
            yield ("targets", name, "bastion"), message
        try:
            bastion_of(name, target)
            if isinstance(target, HttpTarget):
                target.ca()
                target.identity()
        except ValueError as error:
            yield ("targets", name), str(error)
    for name, source in sources.items():
        try:
            _ = source.bastion and source.bastion.of(name)
        except ValueError as error:
            yield ("sources", name, "bastion"), str(error)


def of_syncs(
    providers: Mapping[str, ProviderSettings],
    credentials: Mapping[str, Credential],
    syncs: Mapping[str, Sync],
    provider_names: Iterable[str] | None = None,
    credential_names: Iterable[str] | None = None,
) -> Iterator[Contradiction]:
    """Yield what is wrong between syncs, credentials and providers; `…_names` include wrong ones."""
    own = list(providers if provider_names is None else provider_names)
    known = [*own, *(name for name in READY if name not in own)]
    keys = list(credentials if credential_names is None else credential_names)
    for name in own:
        if name in READY:
            message = f"{name} is a provider that Penstock has already: choose another name"
            yield ("providers", name), message
    for section, users in (("credentials", credentials), ("syncs", syncs)):
        for name, user in users.items():
            if user.provider not in known:
                expected = f"expected one of {', '.join(known)}"
                message = f"there is no provider {user.provider!r}: {expected}"
                yield (section, name, "provider"), message + nearest(user.provider, known)
    for name, sync in syncs.items():
        path: Path = ("syncs", name, "credential")
        if sync.credential not in keys:
            expected = f"expected one of {', '.join(keys)}" if keys else "add it to `credentials`"
            message = f"there is no credential {sync.credential!r}: {expected}"
            yield path, message + nearest(sync.credential, keys)
        elif sync.credential in credentials:
            of = credentials[sync.credential].provider
            if of != sync.provider:
                yield path, f"{sync.credential!r} is for {of}, and the sync reads {sync.provider}"
        yield from _of_collections(name, sync, providers)


def _of_collections(
    name: str, sync: Sync, providers: Mapping[str, ProviderSettings]
) -> Iterator[Contradiction]:
    known = None
    if sync.provider in providers or sync.provider in READY:
        known = collections_of(sync.provider, providers.get(sync.provider))
    ids = sync.collection_ids
    for i, (id_, short) in enumerate(zip(ids, sync.collection_names, strict=True)):
        path: Path = ("syncs", name, "collections", i)
        if id_ != f"{sync.provider}:{short}":
            yield path, f"{id_} is not of {sync.provider}, which the sync reads"
        elif id_ in ids[:i]:
            yield path, f"{id_} is there twice: remove one"
        elif known is not None and short not in known:
            message = f"{sync.provider} has no collection {short!r}: expected one of "
            yield path, message + ", ".join(known) + nearest(short, known)


def of_store(
    *, has_url: bool, master: str, outboxes: Mapping[str, OutboxSource]
) -> Iterator[Contradiction]:
    """Yield what is wrong between the store, with or without a URL, and what uses it."""
    for name, outbox in outboxes.items():
        if outbox.bastion is not None and not has_url:
            message = (
                "an outbox behind a bastion keeps its backlogs and the bastion's keys in a store that is"
                " reached without it: give a Postgres of yours, `store: ${PENSTOCK_STORE_URL}`"
            )
            yield ("sources", name, "bastion"), message
    if not has_url and not master.startswith("local"):
        yield (
            ("spark", "master"),
            f"executors of {master} can't reach the embedded store, which is this machine's "
            "own: give a Postgres of yours, `store: ${PENSTOCK_STORE_URL}`",
        )
