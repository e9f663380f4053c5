"""The progress of syncs in the store: what was saved is loaded, and what is asked comes to the loop."""

from __future__ import annotations

import threading
from uuid import UUID

import msgspec

from penstock.embedded.handles import Database
from penstock.streams.store import Store
from penstock.syncs.connectors.contract import Deletes, Kind
from penstock.syncs.controls import SyncCommand, SyncControls
from penstock.syncs.entry import Entry
from penstock.syncs.jobs import Facts
from penstock.syncs.progress import AskedSweep as Question
from penstock.syncs.progress import CollectionFailure, CollectionProgress, CollectionRun, RunSlice
from penstock.syncs.shown import shown
from penstock.syncs.states import States, load
from penstock.syncs.sync import SyncSettings

ID = UUID("902261b0-6b22-48a0-8d6b-2fdb16cf8402")
KEY = (str(ID), "crm:contacts")
SECONDS = 30.0


def progress() -> CollectionProgress:
    run = CollectionRun(
        Kind.BACKFILL, 1.5, slices=[RunSlice({"n": 1}, {"page": 2}, {"at": 3}, True), RunSlice({})]
    )
    return CollectionProgress(
        sync=KEY[0], collection=KEY[1], cursor={"at": 9}, backfill=run, due={Kind.POLL: 7.0},
        facts=Facts(Deletes.SWEEP, "All is swept.", has_cursor=True), asks=Question(10, 5, 3.0),
        failed={Kind.POLL: CollectionFailure("unavailable", "It is down.", "", 4.0, retry_at=8.0)},
    )  # fmt: skip


def test_what_is_saved_is_loaded_and_shown(database: Database) -> None:
    stored = threading.Event()
    with Store.open(database.url) as store:
        states = States(database.url, lambda keys: stored.set(), lambda *_: None)
        states.start()
        there = progress()
        sync = SyncSettings(KEY[0], "customers", "crm", "key", "1", (KEY[1],))
        for _ in range(2):  # the second one replaces the first
            of = shown(Entry(sync, there), 10.0)
            states.save({KEY: (msgspec.json.encode(there), of)})
            there.counts.read += 1
        assert stored.wait(SECONDS)
        assert states.close(SECONDS)
        there.counts.read -= 1
        assert load(store, [KEY[0]]) == {KEY: there}
        found = SyncControls(store).status([ID])[ID]
        assert found.health is not None
        assert found.health["code"] == "unavailable"
        backfill = found.collections[KEY[1]]["backfill"]
        assert (backfill["share"], backfill["estimated_end"]) == (0.5, "1970-01-01T00:00:18+00:00")


def test_what_is_asked_and_paused_comes_to_the_loop(database: Database) -> None:
    came: list[tuple[list[SyncCommand], set[str]]] = []
    both = threading.Event()

    def note(asked: list[SyncCommand], paused: set[str]) -> None:
        if asked or paused:
            came.append((asked, paused))
            both.set()

    with Store.open(database.url) as store:
        controls = SyncControls(store)
        controls.pause(ID, "test")
        controls.ask(ID, "crm:contacts", "backfill", "test")
        for _ in range(2):  # the first one is killed before it has stored what the command did
            both.clear()
            came.clear()
            states = States(database.url, lambda _: None, note)
            states.start()
            assert both.wait(SECONDS)
            ((asked,), paused) = came[0]
            assert (asked[:3], paused) == ((ID, "crm:contacts", "backfill"), {str(ID)})
            assert controls.asked() == [asked]
            states.close(SECONDS)
        states = States(database.url, lambda _: None, note)
        states.start()
        there = progress()
        of = shown(
            Entry(SyncSettings(KEY[0], "customers", "crm", "key", "1", (KEY[1],)), there), 10.0
        )
        states.save({KEY: (msgspec.json.encode(there), of)}, [asked.id])
        assert states.close(SECONDS)
        assert controls.asked() == []
        assert load(store, [KEY[0]]) == {KEY: there}
