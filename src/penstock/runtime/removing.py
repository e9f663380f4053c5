"""Drops what is left of deleted sources, sinks and NATS consumers, once no run uses it.

The store keeps the list (`penstock.desired.removals`), so that a crash in the middle loses nothing: an
entry goes when all that it stands for is gone. Only who has a source's lease drops what is its. A
configuration that is older than a removal still uses what is to be removed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import structlog

from penstock.config.document import Key
from penstock.config.settings import Config
from penstock.core.backoff import Backoff
from penstock.core.errors import PenstockError, StoreError
from penstock.core.health import Failure, Level, Part
from penstock.desired.removals import (
    Removal,
    database_of,
    finish,
    pending,
    reads_of,
    slot_of,
)
from penstock.postgres.connect import drop_slot
from penstock.runtime.source_runner import SourceRunner
from penstock.streams.claim import Claim
from penstock.streams.nats_consumers import NatsConsumers
from penstock.streams.store import Store

_EVERY_SECONDS: Final = 1.0
_MOST_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 2.0

log = structlog.get_logger("penstock")


class Sources(NamedTuple):
    """What a process wants to run, its runners, and those whose sources it no longer wants."""

    config: Config
    runners: Sequence[SourceRunner]
    ending: Iterable[SourceRunner]


class Remover:
    """Removes what is due, in a thread of its own: a database that does not answer delays no other.

    `sources` returns what the process runs now; `base` has the folder of its checkpoints.
    """

    def __init__(self, store_url: str, base: Config, sources: Callable[[], Sources]) -> None:
        self._url = store_url
        self._base = base
        self._sources = sources
        self._failures: dict[int, _Failures] = {}
        self._done_at: int | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="removals", daemon=True)

    def start(self) -> None:
        """Begin to sweep."""
        self._thread.start()

    def stop(self) -> None:
        """Ask for the end, from any thread."""
        self._stopped.set()

    def join(self) -> None:
        """Wait a while for the end: a connection may wait for a server that does not answer."""
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.sweep()
            except StoreError:
                pass  # the store is away, which others report
            except Exception:
                log.exception("what is left of removed entities can't be dropped")
            self._stopped.wait(_EVERY_SECONDS)

    def sweep(self) -> None:
        """Remove what no run uses any more; raises `StoreError`."""
        config, runners, ending = self._sources()
        if config.version == self._done_at:
            return  # a removal comes with a change of the state
        by_name = {runner.name: runner for runner in runners}
        busy = {runner.name for runner in ending if runner.alive}
        with Store(self._url) as store:
            found = pending(store)
            for removal in found:
                source = source_of(removal)
                failures = self._failures.get(removal.id)
                if self._stopped.is_set():
                    return
                if source in busy or (failures is not None and not failures.is_due):
                    continue
                runner = by_name.get(source)
                if runner is None and source not in config.running_sources:
                    self._remove_alone(store, source, removal)
                elif runner is not None and removal.kind == "slot":
                    if _streams_anew(runner, config):
                        self._finish(store, removal)
                elif runner is not None and removal.kind != "source":
                    self._remove_beside(store, config, runner, removal)
        ids = {removal.id for removal in found}
        self._failures = {id_: of for id_, of in self._failures.items() if id_ in ids}
        if not found:
            self._done_at = config.version

    def parts(self) -> list[Part]:
        """Return the former slots of sources that can't be dropped: they hold WAL."""
        return [
            _slot_left(of.removal, of.error)
            for of in list(self._failures.values())
            if of.removal.kind == "slot" and of.error is not None
        ]

    def before_run(self, source: str, config: Config) -> StoreError | None:
        """Remove what a run of `config` must not find, of a source whose lease this process has.

        No run may use it any more. Returns why a run of `config` must wait: another source's lease is
        needed for what its sinks have left. Raises `StoreError` and `CaptureError`.
        """
        with Store(self._url) as store:
            own, others = _concerning(pending(store), source, config)
            for removal in own:
                finish(store, removal, self._base)
                log.info("removed", kind=removal.kind, name=removal.name)
        return _waits(others[0], source) if others else None

    def left(self, source: str, config: Config) -> frozenset[Key]:
        """Return what of `config` is to be removed before it is made anew; raises `StoreError`.

        That is the source, where it was removed and is there again, and such sinks and consumers of type
        nats; also consumers that are registered with another stream.
        """
        wanted = config.nats_consumers
        with Store(self._url) as store:
            own, others = _concerning(pending(store), source, config)
            streams = NatsConsumers(store).streams() if wanted else {}
        again = [r for r in own if r.kind == "source" or r.name in _alike(r, config)]
        moved = [n for n, of in wanted.items() if streams.get(n, of.stream) != of.stream]
        return frozenset(
            [
                *((r.kind, r.name) for r in (*again, *others)),
                *(("consumer", name) for name in moved),
            ]
        )

    def _remove_alone(self, store: Store, source: str, removal: Removal) -> None:
        """Remove what belongs to a source that no configuration has."""
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
        """Remove a sink, or a NATS consumer, of a source that runs here."""
        running = runner.running
        if running is None or not runner.holds_lease:
            return
        has = _alike(removal, running).get(removal.name)
        if has is None:
            self._finish(store, removal)
        elif (
            running.version < removal.version
            and has == _alike(removal, config).get(removal.name)
            and not runner.refuses
        ):
            runner.renew()  # it was removed and made again: the run lets it go first

    def _finish(self, store: Store, removal: Removal) -> None:
        try:
            finish(store, removal, self._base)
        except PenstockError as error:
            failures = self._failures.setdefault(removal.id, _Failures(removal))
            if failures.repeat(str(error)):  # the second time it is no passing state
                failures.error = error
                log.warning("what is left of a removed entity can't be dropped; trying again",
                            kind=removal.kind, name=removal.name, error=str(error))  # fmt: skip
        else:
            self._failures.pop(removal.id, None)
            log.info("removed", kind=removal.kind, name=removal.name)


