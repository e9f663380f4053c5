"""The alert rules of docs/grafana/alerts.yml; `docs/monitoring.py` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import yaml

from penstock.runtime.metric_list import (
    BACKLOGS,
    CONSUMER_UP,
    CONSUMERS,
    HEALTH,
    SINKS,
    SOURCES,
    SYNCS,
)

_HEADER: Final = """\
# Alert rules for Prometheus, made by `make docs`. The job that scrapes Penstock is named `penstock`;
# set the limits as your own promises need them.
"""
_GIB: Final = 2**30
_LAG: Final = f"max by (stream, consumer) ({CONSUMERS['lag_seconds']})"
_STREAMS: Final = f"group by (stream) ({CONSUMERS['lag_seconds']})"
_OWN: Final = f'label_replace({_STREAMS}, "consumer", "$1", "stream", "(.+)")'
"""The streams' own groups, which are named as their streams are."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert: it fires when `expr` has held for `lasts`. `what` and `remedy` are for who reads it."""

    name: str
    severity: str
    lasts: str
    expr: str
    what: str
    remedy: str

    def rule(self) -> dict[str, Any]:
        """Return it as Prometheus has it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.what, "description": self.remedy},
        }


_STATUS: Final = "`penstock status` has the cause and what to do."
ALERTS: Final = (
    Alert(
        "PenstockDown", "critical", "2m",
        'up{job="penstock"} == 0',
        "Penstock at {{ $labels.instance }} does not answer",
        "See the log of its service. While nothing reads a slot, its server keeps WAL.",
    ),
    Alert(
        "PenstockSourceFailed", "critical", "1m",
        f'min by (part) ({HEALTH}{{part=~"source .+"}}) == 0',
        "{{ $labels.part }} does not move",
        _STATUS,
    ),
    Alert(
        "PenstockFailed", "critical", "1m",
        f'min by (part) ({HEALTH}{{part!~"source .+"}}) == 0',
        "{{ $labels.part }} does not move",
        _STATUS,
    ),
    Alert(
        "PenstockDegraded", "warning", "15m",
        f"min by (part) ({HEALTH}) == 2",
        "{{ $labels.part }} moves, and something is wrong with it",
        _STATUS,
    ),
    Alert(
        "PenstockRestarts", "warning", "0m",
        f"sum by (source) (increase({SOURCES['restarts']}[1h])) > 3",
        "The query of source {{ $labels.source }} ends again and again",
        "The log has `query failed` with the reason of each.",
    ),
    Alert(
        "PenstockSlotUnread", "critical", "2m",
        f"max by (source) ({SOURCES['state']}) == 0",
        "No process reads the slot of source {{ $labels.source }}",
        "Its server keeps WAL until the slot is read, or loses it at max_slot_wal_keep_size. " + _STATUS,
    ),
    Alert(
        "PenstockSlotHoldsWal", "warning", "10m",
        f"max by (source) ({SOURCES['received_lsn']} - {SOURCES['confirmed_lsn']}) > {_GIB}",
        "The slot of source {{ $labels.source }} holds {{ $value | humanize1024 }}B of WAL",
        "It is read and not delivered: see what holds the source's sinks up. " + _STATUS,
    ),
    Alert(
        "PenstockSourceLags", "warning", "2m",
        f"max by (source) ({SOURCES['waited']}) > 60",
        "Changes of source {{ $labels.source }} wait for {{ $value | humanizeDuration }}",
        "A sink is slow, or the load is greater than this machine's pace. " + _STATUS,
    ),
    Alert(
        "PenstockSinkBehind", "warning", "10m",
        f"max by (sink) ({BACKLOGS['behind']}) == 1",
        "Messages of {{ $labels.sink }} wait in its backlog",
        "It fails, is slow, or is paused; in the store they are safe, and take its disk. " + _STATUS,
    ),
    Alert(
        "PenstockSinkDetached", "critical", "0m",
        f"max by (sink) ({BACKLOGS['detached']}) == 1",
        "{{ $labels.sink }} has taken no message for its detach_after",
        _STATUS,
    ),
    Alert(
        "PenstockConsumerFails", "warning", "5m",
        f"min by (stream, consumer) ({CONSUMER_UP}) == 0",
        "Consumer {{ $labels.consumer }} of {{ $labels.stream }} is paused or disabled, or its"
        " deliveries fail",
        _STATUS,
    ),
    Alert(
        "PenstockConsumerLags", "warning", "10m",
        f"({_LAG} unless on (stream, consumer) {_OWN}) > 600",
        "Consumer {{ $labels.consumer }} of {{ $labels.stream }} is"
        " {{ $value | humanizeDuration }} behind",
        "Its workers are gone, slow, or too few.",
    ),
    Alert(
        "PenstockStreamLags", "warning", "10m",
        f"({_LAG} and on (stream, consumer) {_OWN}) > 600",
        "The own group of stream {{ $labels.stream }} is {{ $value | humanizeDuration }} behind",
        "Its workers are gone, slow, or too few. Delete this rule if your workers use named consumers"
        " alone: every stream has a group of its own, which lags when no worker receives from it.",
    ),
    Alert(
        "PenstockDeadLetters", "warning", "0m",
        f"sum by (sink) (increase({SINKS['dead_lettered']}[15m])) > 0",
        "Messages of {{ $labels.sink }} can't be delivered",
        "`penstock dead-letters list` has the reasons, `penstock dead-letters replay` sends them again.",
    ),
    Alert(
        "PenstockConsumerDeadLetters", "warning", "0m",
        f"max by (stream, consumer) ({CONSUMERS['dead_letters']}) > 0",
        "Consumer {{ $labels.consumer }} of {{ $labels.stream }} has dead letters",
        "`penstock dead-letters list` has the reasons, `penstock dead-letters replay` sends them again.",
    ),
    Alert(
        "PenstockSyncFails", "warning", "10m",
        f"min by (sync, collection) ({SYNCS['up']}) == 0",
        "Sync {{ $labels.sync }} does not read {{ $labels.collection }}",
        "`penstock sync show {{ $labels.sync }}` has the cause and what to do.",
    ),
    Alert(
        "PenstockSyncLags", "warning", "5m",
        f"max by (sync, collection) ({SYNCS['lag_seconds']}) > 3600",
        "Sync {{ $labels.sync }} has not read {{ $labels.collection }} for"
        " {{ $value | humanizeDuration }}",
        "Its budget is used up, or it fails: `penstock sync show {{ $labels.sync }}`.",
    ),
)  # fmt: skip


def rules() -> str:
    """Return the file of rules."""
    groups = [{"name": "penstock", "rules": [alert.rule() for alert in ALERTS]}]
    return _HEADER + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1_000)
