"""What is shown of syncs: their health, and nothing of a collection that was removed."""

from __future__ import annotations

from penstock.core.health import Level
from penstock.runtime.sync_state import SyncState
from penstock.syncs.connectors.contract import Kind
from penstock.syncs.entry import Entry
from penstock.syncs.progress import CollectionFailure, CollectionProgress
from penstock.syncs.shown import Shown, shown
from penstock.syncs.sync import SyncSettings

SYNC = SyncSettings("1", "customers", "crm", "key", "1", ("crm:a", "crm:b"))


def of(collection: str, *, fails: bool = False) -> Shown:
    progress = CollectionProgress(sync="1", collection=collection, backfilled_at=5.0, polled_at=6.0)
    if fails:
        progress.failed[Kind.POLL] = CollectionFailure(
            "unauthorized", "It is refused.", "Rotate it.", 7.0, credential="1"
        )
    return shown(Entry(SYNC, progress), 10.0)


def test_a_collection_that_fails_degrades_its_sync_alone() -> None:
    state = SyncState()
    state.set_syncs({"1": ("customers", ["crm:a", "crm:b"]), "2": ("others", [])})
    state.update([("1", "crm:a", of("crm:a")), ("1", "crm:b", of("crm:b", fails=True))])
    first, second = state.parts()
    assert (first.subject, first.level, second.level) == (
        "sync customers",
        Level.DEGRADED,
        Level.READY,
    )
    assert (first.problems[0].cause, first.problems[0].remedy) == ("It is refused.", "Rotate it.")
    up = next(metric for metric in state.collect() if metric.name == "penstock_sync_up")
    assert [sample.value for sample in up.samples] == [1.0, 0.0]


def test_a_collection_that_was_removed_is_not_shown() -> None:
    state = SyncState()
    state.set_syncs({"1": ("customers", ["crm:a", "crm:b"])})
    state.update([("1", "crm:a", of("crm:a")), ("1", "crm:b", of("crm:b", fails=True))])
    state.set_syncs({"1": ("customers", ["crm:a"])})
    assert list(state.as_json()["syncs"]["customers"]["collections"]) == ["crm:a"]
    assert state.parts()[0].level is Level.READY