class _Failures:
    """How often a removal has failed, and when it is tried again."""

    def __init__(self, removal: Removal) -> None:
        self.removal = removal
        self.error: PenstockError | None = None
        self._backoff = Backoff(_EVERY_SECONDS, _MOST_SECONDS, jitter=0.25)
        self._next = 0.0
        self._seen: dict[str, int] = {}

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def repeat(self, error: str) -> bool:
        """Count a failure; return whether it is the second of its kind."""
        self._next = time.monotonic() + self._backoff.after_failure()
        self._seen[error] = self._seen.get(error, 0) + 1
        return self._seen[error] == 2


def source_of(removal: Removal) -> str:
    """Return the source that a removed entity is, or took from."""
    own = removal.kind in ("source", "slot")
    return removal.name if own else str(removal.spec.get("source", ""))


def _streams_anew(runner: SourceRunner, config: Config) -> bool:
    """Return whether a source streams here from the slot that it is to read."""
    running = runner.running
    if running is None or not runner.holds_lease or not runner.ready:
        return False
    has, wanted = running.sources[runner.name], config.sources[runner.name]
    return reads_of(has) == reads_of(wanted)


def _slot_left(removal: Removal, error: PenstockError) -> Part:
    slot, where = slot_of(removal), database_of(removal) or "its former database"
    cause = f"Its former slot {slot} holds WAL of {where}, and can't be dropped: {error.message}"
    remedy = f"It is tried again. To drop it by hand, run there: {drop_slot(slot)}"
    failure = Failure("slot_left", cause, remedy)
    return Part.failing(f"source {removal.name}", Level.DEGRADED, failure)


def _concerning(
    found: Iterable[Removal], source: str, config: Config
) -> tuple[list[Removal], list[Removal]]:
    """Return what a run of `config` must not find: what is its source's, and what is another one's."""
    own, others = list[Removal](), list[Removal]()
    for removal in found:
        if removal.kind == "slot":
            continue  # it goes once the run streams from another
        if removal.version > config.version:
            continue  # a change that was refused, say: the run goes on with what was removed
        if source_of(removal) == source:
            own.append(removal)
        elif removal.kind != "source" and removal.name in _alike(removal, config):
            others.append(removal)
    return own, others


def _waits(removal: Removal, source: str) -> StoreError:
    former = source_of(removal)
    return StoreError(
        "not_removed",
        f"Source {source} waits: {removal.kind} {removal.name} took from source {former} before, and"
        " what is left of that is not dropped yet.",
        remedy=f"The process that runs source {former} drops it: see its log.",
        transient=True,
    )


def _alike(removal: Removal, config: Config) -> Mapping[str, object]:
    """Return the entities of a configuration that are of the same kind as what was removed."""
    return config.nats_consumers if removal.kind == "consumer" else config.sinks
