"""A job writes a page while it reads the next one, and reports each before it ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

from penstock.core.errors import StoreError
from penstock.syncs.connectors.contract import Collection, Kind, Page, Record
from penstock.syncs.errors import SyncError
from penstock.syncs.job import Control, Tools, Yielded, run
from penstock.syncs.jobs import Ended, Job, PageDone, Report
from penstock.syncs.records.writer import RecordsWritten

ID: Final = "902261b0-6b22-48a0-8d6b-2fdb16cf8402"
SECONDS: Final = 30.0


class Api:
    """The tools of a job: three pages of a record each; calls `reads` and `writes` with its number."""

    requests = 0
    session = None

    def __init__(self, reads: Callable[[int], object], writes: Callable[[int], object]) -> None:
        self._reads, self._writes = reads, writes
        self.connector = self
        self.expected: list[bool] = []
        self.becomes: Callable[[int], RecordsWritten] = lambda _: RecordsWritten(inserted=1)

    def collections(self, _: object = None) -> dict[str, Collection]:
        return {"contacts": Collection("contacts")}

    def read(self, *_: object) -> Iterator[Page]:
        for number in range(3):
            self._reads(number)
            yield Page([Record(str(number), b"{}")], resume={"n": number}, is_last=number == 2)

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[Any, Any]]:
        yield self, None

    def write(
        self,
        _sync: object,
        _of: object,
        _in: object,
        records: Sequence[Record],
        *,
        expects_new: bool,
    ) -> RecordsWritten:
        (record,) = records
        self._writes(int(record.upstream_id))
        self.expected.append(expects_new)
        return self.becomes(int(record.upstream_id))


def reports_of(
    api: Api, control: Control | None = None, kind: Kind = Kind.BACKFILL
) -> tuple[list[int], Ended]:
    """Return the pages that a job has reported, by their resume tokens, and how it ended."""
    reports: list[Report] = []
    job = Job(1, ID, "crm:contacts", kind, slice={})
    run(job, cast("Tools", api), control or Control(), reports.append)
    *pages, end = reports
    assert isinstance(end, Ended)
    found = []
    for page in pages:
        assert isinstance(page, PageDone)
        assert page.resume is not None
        found.append(page.resume["n"])
    return found, end


def ignore(_: int) -> None:
    pass


def test_a_page_is_written_while_the_next_one_is_read_and_in_its_order() -> None:
    reading = [threading.Event() for _ in range(3)]
    written: list[int] = []

    def writes(number: int) -> None:
        if number < 2:  # the last one is read already
            assert reading[number + 1].wait(SECONDS), "the next page is not read meanwhile"
        written.append(number)

    pages, end = reports_of(Api(lambda number: reading[number].set(), writes))
    assert (pages, written, end.problem) == ([0, 1, 2], [0, 1, 2], None)


def test_what_is_written_is_reported_before_a_job_ends_that_is_to_stop() -> None:
    stopped = threading.Event()

    class Stopping(Control):
        def check(self) -> None:
            try:
                super().check()
            except Yielded:
                stopped.set()
                raise

    control = Stopping()

    def reads(number: int) -> None:
        if number == 1:
            control.stop()

    def writes(number: int) -> None:
        if number == 1:
            assert stopped.wait(SECONDS)

    pages, end = reports_of(Api(reads, writes), control)
    assert (pages, end.yielded) == ([0, 1], True)


def test_a_page_that_is_being_written_is_reported_though_the_next_one_can_not_be_read() -> None:
    failed = threading.Event()

    def reads(number: int) -> None:
        if number == 1:
            failed.set()
            raise SyncError("bad_response", "no JSON", transient=True)

    def writes(_: int) -> None:
        assert failed.wait(SECONDS)

    pages, end = reports_of(Api(reads, writes))
    assert pages == [0]
    assert end.problem is not None
    assert end.problem.code == "bad_response"


def test_nothing_is_written_behind_a_page_that_could_not_be() -> None:
    written: list[int] = []

    def writes(number: int) -> None:
        if number == 1:
            raise StoreError("gone", "the store is away")
        written.append(number)

    pages, end = reports_of(Api(ignore, writes))
    assert (pages, written) == ([0], [0])
    assert end.problem is not None
    assert (end.problem.code, end.problem.transient) == ("gone", True)


def test_a_backfill_expects_new_records_as_long_as_it_meets_no_others() -> None:
    api = Api(ignore, ignore)
    reports_of(api)
    assert api.expected == [False, True, True]

    api = Api(ignore, ignore)
    api.becomes = lambda n: RecordsWritten(inserted=1) if n != 1 else RecordsWritten(unchanged=1)
    reports_of(api)
    assert api.expected == [False, True, False]

    api = Api(ignore, ignore)
    api.becomes = lambda n: RecordsWritten(inserted=1) if n else RecordsWritten(updated=1)
    reports_of(api)
    assert api.expected == [False, False, False]

    api = Api(ignore, ignore)
    reports_of(api, kind=Kind.POLL)
    assert api.expected == [False, False, False]
