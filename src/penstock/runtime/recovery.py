"""Recovers a source that has lost its slot, its publication or its server: `penstock recover`.

What was committed between the last confirmed position and the new slot is missed. This is never done in
silence: a run refuses a source with a gap, and `recover` prints how large it is.

It may be killed anywhere: before anything is changed the store has where the gap begins, and the run
refuses the source until all is done.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from penstock.backfill import tables
from penstock.backfill.request import OPEN, BackfillRequest, Backfills
from penstock.config.settings import Config
from penstock.core.errors import CaptureError, StoreError
from penstock.core.message import format_lsn, parse_lsn
from penstock.desired.actions import note_action
from penstock.postgres import setup
from penstock.postgres.admin import Catalog, open_catalog
from penstock.postgres.connect import publication_missing
from penstock.postgres.replication import identify
from penstock.streams.positions import Positions, SourcePosition, close_gap
from penstock.streams.store import Store

GAP_CODES: Final = frozenset(
    {
        "slot_missing",
        "slot_invalidated",
        "publication_missing",
        "other_server",
        "position_ahead_of_server",
        "position_behind_slot",
    }
)
"""Codes of a running capture's errors behind which changes may be missed."""
UNFINISHED: Final = "recovery_unfinished"
# The slot's own confirmed position proves nothing where another reader has confirmed it.
_NOT_BY_SLOT: Final = frozenset({"position_behind_slot", UNFINISHED})


@dataclass(frozen=True, slots=True)
class Gap:
    """What is missed: what was committed behind `lsn`, or since `committed_at`, up to the end.

    `lsn` is None where nothing is known, or where it is another server's.
    """

    cause: CaptureError
    tag: str
    lsn: int | None
    committed_at: datetime | None
    recorded_at: datetime | None
    end_lsn: int
    end: datetime


# -- what is wrong


def fault(config: Config, name: str) -> CaptureError | None:
    """Return why a source needs `penstock recover`, as its server and the local folder show it.

    None where it does not, or where its server can't be asked.
    """
    source = config.sources[name]
    try:
        with open_catalog(source) as catalog:
            found = _fault(catalog, name, config.checkpoint_folder(name).is_dir())
    except CaptureError:
        return None
    return None if found is None else found.recovered_by(config.recover_command(name))


def _fault(catalog: Catalog, name: str, has_run: bool) -> CaptureError | None:
    slot = catalog.slot()
    if slot is None:
        return setup.lost_slot(name, catalog.source.slot) if has_run else None
    found = setup.slot_fault(catalog, slot)
    if found is None and catalog.publication() is None:
        found = publication_missing(catalog.source.slot, catalog.source.publication)
    return found if found is not None and found.is_gap else None


def noted_gap(name: str, code: str) -> CaptureError:
    """Return the error of a source whose gap the store has noted."""
    if code == UNFINISHED:
        message = f"`penstock recover` of source {name} was begun and has not ended."
    else:
        message = f"Source {name} was stopped by {code}, and changes may be missed since then."
    return CaptureError(code, message, is_gap=True)


def refuse_gap(config: Config, name: str, store: Store) -> None:
    """Raise `CaptureError` where a source must be recovered before it can run."""
    position = Positions(store).get(name)
    has_run = position is not None or config.checkpoint_folder(name).is_dir()
    found: CaptureError | None = None
    if has_run:
        with open_catalog(config.sources[name]) as catalog:
            found = _fault(catalog, name, has_run)
    if found is None and position is not None and position.gap is not None:
        found = noted_gap(name, position.gap)
    if found is not None:
        raise found.recovered_by(config.recover_command(name) or f"penstock recover {name}")


# -- what is missed


