"""Every metric of `/metrics`: name, labels, meaning.

`make docs` makes the reference, the Grafana dashboard and the alert rules from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric, by the name that its samples have; as a text it is that name, for expressions."""

    name: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it is a counter; it is a gauge otherwise."""
        return self.name.endswith("_total")

    def family(self) -> GaugeMetricFamily | CounterMetricFamily:
        """Return it without samples."""
        kind = CounterMetricFamily if self.counts else GaugeMetricFamily
        return kind(self.name, self.text, labels=self.labels)

    def __str__(self) -> str:
        return self.name


def _listed(labels: str, table: str) -> dict[str, MetricSpec]:
    """Return the metrics of a table by the first word of each line, the attribute that has the value.

    The metric's name and its meaning follow.
    """
    rows = (line.split(maxsplit=2) for line in table.strip().splitlines())
    names = tuple(labels.split())
    return {key: MetricSpec(f"penstock_{name}", text, names) for key, name, text in rows}


HEALTH: Final = MetricSpec(
    "penstock_health", "How a part is: 0 failed, 1 starting, 2 degraded, 3 ready", ("part",)
)
STORE_UP: Final = MetricSpec("penstock_store_up", "0 while the store does not answer")
SOURCES: Final = _listed(
    "source",
    """
    state              source_streaming         1 while the slot's stream is being read
    received_lsn       received_lsn             LSN up to which the WAL was read
    confirmed_lsn      confirmed_lsn            LSN confirmed to the server
    waiting            waiting_messages         Messages captured and not yet delivered
    waited             oldest_waiting_seconds   How long the oldest of these has waited
    unread_bytes       unread_bytes             WAL bytes captured and not yet in a batch
    captured           captured_messages_total  Messages read from the slot
    truncates_skipped  truncates_skipped_total  Truncates that no sink lists
    reconnects         reconnects_total         Replication connections made again
    restarts           restarts_total           Queries started again after an error
    """,
)
SINKS: Final = _listed(
    "sink",
    """
    error          sink_up                   0 while an error holds the sink up
    delivered_at   last_delivery_seconds     Unix time of the last delivery, 0 before it
    delivered      delivered_messages_total  Messages that the sink has, each once
    duplicates     duplicate_messages_total  Messages that the sink was sent again and had
    bytes          delivered_bytes_total     Bytes of the delivered bodies
    dead_lettered  dead_letters_total        Messages that can never be delivered
    filtered       filtered_messages_total   Messages left out by the sink's expressions
    retries        sink_retries_total        Waits after an error
    """,
)
BACKLOGS: Final = _listed(
    "sink",
    """
    behind         sink_behind       1 while the sink's messages go to its backlog
    detached       sink_detached     1 once that has lasted for detach_after
    backlog        backlog_messages  Messages that wait in the store
    backlog_bytes  backlog_bytes     Their bytes there
    """,
)
CONSUMERS: Final = _listed(
    "stream consumer",
    """
    lag_messages       consumer_lag_messages        Messages not acked yet
    lag_seconds        consumer_lag_seconds         Age of the oldest message not acked yet
    in_flight          consumer_in_flight           Messages handed out, not acked and not nacked
    waiting_for_retry  consumer_waiting_for_retry   Messages to be redelivered
    dead_letters       consumer_dead_letters        Dead letters that were not replayed
    redeliveries       consumer_redeliveries_total  Deliveries but each message's first
    failures           consumer_failures_total      Deliveries nacked or not acked in time
    """,
)
CONSUMER_UP: Final = MetricSpec(
    "penstock_consumer_up",
    "0 while the consumer is paused or disabled, or its deliveries fail",
    ("stream", "consumer"),
)
BACKFILLS: Final = _listed(
    "number sink table state",
    """
    rows_done   backfill_rows_done       Rows that an open or failed backfill has delivered
    rows_total  backfill_rows_estimated  About how many there will be
    """,
)
SYNC_RECORDS: Final = MetricSpec(
    "penstock_sync_records_total",
    "Records by what became of them",
    ("sync", "collection", "what"),
)
SYNCS: Final = _listed(
    "sync collection",
    """
    up           sync_up              0 while the collection is not read
    lag_seconds  sync_lag_seconds     Seconds since the collection was last read
    requests     sync_requests_total  Requests made to the API
    """,
)
CREDENTIALS: Final = _listed(
    "credential",
    """
    used     credential_requests_used  Requests made in the credential's interval
    refused  credential_refused_total  Answers of 429
    """,
)
GROUPS: Final[Mapping[str, tuple[MetricSpec, ...]]] = {
    "Process": (HEALTH, STORE_UP),
    "Sources": tuple(SOURCES.values()),
    "Sinks": (*SINKS.values(), *BACKLOGS.values()),
    "Consumers": (CONSUMER_UP, *CONSUMERS.values()),
    "Backfills": tuple(BACKFILLS.values()),
    "Syncs": (*SYNCS.values(), SYNC_RECORDS, *CREDENTIALS.values()),
}
"""All of them, by what they are about."""
