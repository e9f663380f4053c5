"""What a configuration with a sync has of itself: the source `syncs`, and its two streams."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.check import records
from penstock.config.nats_consumers import NatsConsumer
from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.config.sources import PostgresSource
from penstock.sinks.nats.stream_settings import wanted_config

STORE = "postgresql://u@h/store"


def config(**more: Any) -> Config:
    """Return a configuration with a sync."""
    given: dict[str, Any] = {
        "sources": {},
        "sinks": {},
        "store": STORE,
        "credentials": {"live": {"provider": "stripe", "properties": {"api_key": "k"}}},
        "syncs": {
            "customers": {"provider": "stripe", "collections": ["customers"], "credential": "live"}
        },
    }
    return Config.model_validate(given | more)


def test_a_sync_brings_a_source_and_two_streams() -> None:
    made = config()
    source = made.sources["syncs"]
    assert source.url.get_secret_value() == STORE
    assert (source.tables, source.slot, source.publication) == (
        ("penstock.records",),
        "penstock_syncs",
        "penstock_syncs",
    )
    assert {n: (s.kind, s.source, s.retention) for n, s in made.streams.items()} == {
        "records": ("rows", "syncs", None),
        "events": ("changes", "syncs", timedelta(days=7)),
    }
    assert made.running_sources == ["syncs"]
    assert config(syncs={}).sources == {} == config(syncs={}).sinks


def test_the_source_is_on_the_records_store() -> None:
    made = config(records={"store": "postgresql://u@h/records", "retention": "1d"})
    assert made.sources["syncs"].url.get_secret_value() == "postgresql://u@h/records"
    assert made.streams["events"].retention == timedelta(days=1)
    embedded = config(store=None).stored_at("postgresql://u@embedded/postgres")
    embedded.join()
    assert embedded.sources["syncs"].url.get_secret_value() == "postgresql://u@embedded/postgres"


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"sinks": {"events": {"type": "stream", "source": "syncs"}}}, "sinks.events: .*reserved"),
        (
            {"sources": {"syncs": PostgresSource(type="postgres", url=STORE)}},
            "sources.syncs: .*reserved",
        ),
        (
            {
                "sources": {"shop": PostgresSource(type="postgres", url=STORE)},
                "sinks": {
                    "out": {
                        "type": "nats", "source": "shop", "url": "nats://h", "subject": "x.{sync_id}",
                    }
                },
            },
            r"sinks.out.subject: \{sync_id\} is of records and events alone",
        ),
        ({"sinks": {"out": {"type": "stream", "source": "sync"}}}, "no source 'sync'"),
    ],
)  # fmt: skip
def test_names_and_variables_of_syncs_are_their_own(more: dict[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        config(**more)


def test_without_syncs_the_names_of_the_streams_are_free() -> None:
    source = {"type": "postgres", "url": STORE}
    sinks = {"events": {"type": "stream", "source": "shop"}}
    assert list(config(syncs={}, sources={"shop": source}, sinks=sinks).sinks) == ["events"]
    with pytest.raises(ValidationError, match=r"sources.syncs: .*reserved"):
        config(syncs={}, sources={"syncs": source})


def test_sinks_and_consumers_of_the_syncs_have_the_recommended_subjects_and_streams() -> None:
    nats = {"type": "nats", "url": "nats://h"}
    made = config(
        sinks={
            "all": {**nats, "source": "syncs"},
            "own": {**nats, "source": "syncs", "subject": "own.{upstream_id}"},
        },
        nats_consumers={"newest": {**nats, "stream": "records"}},
    )
    everything, own = made.sinks["all"], made.sinks["own"]
    assert isinstance(everything, NatsSinkSettings)
    assert isinstance(own, NatsSinkSettings)
    assert (
        everything.subject
        == "sequin-events.default.{sync_id}.{provider}.{collection_id}.{upstream_id}.{event_type}"
    )
    assert wanted_config(everything, "all") == {
        "name": "ALL",
        "subjects": ["sequin-events.>"],
        "storage": "file",
        "retention": "limits",
        "max_msgs_per_subject": 100,
        "max_age": 7 * 24 * 3600 * 10**9,
        "discard": "old",
    }
    assert (own.subject, own.stream_config) == ("own.{upstream_id}", None)
    (newest,) = made.nats_consumers_of("syncs").values()
    assert (
        newest.subject
        == "sequin-records.default.{sync_id}.{provider}.{collection_id}.{upstream_id}"
    )
    assert wanted_config(newest, "newest") == {
        "name": "NEWEST",
        "subjects": ["sequin-records.>"],
        "storage": "file",
        "retention": "limits",
        "max_msgs_per_subject": 1,
    }


def test_a_consumer_of_a_table_names_no_variable_of_syncs() -> None:
    nats = {"type": "nats", "url": "nats://h", "stream": "rows", "subject": "x.{upstream_id}"}
    source = {"type": "postgres", "url": STORE}
    sinks = {"rows": {"type": "stream", "source": "shop"}}
    with pytest.raises(ValidationError, match=r"consumers.out.subject: \{upstream_id\} is of"):
        config(
            sources={"shop": source},
            sinks=sinks,
            nats_consumers={"out": NatsConsumer.model_validate(nats)},
        )


def test_the_embedded_store_is_not_asked_before_it_runs() -> None:
    found = records.inspect(config(store=None).sources["syncs"])
    assert found is not None
    assert (found.level, found.message) == ("ok", "the records are in the embedded store")
    away = config(store="postgresql://u@127.0.0.1:1/x").sources["syncs"]
    assert (found := records.inspect(away)) is not None
    assert found.level == "error"
