"""Where a rewind leads, as one types it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.console.consumers import _place


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("1/10:2", {"lsn": (1 << 32) + 16, "idx": 2}),
        ("0/16C5E80", {"lsn": 23879296, "idx": 0}),
        ("23876608:3", {"lsn": 23876608, "idx": 3}),
        ("-5:0", {"lsn": -5, "idx": 0}),
        ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00Z"),
        ("2026-01-31T12:00:00", None),
        ("yesterday", None),
        ("5", None),
        ("", None),
        ("0/xyz", None),
    ],
)
def test_a_place(at: str, expected: Any) -> None:
    assert _place("at", at) == expected
    assert _place("new", at) == "new"
