"""What a lane does with a job: it reads pages, writes them, and reports each once it is written.

A page is written while the next one is read.
A job that runs again is harmless: what is planned is a slice, never data, and writing a record twice
changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Final, Protocol
from uuid import UUID

import msgspec
from xxhash import xxh3_64_hexdigest

from penstock.core.delivery import DeadLetter
from penstock.core.errors import PenstockError
from penstock.syncs import deletes
from penstock.syncs.connectors.contract import (
    Collection,
    Connector,
    Json,
    Kind,
    Page,
    Record,
    Session,
    Slice,
    Unreadable,
)
from penstock.syncs.errors import SyncError
from penstock.syncs.jobs import (
    Ended,
    Facts,
    Job,
    JobFailure,
    PageDone,
    Planned,
    Report,
    Swept,
)
from penstock.syncs.records.rows import RefusedObject
from penstock.syncs.records.sweep import Sweeps
from penstock.syncs.records.writer import RecordWriter

SINK: Final = "records"
"""The name under which dead letters of records stand in the store."""
_DEFECT: Final = "The log of the worker has its trace; where the connector is your own, repair it."


class Yielded(Exception):  # noqa: N818 - a command, and no failure
    """The job is to end between two pages; it goes on elsewhere."""


class Control:
    """Ends one job from another thread; what waits in the job waits for `changed`.

    `begun`: whether the job has done what would be lost with it, since it began or since the last page
    behind which it can go on.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.begun = False
        self._yields = self._stops = False

    def stop(self, *, loses: bool = True) -> None:
        """Have the job end between two pages, or where it loses nothing."""
        with self.changed:
            self._yields = True
            self._stops = self._stops or loses
            self.changed.notify()

    @property
    def is_stopped(self) -> bool:
        """Whether the job is to end now."""
        return self._stops or (self._yields and not self.begun)

    def check(self) -> None:
        """Raise `Yielded` where the job is to end."""
        if self.is_stopped:
            raise Yielded

    def sleep(self, seconds: float) -> None:
        """Wait, or raise `Yielded` as soon as the job is to end."""
        with self.changed:
            if self.changed.wait_for(lambda: self.is_stopped, seconds):
                raise Yielded


class Tools(Protocol):
    """What a job works with."""

    @property
    def connector(self) -> Connector:
        """The connector."""

    @property
    def session(self) -> Session:
        """What makes its requests."""

    @property
    def requests(self) -> int:
        """How many it has made."""

    def writing(self) -> AbstractContextManager[tuple[RecordWriter, Sweeps]]:
        """Lend a connection to the records table."""

    def bury(self, letters: Sequence[DeadLetter]) -> int:
        """Store dead letters; return how many were not there yet."""


def run(job: Job, tools: Tools, control: Control, report: Callable[[Report], None]) -> None:
    """Do a job and report how it ended; `report` raises nothing."""
    before = tools.requests
    problem, yielded = None, False
    try:
        _Work(job, tools, control, report).run()
    except Yielded:
        yielded = True
    except SyncError as error:
        problem = JobFailure(
            error.code, error.message, error.remedy, error.transient, error.retry_after
        )
    except PenstockError as error:  # the store is away, for one
        problem = JobFailure(error.code, error.message, error.remedy, transient=True)
    except Exception as error:  # a connector is anybody's code
        problem = JobFailure(
            "connector",
            f"The connector fails for {job.collection}: {type(error).__name__}: {str(error)[:300]}.",
            _DEFECT,
        )
    report(Ended(job.number, yielded, problem, tools.requests - before))