class Recovery:
    """One source's recovery; a context manager that keeps every run from the source meanwhile.

    Raises `CaptureError` and `StoreError`. `gap` is None where nothing has to be recovered.
    """

    def __init__(self, config: Config, name: str, store: Store) -> None:
        self.name = name
        self.folder = config.checkpoint_folder(name)
        self._config = config
        self._source = config.sources[name]
        self._store = store
        self._positions = Positions(store)
        self._stack = contextlib.ExitStack()
        self.gap: Gap | None = None

    def __enter__(self) -> Recovery:
        with contextlib.ExitStack() as stack:
            with open_catalog(self._source) as catalog:
                _refuse(catalog)
            identity = identify(self._source.address, self._source.slot)
            known = self._store.make_source(self.name, identity.tag)
            if not stack.enter_context(self._store.claim_source(known.id)):
                raise StoreError(
                    "source_claimed",
                    f"A penstock run has source {self.name} now.",
                    remedy="Stop it first.",
                )
            position = self._positions.get(self.name)
            with open_catalog(self._source) as catalog:
                self.gap = self._find(catalog, identity.tag, position)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _find(self, catalog: Catalog, tag: str, position: SourcePosition | None) -> Gap | None:
        has_run = position is not None or self.folder.is_dir()
        noted = None if position is None else position.gap
        cause = _fault(catalog, self.name, has_run)
        if cause is None and noted is not None:
            cause = noted_gap(self.name, noted)
        if cause is None:
            return None
        lsn = None
        if position is not None and position.tag == tag and position.lsn:
            lsn = position.lsn
        slot = catalog.slot()
        if slot is not None and slot.confirmed_flush_lsn and noted not in _NOT_BY_SLOT:
            lsn = max(lsn or 0, parse_lsn(slot.confirmed_flush_lsn))
        end_lsn, end = catalog.position()
        return Gap(
            cause,
            tag if position is None or noted != UNFINISHED else position.tag,
            lsn,
            None if position is None else position.committed_at,
            position.at if position is not None and position.lsn else None,
            end_lsn,
            end,
        )

    def requests(self) -> tuple[dict[str, list[BackfillRequest]], list[str]]:
        """Return the backfills of each sink that bring what the tables hold now, and notes."""
        found: dict[str, list[BackfillRequest]] = {}
        notes: list[str] = []
        for name, sink in self._config.sinks_of(self.name).items():
            try:
                reads, warnings, _ = tables.select(tables.Selection(self._source, name, sink))
            except CaptureError as error:
                notes.append(f"sink {name}: {error}")
                continue
            notes += [f"sink {name}: {warning}" for warning in warnings]
            found[name] = [
                BackfillRequest(
                    self.name, name, read.schema, read.table, sort_by=read.sort_by,
                    rows_total=read.rows,
                )
                for read in reads
            ]  # fmt: skip
        return found, notes

    # -- what is done

    def run(self, requests: Mapping[str, list[BackfillRequest]]) -> tuple[str, list[int]]:
        """Recover, and ask for the backfills; return where the new slot begins, and their numbers.

        The store has the end of the gap, the backfills and a line of its audit log at once.
        """
        gap = self.gap
        assert gap is not None  # noqa: S101 - for the caller to see to
        self._positions.open_gap(self.name, gap.tag, gap.lsn or 0, gap.committed_at, UNFINISHED)
        begins = setup.renew(self._source)
        self._clear_checkpoints()
        backfills = Backfills(self._store)
        with self._store.connection() as connection, connection.transaction():
            asked = [request for of_sink in requests.values() for request in of_sink]
            for request in asked:
                self._cancel_open(backfills, request)
            numbers = backfills.create(asked) if asked else []
            close_gap(connection, self.name)
            details = {"slot": self._source.slot, "begins": begins, "backfills": numbers or None}
            note_action(self._store, "source", self.name, "recover", details)
        return begins, numbers

    def _cancel_open(self, backfills: Backfills, request: BackfillRequest) -> None:
        """Cancel a backfill that is under way: what it has read lies before the gap."""
        for found in backfills.find(source=self.name, sink=request.sink, states=OPEN):
            if (found.table_schema, found.table_name) == (request.schema, request.table):
                backfills.command(found.id, "cancel")

    def _clear_checkpoints(self) -> None:
        """Remove what runs have made in the checkpoint folder, and the folder if that was all."""
        if not self.folder.is_dir():
            return
        for old in self.folder.iterdir():
            if old.name.isdigit() and (old / "metadata").is_file():
                shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _refuse(catalog: Catalog) -> None:
    """Raise what must be mended before: the server, or a slot that another one reads or owns."""
    if found := setup.server_fault(catalog):
        raise found
    slot = catalog.slot()
    if slot is not None and (found := setup.slot_fault(catalog, slot)) and not found.is_gap:
        raise found


# -- in words


def describe(name: str, gap: Gap) -> Iterator[str]:
    """Yield what is wrong, and what is missed, by position and by time."""
    yield gap.cause.message
    end = f"{format_lsn(gap.end_lsn)} ({_time(gap.end)})"
    start = "an unknown position" if gap.lsn is None else format_lsn(gap.lsn)
    if gap.committed_at is not None:
        start += f" (the last change before it was committed at {_time(gap.committed_at)})"
    elif gap.recorded_at is not None:
        start += f" (recorded at {_time(gap.recorded_at)}, before any change was delivered)"
    else:
        start += " (its time is not known)"
    yield f"Missed by all sinks of source {name}: what was committed after {start}"
    yield f"and before the new slot, which is made now, at {end}"
    yield _length(gap)


def _length(gap: Gap) -> str:
    parts = []
    since = gap.committed_at or gap.recorded_at
    if since is not None:
        seconds = max(0, int((gap.end - since).total_seconds()))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        parts.append(f"{hours}:{minutes:02}:{seconds % 60:02} h")
    if gap.lsn is not None and gap.lsn <= gap.end_lsn:
        parts.append(f"{gap.end_lsn - gap.lsn:,} bytes of WAL")
    return f"({' and '.join(parts)})." if parts else "(how much that is, is not known)."


def _time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
