"""Drops what is left of sources and sinks that the desired state has lost, once no run uses it.

The store keeps the list (`penstock.desired.removals`), so that a crash in the middle loses nothing: an
entry goes when all that it stands for is gone. Only who has a source's lease drops what is its.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import structlog

from penstock.config.settings import Config
from penstock.core.errors import PenstockError
from penstock.desired.removals import Removal, finish, pending
from penstock.runtime.source_runner import SourceRunner
from penstock.streams.claim import Claim
from penstock.streams.store import Store

_EVERY_SECONDS: Final = 1.0

log = structlog.get_logger("penstock")


class Remover:
    """Removes what is due; calls from several threads take turns. Its methods raise `StoreError`."""

    def __init__(self, store_url: str, base: Config) -> None:
        self._url = store_url
        self._base = base
        self._lock = threading.Lock()
        self._next = 0.0
        self._failed: dict[int, str] = {}

    def sweep(
        self, config: Config, runners: Sequence[SourceRunner], ending: Iterable[SourceRunner]
    ) -> None:
        """Remove what no run uses any more; `config` is what is wanted now."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_SECONDS
        by_name = {runner.name: runner for runner in runners}
        busy = {runner.name for runner in ending if runner.alive}
        with self._lock, Store(self._url) as store:
            for removal in pending(store):
                source = source_of(removal)
                runner = by_name.get(source)
                if source in busy:
                    continue
                if runner is None and source not in config.running_sources:
                    self._remove_alone(store, source, removal)
                elif runner is not None and removal.kind == "sink":
                    self._remove_beside(store, config, runner, removal)

    def before_run(self, source: str, config: Config) -> None:
        """Remove what concerns a source whose lease this process has, and which has no run now."""
        with self._lock, Store(self._url) as store:
            for removal in _of(pending(store), source, config):
                self._finish(store, removal, strictly=True)

    def is_left(self, source: str, config: Config) -> bool:
        """Return whether something is left of an earlier entity that `config` has again."""
        with Store(self._url) as store:
            return any(
                removal.kind == "source" or removal.name in config.sinks
                for removal in _of(pending(store), source, config)
            )

    def _remove_alone(self, store: Store, source: str, removal: Removal) -> None:
        """Remove what belongs to a source that nobody wants to run."""
        known = store.source(source)
        with contextlib.ExitStack() as stack:
            if known is not None:
                claim = stack.enter_context(contextlib.closing(Claim(self._url, known.id)))
                if not claim.acquire():
                    return  # who has it ends first, and then it is anybody's to do
            self._finish(store, removal)

    def _remove_beside(
        self, store: Store, config: Config, runner: SourceRunner, removal: Removal
    ) -> None:
        """Remove a sink of a source that runs here."""
        running = runner.running
        if running is None or not runner.holds_lease:
            return
        wanted = config.sinks.get(removal.name)
        if wanted is not None:
            if removal.name in running.sinks and running.sinks[removal.name] == wanted:
                runner.renew()  # it was removed and made again: it begins anew
        elif removal.name not in running.sinks:
            self._finish(store, removal)

    def _finish(self, store: Store, removal: Removal, *, strictly: bool = False) -> None:
        try:
            finish(store, removal, self._base)
        except PenstockError as error:
            if strictly:
                raise
            if self._failed.get(removal.id) == str(error):  # the second time it is no passing state
                log.warning("what is left of a removed entity can't be dropped; trying again",
                            kind=removal.kind, name=removal.name, error=str(error))  # fmt: skip
                self._failed[removal.id] = ""
            else:
                self._failed.setdefault(removal.id, str(error))
        else:
            self._failed.pop(removal.id, None)
            log.info("removed", kind=removal.kind, name=removal.name)


def source_of(removal: Removal) -> str:
    """Return the source that a removed entity is, or took from."""
    return removal.name if removal.kind == "source" else str(removal.spec.get("source", ""))


def _of(found: Iterable[Removal], source: str, config: Config) -> Iterator[Removal]:
    for removal in found:
        again = removal.kind == "sink" and removal.name in config.sinks
        if source_of(removal) == source or again:
            yield removal
