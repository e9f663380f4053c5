"""The progress of syncs in the store, written in a thread: a store that is away stops no lane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Final
from uuid import UUID

import msgspec
import structlog
from psycopg.types.json import Jsonb

from penstock.core import queries
from penstock.core.backoff import Backoff
from penstock.core.errors import StoreError
from penstock.streams.store import Store
from penstock.syncs.controls import SyncCommand, SyncControls, done
from penstock.syncs.progress import CollectionProgress
from penstock.syncs.shown import Shown
from penstock.syncs.sync import Key

_SQL: Final = queries.load("penstock.syncs", "states.sql")
_LOOK_SECONDS: Final = 0.5

log = structlog.get_logger("penstock.syncs")


def load(store: Store, syncs: Iterable[str]) -> dict[Key, CollectionProgress]:
    """Return what is stored of syncs; raises `StoreError`."""
    with store.connection() as connection:
        rows = connection.execute(_SQL["load"], [[UUID(sync) for sync in syncs]]).fetchall()
    return {
        (str(sync), collection): msgspec.convert(progress, CollectionProgress)
        for sync, collection, progress in rows
    }


class States:
    """Writes progress, and reads what is asked of syncs and which are paused.

    Args:
        url: The store's URL.
        on_stored: Called from the thread with the collections whose progress is stored.
        on_asked: Called from the thread with what is newly asked, and the ids of the paused syncs.
    """

    def __init__(
        self,
        url: str,
        on_stored: Callable[[list[Key]], object],
        on_asked: Callable[[list[SyncCommand], set[str]], object],
    ) -> None:
        self.store = Store(url)
        self._controls = SyncControls(self.store)
        self._on_stored = on_stored
        self._on_asked = on_asked
        self._lock = threading.Lock()
        self._waiting: dict[Key, tuple[bytes, Shown]] = {}
        self._obeyed: set[int] = set()
        self._handed: set[int] = set()  # commands that the loop has, still in the store
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sync states", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def save(
        self, progresses: Mapping[Key, tuple[bytes, Shown]], obeyed: Iterable[int] = ()
    ) -> None:
        """Have the progress of collections, as JSON, be written, and with it these commands removed."""
        with self._lock:
            self._waiting.update(progresses)
            self._obeyed.update(obeyed)
        self._wake.set()

    def close(self, seconds: float) -> bool:
        """Write what waits, for so long at most; return whether all is written."""
        self._closed = True
        self._wake.set()
        self._thread.join(seconds)
        self.store.close()
        return not (self._waiting or self._obeyed)

    def _run(self) -> None:
        backoff = Backoff(0.2, 5.0)
        failed = False
        while True:
            is_last = self._closed
            with self._lock:
                taken, self._waiting = self._waiting, {}
                obeyed, self._obeyed = self._obeyed, set()
            try:
                self._write(taken, obeyed)
                taken, obeyed = {}, set()
                if not is_last:
                    self._ask()
                failed = False
            except StoreError as error:
                with self._lock:
                    self._waiting = {**taken, **self._waiting}
                    self._obeyed |= obeyed
                if not failed:
                    log.warning("the progress of syncs can't be stored; trying again",
                                code=error.code, error=str(error))  # fmt: skip
                failed = True
            if is_last and not (failed and (self._waiting or self._obeyed)):
                return
            if failed:
                threading.Event().wait(backoff.after_failure())
            elif not self._closed:
                self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()

    def _ask(self) -> None:
        asked = self._controls.asked()
        new = [command for command in asked if command.id not in self._handed]
        self._handed = {command.id for command in asked}
        self._on_asked(new, {str(sync) for sync in self._controls.paused()})

    def _write(self, taken: Mapping[Key, tuple[bytes, Shown]], obeyed: Set[int]) -> None:
        if not (taken or obeyed):
            return
        rows = [
            {
                "sync_id": sync, "collection_id": collection,
                "progress": msgspec.json.decode(progress), "shown": of,
            }
            for (sync, collection), (progress, of) in taken.items()
        ]  # fmt: skip
        with self.store.connection() as connection, connection.transaction():
            if rows:
                connection.execute(_SQL["save"], [Jsonb(rows)])
            if obeyed:
                done(connection, obeyed)
        self._on_stored(list(taken))
