"""Every metric of `/metrics`: name, labels, meaning.

`make docs` makes the reference, the Grafana dashboard and the alert rules from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class Described:
    """A metric. As a text it is the name that samples have, for use in expressions."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    counts: bool = False
    """Whether it is a counter; it is a gauge otherwise."""

    def family(self) -> GaugeMetricFamily | CounterMetricFamily:
        """Return it without samples."""
        kind = CounterMetricFamily if self.counts else GaugeMetricFamily
        return kind(self.name, self.text, labels=self.labels)

    def __str__(self) -> str:
        return f"{self.name}_total" if self.counts else self.name


def _all(
    labels: str, gauges: Mapping[str, tuple[str, str]], counters: Mapping[str, tuple[str, str]]
) -> dict[str, Described]:
    """Return the metrics of one kind of thing by the attributes of its state."""
    names = tuple(labels.split())
    made = {key: Described(f"penstock_{n}", text, names) for key, (n, text) in gauges.items()}
    return made | {
        key: Described(f"penstock_{n}", text, names, counts=True)
        for key, (n, text) in counters.items()
    }


HEALTH: Final = Described(
    "penstock_health", "How a part is: 0 failed, 1 starting, 2 degraded, 3 ready", ("part",)
)
STORE_UP: Final = Described("penstock_store_up", "0 while the store does not answer")
SOURCES: Final = _all(
    "source",
    {
        "state": ("source_streaming", "1 while the slot's stream is being read"),
        "received_lsn": ("received_lsn", "LSN up to which the WAL was read"),
        "confirmed_lsn": ("confirmed_lsn", "LSN confirmed to the server"),
        "waiting": ("waiting_messages", "Messages captured and not yet delivered"),
        "waited": ("oldest_waiting_seconds", "How long the oldest of these has waited"),
        "unread_bytes": ("unread_bytes", "WAL bytes captured and not yet in a batch"),
    },
    {
        "captured": ("captured_messages", "Messages read from the slot"),
        "truncates_skipped": ("truncates_skipped", "Truncates that no sink lists"),
        "reconnects": ("reconnects", "Replication connections made again"),
        "restarts": ("restarts", "Queries started again after an error"),
    },
)
SINKS: Final = _all(
    "sink",
    {
        "error": ("sink_up", "0 while an error holds the sink up"),
        "delivered_at": ("last_delivery_seconds", "Unix time of the last delivery, 0 before it"),
    },
    {
        "delivered": ("delivered_messages", "Messages that the sink has, each once"),
        "duplicates": ("duplicate_messages", "Messages that the sink was sent again and had"),
        "bytes": ("delivered_bytes", "Bytes of the delivered bodies"),
        "dead_lettered": ("dead_letters", "Messages that can never be delivered"),
        "filtered": ("filtered_messages", "Messages left out by the sink's expressions"),
        "retries": ("sink_retries", "Waits after an error"),
    },
)
BACKLOGS: Final = _all(
    "sink",
    {
        "behind": ("sink_behind", "1 while the sink's messages go to its backlog"),
        "detached": ("sink_detached", "1 once that has lasted for detach_after"),
        "backlog": ("backlog_messages", "Messages that wait in the store"),
        "backlog_bytes": ("backlog_bytes", "Their bytes there"),
    },
    {},
)
CONSUMERS: Final = _all(
    "stream consumer",
    {
        "lag_messages": ("consumer_lag_messages", "Messages not acked yet"),
        "lag_seconds": ("consumer_lag_seconds", "Age of the oldest message not acked yet"),
        "in_flight": ("consumer_in_flight", "Messages handed out, not acked and not nacked"),
        "waiting_for_retry": ("consumer_waiting_for_retry", "Messages to be redelivered"),
        "dead_letters": ("consumer_dead_letters", "Dead letters that were not replayed"),
    },
    {
        "redeliveries": ("consumer_redeliveries", "Deliveries but each message's first"),
        "failures": ("consumer_failures", "Deliveries nacked or not acked in time"),
    },
)
CONSUMER_UP: Final = Described(
    "penstock_consumer_up",
    "0 while the consumer is disabled or its deliveries fail",
    ("stream", "consumer"),
)
BACKFILLS: Final = _all(
    "number sink table state",
    {
        "rows_done": ("backfill_rows_done", "Rows that an open or failed backfill has delivered"),
        "rows_total": ("backfill_rows_estimated", "About how many there will be"),
    },
    {},
)
_COLLECTION: Final = ("sync", "collection")
SYNC_RECORDS: Final = Described(
    "penstock_sync_records",
    "Records by what became of them",
    (*_COLLECTION, "what"),
    counts=True,
)
SYNCS: Final = _all(
    "sync collection",
    {
        "up": ("sync_up", "0 while the collection is not read"),
        "lag_seconds": ("sync_lag_seconds", "Seconds since the collection was last read"),
    },
    {"requests": ("sync_requests", "Requests made to the API")},
)
CREDENTIALS: Final = _all(
    "credential",
    {"used": ("credential_requests_used", "Requests made in the credential's interval")},
    {"refused": ("credential_refused", "Answers of 429")},
)
GROUPS: Final[Mapping[str, tuple[Described, ...]]] = {
    "Process": (HEALTH, STORE_UP),
    "Sources": tuple(SOURCES.values()),
    "Sinks": (*SINKS.values(), *BACKLOGS.values()),
    "Consumers": (CONSUMER_UP, *CONSUMERS.values()),
    "Backfills": tuple(BACKFILLS.values()),
    "Syncs": (*SYNCS.values(), SYNC_RECORDS, *CREDENTIALS.values()),
}
"""All of them, by what they are about."""
