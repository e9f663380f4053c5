"""The dashboard's panels and the alert rules, as they are in docs/grafana."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1] / "docs"


def panels() -> list[dict[str, Any]]:
    """Return the panels that show something, without the rows between them."""
    dashboard = json.loads((DOCS / "grafana" / "penstock.json").read_text(encoding="utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    """Return the alert rules."""
    text = (DOCS / "grafana" / "alerts.yml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
