"""The configuration that a process follows: what the desired state comes to here, and its changes."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable, Mapping
from typing import Final, Self

import psycopg
import structlog
from psycopg import sql

from penstock.config.document import Key
from penstock.config.settings import Config
from penstock.core.connect import Connection, is_lost
from penstock.core.errors import StoreError
from penstock.desired.configured import usable_config
from penstock.desired.entities import Snapshot
from penstock.desired.state import CHANNEL, DesiredState, new_process
from penstock.streams.bastions import with_bastions
from penstock.streams.connect import connect
from penstock.streams.errors import store_error
from penstock.streams.store import Store

_RETRY_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 2.0
"""How often the state's version is read without a notice: a proxy may keep notices back."""

log = structlog.get_logger("penstock")


class Feed:
    """Follows the desired state of the store at `url`; a context manager, for one thread at a time.

    It has two connections of its own. `base` gives what is this process's: the store, Spark and the
    outboxes. An entity that can't be used here, such as one with a variable that this environment
    lacks, is left out and noted in `refusals`, in the log and in the store. There the note counts for as
    long as the feed is connected.
    """

    def __init__(self, url: str, base: Config, environ: Mapping[str, str] = os.environ) -> None:
        self._url = url
        self._base = base.stored_at(url)
        self._environ = environ
        self._store = Store(url)
        self._state = DesiredState(self._store, environ)
        self._listener: Connection | None = None
        self._look_at = 0.0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._process: int | None = None
        self._snapshot: Snapshot | None = None
        self._unusable: dict[Key, str] = {}
        self._refused: dict[Key, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._unlisten()
        self._store.close()
        ends = self._wake_read, self._wake_write
        # Another file may get the numbers: `wake` must not write to it.
        self._wake_read = self._wake_write = -1
        for end in ends:
            if end >= 0:
                os.close(end)

    def wake(self) -> None:
        """End the wait of `wait`; from any thread, also after `close`."""
        with contextlib.suppress(OSError):  # full, so it wakes
            os.write(self._wake_write, b"\0")

    @property
    def snapshot(self) -> Snapshot:
        """The state that `current` or `wait` gave last; raises `RuntimeError` before that."""
        if self._snapshot is None:
            raise RuntimeError("current() comes first")
        return self._snapshot

    @property
    def refusals(self) -> Mapping[Key, str]:
        """The entities of this state that this process can't run, and why."""
        return {**self._unusable, **self._refused}

    @property
    def unusable(self) -> Mapping[Key, str]:
        """Those of them that are in no configuration of this process: a variable is not set, for one."""
        return dict(self._unusable)

    def current(self) -> Config:
        """Return the configuration as it is now; raises `StoreError`."""
        before = self._snapshot
        try:
            # Not in `wait`: the notices that have come would be gone. Here the state is read anyway.
            if self._listener is not None and is_lost(self._listener):
                self._unlisten()
            self._listening()
        except psycopg.Error as error:
            raise store_error(error, self._url) from None
        try:
            return with_bastions(self._take(self._state.read()), self._store)
        except BaseException:
            self._snapshot = before  # so that the change is found again
            raise

    def wait(self, seconds: float) -> Config | None:
        """Return the next configuration when the state has changed, None where it has not in time.

        It also returns None once `wake` was called.
        Where the store does not answer, it waits and tries again: nothing is raised, and what has
        changed meanwhile is found when the store is back.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                listener = self._listening()
                if [*listener.notifies(timeout=0)]:
                    self._look_at = 0.0
                if time.monotonic() >= self._look_at:
                    if self._state.version() != self.snapshot.version:
                        return self.current()
                    self._look_at = time.monotonic() + _LOOK_SECONDS
                woken = self._await(listener, min(deadline, self._look_at))
            except (psycopg.Error, StoreError):
                self._unlisten()
                woken = self._await(None, min(deadline, time.monotonic() + _RETRY_SECONDS))
            if woken or time.monotonic() >= deadline:
                return None

    def _await(self, listener: Connection | None, until: float) -> bool:
        """Wait for a notice or for `wake`; return whether `wake` was called."""
        poll = select.poll()  # to wait, `notifies` wakes ten times a second
        poll.register(self._wake_read, select.POLLIN)
        if listener is not None:
            poll.register(listener, select.POLLIN)
        left = max(0.0, until - time.monotonic())
        woken = any(fd == self._wake_read for fd, _ in poll.poll(1000 * left))
        if woken:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        return woken

    def refused(self, kind: str, name: str, reason: str) -> None:
        """Note that this process can't run an entity as it is; the desired state stays unchanged."""
        if self._refused.get((kind, name)) != reason:
            self._refused[kind, name] = reason
            self._note(kind, name, reason)

    def accepted(self, kind: str, name: str) -> None:
        """Note that this process runs an entity after all."""
        self._refused.pop((kind, name), None)
        self._record([((kind, name), None)])

    def _take(self, snapshot: Snapshot) -> Config:
        config, unusable = usable_config(snapshot, self._environ, self._base)
        old = {} if self._snapshot is None else dict(self._snapshot.entities)
        # What a run refused stays refused until the entity changes.
        self._refused = {
            key: reason
            for key, reason in self._refused.items()
            if key in snapshot.entities and snapshot.entities[key] == old.get(key)
        }
        self._record([(key, None) for key in self._unusable if key not in unusable])
        before, self._unusable = self._unusable, unusable
        self._snapshot = snapshot
        for (kind, name), reason in unusable.items():
            if before.get((kind, name)) != reason or snapshot.entities[kind, name] != old.get(
                (kind, name)
            ):
                self._note(kind, name, reason)
        return config

    def _note(self, kind: str, name: str, reason: str) -> None:
        log.error("an entity can't be run as it is", kind=kind, name=name, error=reason)
        self._record([((kind, name), reason)])

    def _record(self, noted: Iterable[tuple[Key, str | None]]) -> None:
        if self._process is None:
            return  # once it is connected again, all is recorded anew
        try:
            for key, reason in noted:
                if reason is None:
                    self._state.accept(*key, self._process)
                else:
                    self._state.refuse(*key, reason, self._process)
        except StoreError as error:
            log.warning("what can't be run is not in the store", error=error.message)

    def _listening(self) -> Connection:
        if self._listener is None:
            self._listener = connect(self._url)
            self._listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(CHANNEL)))
            self._process = new_process(self._listener)
            self._state.forget_ended()
            self._record(self.refusals.items())
        return self._listener

    def _unlisten(self) -> None:
        self._process = None
        self._look_at = 0.0
        if self._listener is not None:
            self._listener.close()
            self._listener = None
