"""The Grafana dashboard of docs/grafana/penstock.json; `docs/monitoring.py` writes it.

An overview comes first; below it, every metric of the list has a panel, by what it is about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from penstock.runtime.metric_list import (
    BACKLOGS,
    CONSUMER_UP,
    CONSUMERS,
    GROUPS,
    HEALTH,
    SINKS,
    SOURCES,
    STORE_UP,
    SYNCS,
    MetricSpec,
)

Panel = dict[str, Any]
_JOB: Final = '{job=~"$job"}'
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_WORST: Final = (HEALTH, STORE_UP, SINKS["error"], CONSUMER_UP, SYNCS["up"])
"""Gauges that are worse where they are less: a standby's must not hide them."""
_OWN: Final[dict[MetricSpec, tuple[str, str, str] | None]] = {
    SOURCES["received_lsn"]: None,
    SOURCES["confirmed_lsn"]: (
        "WAL read and not confirmed",
        f"max by (source) ({SOURCES['received_lsn']}{_JOB} - {SOURCES['confirmed_lsn']}{_JOB})",
        "bytes",
    ),
    SINKS["delivered_at"]: (
        "Time since the last delivery",
        f"time() - max by (sink) ({SINKS['delivered_at']}{_JOB} > 0)",
        "s",
    ),
}
"""Title, expression and unit of metrics that say little as they are; None where another one shows it."""
_LEVELS: Final = {
    "0": "failed red",
    "1": "starting blue",
    "2": "degraded orange",
    "3": "ready green",
}


def dashboard() -> str:
    """Return the dashboard as JSON."""
    panels, top = [], 0
    rows: dict[str, Iterator[Panel]] = {"Overview": _overview()}
    rows |= {group: map(_panel, [group] * len(of), of) for group, of in GROUPS.items()}
    for title, made in rows.items():
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1}})  # fmt: skip
        left, top, tallest = 0, top + 1, 0
        for panel in made:
            if not panel:
                continue
            size = panel["gridPos"]
            if left + size["w"] > _COLUMNS:
                left, top, tallest = 0, top + tallest, 0
            panel["gridPos"] = {"x": left, "y": top, **size}
            left, tallest = left + size["w"], max(tallest, size["h"])
            panels.append(panel)
        top += tallest
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return json.dumps(_frame(panels), indent=1) + "\n"


def _frame(panels: list[Panel]) -> dict[str, Any]:
    jobs = f"label_values({HEALTH}, job)"
    return {
        "uid": "penstock", "title": "Penstock", "tags": ["penstock"], "schemaVersion": 39,
        "editable": True, "refresh": "10s", "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource",
                 "query": "prometheus"},
                {"name": "job", "label": "Job", "type": "query", "datasource": _SOURCE,
                 "query": {"query": jobs, "refId": "job"}, "definition": jobs, "refresh": 2,
                 "multi": True, "includeAll": True, "allValue": ".+", "current": {"text": "All",
                 "value": "$__all"}},
            ]
        },
        "panels": panels,
    }  # fmt: skip


def _overview() -> Iterator[Panel]:
    yield _of("state-timeline", "State of each part", f"min by (part) ({HEALTH}{_JOB})", "{{part}}",
              "short", (24, 8), _levels())  # fmt: skip
    behind = f"sum(max by (sink) ({BACKLOGS['backlog']}{_JOB}))"
    lag = f"max({CONSUMERS['lag_seconds']}{_JOB})"
    dead = f"sum(max by (stream, consumer) ({CONSUMERS['dead_letters']}{_JOB}))"
    for title, expr, unit in (
        ("Captured", f"sum(rate({SOURCES['captured']}{_JOB}[$__rate_interval]))", "cps"),
        ("Delivered", f"sum(rate({SINKS['delivered']}{_JOB}[$__rate_interval]))", "cps"),
        ("Oldest change that waits", f"max({SOURCES['waited']}{_JOB})", "s"),
        ("In backlogs", behind, "short"),
        ("Consumer farthest behind", lag, "s"),
        ("Dead letters of sinks, in this time",
         f"sum(increase({SINKS['dead_lettered']}{_JOB}[$__range]))", "short"),
        ("Dead letters of consumers", dead, "short"),
        ("WAL held", f"max({SOURCES['received_lsn']}{_JOB} - {SOURCES['confirmed_lsn']}{_JOB})",
         "bytes"),
    ):  # fmt: skip
        yield _of("stat", title, expr, "", unit, (3, 4))


def _panel(group: str, metric: MetricSpec) -> Panel:
    """Return the panel of a metric, or none where another one shows it."""
    if metric in _OWN:
        own = _OWN[metric]
        if own is None:
            return {}
        title, expr, unit = own
    else:
        title, unit = (
            _stem(metric).removeprefix("penstock_").replace("_", " ").capitalize(),
            _unit(metric),
        )
        value = f"{metric}{_JOB}"
        how = "min" if metric in _WORST else "max"
        if metric.counts:
            value, title = f"rate({value}[$__rate_interval])", f"{title} a second"
            # Several processes over one store report the same consumers.
            how = "max" if group == "Consumers" else "sum"
        by = f" by ({', '.join(metric.labels)})" if metric.labels else ""
        expr = f"{how}{by} ({value})"
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    return _of("timeseries", title, expr, legend, unit, (8, 7)) | {
        "description": f"{metric.text} (`{metric}`)"
    }


def _stem(metric: MetricSpec) -> str:
    return metric.name.removesuffix("_total")


def _unit(metric: MetricSpec) -> str:
    if _stem(metric).endswith("_bytes"):
        return "binBps" if metric.counts else "bytes"
    if _stem(metric).endswith("_seconds"):
        return "s"
    return "cps" if metric.counts else "short"


def _of(
    kind: str, title: str, expr: str, legend: str, unit: str, size: tuple[int, int],
    mappings: list[Any] | None = None,
) -> Panel:  # fmt: skip
    width, height = size
    return {
        "type": kind, "title": title, "datasource": _SOURCE,
        "gridPos": {"w": width, "h": height},
        "targets": [{"refId": "A", "datasource": _SOURCE, "expr": expr, "legendFormat": legend}],
        "fieldConfig": {
            "defaults": {"unit": unit, "mappings": mappings or [], "min": 0}, "overrides": []
        },
        "options": {},
    }  # fmt: skip


def _levels() -> list[Any]:
    options = {}
    for value, of in _LEVELS.items():
        text, color = of.split()
        options[value] = {"text": text, "color": color, "index": int(value)}
    return [{"type": "value", "options": options}]
