"""What a run refuses and records, so that no gap in a source and no lost duplicate goes unseen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, Protocol

from penstock.config.settings import Config
from penstock.core.errors import CaptureError, Concern, Mistake, StoreError
from penstock.core.health import Failure
from penstock.runtime import recovery
from penstock.runtime.store_session import StoreSession
from penstock.sinks.nats.shared import shared_streams
from penstock.streams.positions import Positions, Recorder
from penstock.streams.store import Store

# A capture without its publication goes on reporting that.
FATAL_CODES: Final = recovery.GAP_CODES - {"publication_missing"} | {"unknown_column", "internal"}
"""Codes of a capture's errors that end a run."""
SHARED_STREAM: Final = "shared_stream"
"""The code of the failure that `shared_stream` gives."""


class Guard(Protocol):
    """What differs between runs that lose messages with their slot, and runs that don't."""

    def refuse_gap(self, source: str) -> None:
        """Raise `CaptureError` if a source must be recovered before its slot is made."""

    def refuse_noted_gap(self, source: str) -> None:
        """Raise the `CaptureError` of a gap that this run has met in a source."""

    def has_gap(self, source: str) -> bool:
        """Return whether this run has met a gap in a source."""

    def shared_stream(self) -> Failure | None:
        """Return a failure where messages would be each other's duplicates, of any two sinks."""

    def confirmed(self, source: str, lsn: int, time: int) -> None:
        """Note up to where a source's slot is confirmed; `time` counts as `Begin.timestamp`."""

    def query_failed(self, source: str, failure: Failure) -> bool:
        """Note the failure that ended a source's query; return whether it ends the run."""

    def close(self) -> None:
        """Write what is noted, and end."""


def shared_stream(config: Config) -> Failure | None:
    """Return a failure where messages would be each other's duplicates, of any two sinks."""
    for found, fix in _shared(config):
        return Failure(SHARED_STREAM, f"{found}; {fix}.", concerns=found.concerns)
    return None


def without_shared(config: Config) -> Config | None:
    """Return a configuration without the consumers whose messages would be another's duplicates.

    They lose nothing, as their streams keep it. None where there is none, or a sink's would.
    """
    shared = {found.concerns for found, _ in _shared(config)}
    if not shared or any(of.kind != "consumer" for of in shared):
        return None
    kept = {n: c for n, c in config.nats_consumers.items() if Concern("consumer", n) not in shared}
    return config.model_copy(update={"nats_consumers": kept})


def _shared(config: Config) -> Iterator[tuple[Mistake, str]]:
    """Yield the sinks and consumers whose messages would be another's duplicates, and what to do."""
    for source in config.sources:
        sinks, consumers = config.sinks_of(source), config.nats_consumers_of(source)
        several = len(sinks) + len(consumers) > 1
        for finding in shared_streams(source, sinks, consumers) if several else ():
            if finding.level == "error":
                assert finding.mistake is not None  # noqa: S101 - each of these findings has it
                yield finding.mistake, finding.fix


class SlotGuard:
    """The guard of a run whose messages are nowhere but in the WAL. A new slot would hide a gap."""

    def __init__(self, config: Config, store: StoreSession) -> None:
        self._config = config
        self._store = store
        self._gaps: dict[str, CaptureError] = {}
        self._recorder = Recorder(store.url)

    def refuse_gap(self, source: str) -> None:
        """Raise `CaptureError` if the server, the store or the checkpoint shows a gap."""
        with Store(self._store.url) as store:
            recovery.refuse_gap(self._config, source, store)

    def refuse_noted_gap(self, source: str) -> None:
        """Raise the `CaptureError` of a noted gap: what is missed does not come back."""
        if source in self._gaps:
            raise self._gaps[source]

    def has_gap(self, source: str) -> bool:
        """Return whether a gap is noted."""
        return source in self._gaps

    def shared_stream(self) -> Failure | None:
        """Ask the sinks' servers; a server that does not answer is asked when its sink attaches."""
        return shared_stream(self._config)

    def confirmed(self, source: str, lsn: int, time: int) -> None:
        """Record the position in the store, for a recovery."""
        self._recorder.note(source, self._store.source(source).tag, lsn, time)

    def query_failed(self, source: str, failure: Failure) -> bool:
        """Note a gap, for this run and for later ones."""
        if failure.code in recovery.GAP_CODES and source not in self._gaps:
            self._note_gap(source, failure)
        return failure.code in FATAL_CODES

    def _note_gap(self, source: str, failure: Failure) -> None:
        self._gaps[source] = CaptureError(
            failure.code, failure.cause, remedy=failure.remedy, is_gap=True
        )
        with contextlib.suppress(StoreError), Store(self._store.url) as store:
            Positions(store).note_gap(source, self._store.source(source).tag, failure.code)

    def close(self) -> None:
        """Record the newest positions, and end."""
        self._recorder.close()
