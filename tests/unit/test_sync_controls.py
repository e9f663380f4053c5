"""What is shown of a sync: of its collections as they are configured, whatever else is stored."""

from __future__ import annotations

from typing import Any

from penstock.config.syncs import collection_ids
from penstock.syncs.controls import SyncStatus

SPEC = {"provider": "stripe", "collections": ["customers", "stripe:invoices"], "credential": "live"}
DONE = {"phase": "polling", "initial_backfill_completed_at": "2026-01-31T12:00:00Z"}
LATER = {"phase": "polling", "initial_backfill_completed_at": "2026-01-31T13:00:00Z"}
HEALTH = {"code": "forbidden", "cause": "It may not.", "remedy": "Let it.", "since": "2026-01-31"}


def test_a_backfill_is_complete_when_that_of_each_collection_is() -> None:
    ids = collection_ids(SPEC)
    assert ids == ["stripe:customers", "stripe:invoices"]
    one = SyncStatus(False, {"stripe:customers": DONE}).of(ids)
    assert one.collections["stripe:invoices"]["phase"] == "waiting"
    assert one.initial_backfill_completed_at is None
    both = SyncStatus(False, {"stripe:customers": DONE, "stripe:invoices": LATER}).of(ids)
    assert both.initial_backfill_completed_at == "2026-01-31T13:00:00Z"
    assert SyncStatus().initial_backfill_completed_at is None


def test_a_collection_that_was_removed_counts_no_more() -> None:
    stored: dict[str, dict[str, Any]] = {
        "stripe:customers": DONE,
        "stripe:prices": {**DONE, "health": HEALTH},
    }
    assert SyncStatus(True, stored).health == HEALTH
    of = SyncStatus(True, stored).of(["stripe:customers"])
    assert (of.paused, of.health, list(of.collections)) == (True, None, ["stripe:customers"])