def _beside(work: Callable[[], None]) -> Future[None]:
    """Do something in a thread that holds up no end of the process."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="sync page", daemon=True).start()
    return done


class _Work:
    def __init__(
        self, job: Job, tools: Tools, control: Control, report: Callable[[Report], None]
    ) -> None:
        self._job = job
        self._tools = tools
        self._control = control
        self._report = report
        self._sync = UUID(job.sync)
        self._provider, _, self._name = job.collection.partition(":")
        self._sweep = None if job.sweep is None else UUID(job.sweep)
        self._only_new: bool | None = None
        """Whether all records so far were new ones; None before the first."""

    def run(self) -> None:
        job = self._job
        if job.finish:
            self._finish()
        elif job.slice is not None:
            self._read(self._collection(), job.slice)
        else:
            self._plan()

    def _collection(self) -> Collection:
        connector, session = self._tools.connector, self._tools.session
        found = connector.collections().get(self._name)
        found = found or connector.collections(session).get(self._name)
        if found is None:
            raise SyncError(
                "not_found",
                f"{self._provider} has no collection {self._name}.",
                remedy="Correct the sync's collections.",
            )
        return found

    def _plan(self) -> None:
        job, tools = self._job, self._tools
        collection = self._collection()
        sweep = None
        if job.kind is Kind.SWEEP:
            with tools.writing() as (_, sweeps):
                if self._sweep is not None:
                    sweeps.drop(self._sweep)
                self._sweep = sweeps.begin(self._sync, job.collection)
            sweep = str(self._sweep)
        slices = tools.connector.plan(collection, job.cursor, job.kind, tools.session)
        facts = Facts(
            collection.deletes, collection.delete_notes, collection.cursor_field is not None
        )
        goes_on = bool(slices) and not job.only_plans
        self._report(Planned(job.number, [s.of for s in slices], facts, goes_on, sweep))
        if goes_on:
            self._read(collection, slices[0].of)

    def _read(self, collection: Collection, of: Json) -> None:
        connector, session = self._tools.connector, self._tools.session
        slice_ = Slice(self._job.kind, of, self._job.resume)
        control, resume = self._control, self._job.resume
        control.begun = False  # what is planned is not planned again
        control.check()
        writing: Future[None] | None = None
        try:
            for page in connector.read(collection, slice_, session):
                if writing is not None:
                    writing.result()
                    writing = None
                if page.is_last:
                    self._take(page)
                    continue
                writing = _beside(partial(self._take, page))
                control.begun = page.resume in (None, resume)
                resume = page.resume
                control.check()
        finally:
            if writing is not None:  # what ends the job comes behind the page's report
                writing.result()

    def _take(self, page: Page) -> None:
        """Write a page, and report it."""
        self._report(
            msgspec.structs.replace(
                self._write(page), resume=page.resume, cursor=page.cursor, is_last=page.is_last
            )
        )

    def _write(self, page: Page) -> PageDone:
        job, tools = self._job, self._tools
        if job.kind is Kind.SWEEP:
            if page.unreadable:
                # What has no id would count as deleted.
                raise SyncError(
                    "bad_response",
                    f"An object of {job.collection} can't be read: {page.unreadable[0].reason}. The"
                    " sweep deletes nothing.",
                )
            assert self._sweep is not None  # noqa: S101 - a slice comes from a plan
            ids = [record.upstream_id for record in page.records if not record.deleted]
            with tools.writing() as (_, sweeps):
                sweeps.add(self._sweep, self._sync, job.collection, ids)
            return PageDone(job.number, len(ids))
        records = [record for record in page.records if not self._is_too_old(record)]
        with tools.writing() as (writer, _):
            # A first copy most often. Where that is wrong once, Postgres logs the row that was there.
            expects_new = job.kind is Kind.BACKFILL and self._only_new is True
            written = writer.write(
                self._sync, self._provider, job.collection, records, expects_new=expects_new
            )
        if records:
            self._only_new = self._only_new is not False and written.only_inserted
        dead = [self._letter(each) for each in page.unreadable]
        dead += [self._letter(each) for each in written.refused]
        buried = tools.bury(dead) if dead else 0
        is_new = written.inserted or written.updated
        times = [r.updated_at for r in records if r.updated_at is not None] if is_new else []
        return PageDone(
            job.number,
            len(page.records) + len(page.unreadable),
            written.inserted, written.updated, written.deleted, buried,
            len(page.records) - len(records),
            max(times).timestamp() if times else None,
            0 if times else written.inserted + written.updated,
        )  # fmt: skip

    def _is_too_old(self, record: Record) -> bool:
        if self._job.max_age is None:
            return False
        at = record.updated_at or record.created_at
        return at is not None and at < self._tools.session.now - timedelta(
            seconds=self._job.max_age
        )

    def _letter(self, of: Unreadable | RefusedObject) -> DeadLetter:
        # What can't be read comes again with each overlap: it is one dead letter.
        of_text = xxh3_64_hexdigest(of.text.encode(errors="replace"))
        key = f"{self._job.sync}:{self._job.collection}:{of_text}"
        return DeadLetter(key, self._job.collection, "unreadable", of.reason, of.text)

    def _finish(self) -> None:
        job = self._job
        assert self._sweep is not None  # noqa: S101 - a sweep has one
        with self._tools.writing() as (_, sweeps):
            found = sweeps.complete(self._sweep, job.max_share)
            if found.is_held:
                known, missing = found.known, found.missing
                if deletes.asks(known, missing, job.max_share, job.confirmed):
                    sweeps.hold(self._sweep)
                else:
                    found = sweeps.complete(self._sweep, found.share)
        self._report(Swept(job.number, found.known, found.missing, found.deleted, found.waiting))
