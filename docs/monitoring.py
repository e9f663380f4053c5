"""Writes the reference of metrics, the dashboard and the alert rules from their list: `make docs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from alerts import ALERTS, rules
from dashboard import dashboard

from penstock.runtime.metric_list import GROUPS

DOCS: Final = Path(__file__).parent
_INTRO: Final = """\
# Metrics and alerts

`penstock run` and `penstock relay` serve metrics at `/metrics`, without a token. `penstock api` and
`penstock push` serve none: `penstock run` reports all consumers of its store, whichever processes serve
them.

This page is made from the list that `/metrics` is made from, by `make docs`. So are [a Grafana
dashboard](../grafana/penstock.json), which shows each metric, and [alert rules](../grafana/alerts.yml).
[The HTTP API](http-api.md#health) explains levels, counters and the states of consumers.

Counters count from the start of the process, and never fall within it. A consumer of type `nats` is
among the sinks, by its name. Several processes over one store each report all of its consumers: take the
greatest value, as the dashboard does, and no sum.
"""


def page() -> str:
    """Return the reference."""
    parts = [_INTRO]
    for group, metrics in GROUPS.items():
        parts.append(f"## {group}\n")
        rows = ["| metric | type | by | |", "|---|---|---|---|"]
        for metric in metrics:
            kind = "counter" if metric.counts else "gauge"
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            rows.append(f"| `{metric}` | {kind} | {labels} | {metric.text} |")
        parts.append("\n".join(rows) + "\n")
    parts.append("## Alerts\n")
    rows = ["| alert | severity | fires after | when |", "|---|---|---|---|"]
    for alert in ALERTS:
        expr = alert.expr.replace("|", "\\|")
        rows.append(f"| {alert.name} | {alert.severity} | {alert.lasts} | `{expr}` |")
    return "\n".join([*parts, "\n".join(rows) + "\n"])


def files() -> Mapping[Path, str]:
    """Return the text of each file that is made."""
    return {
        DOCS / "reference" / "metrics.md": page(),
        DOCS / "grafana" / "penstock.json": dashboard(),
        DOCS / "grafana" / "alerts.yml": rules(),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
