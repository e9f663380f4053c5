"""A Python transform, as an operator would install one."""

from __future__ import annotations

from typing import Any


def upper(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with one text of its record changed."""
    record = message["record"]
    record["status"] = record["status"].upper()
    return message
