"""How far a backfill is: chunks count in their order, when all of them is there, and no others."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backfill.events import Delayed, Delivered, Done, Event, Failed, RangeRead, Started
from penstock.backfill.progress import BackfillProgress
from penstock.core.health import Failure

Report = Event | RangeRead


def delivered(chunk: int, ranges: int, attempt: int = 1) -> Delivered:
    return Delivered(3, attempt, chunk, ranges, (str(chunk),))


def done(chunks: int, attempt: int = 1) -> Done:
    return Done(3, attempt, chunks)


def read(chunk: int, index: int, rows: int = 10, attempt: int = 1) -> RangeRead:
    return RangeRead(attempt, chunk, index, rows)


def failed(chunk: int, index: int, attempt: int = 1, *, transient: bool = True) -> RangeRead:
    failure = Failure("snapshot_lost", f"No rows of {chunk}.")
    return RangeRead(attempt, chunk, index, 3, failure, transient)


def started(attempt: int) -> Started:
    return Started(3, attempt)


def take(progress: BackfillProgress, *reports: Report) -> None:
    """Take reports as they come: through their JSON form."""
    for report in reports:
        sent = json.loads(json.dumps(report.to_json()))
        if isinstance(report, Event):
            progress.take_event(Event.from_json(sent), 0.0)
        else:
            progress.take_range(RangeRead.from_json(sent))


def test_a_chunk_counts_when_all_of_it_is_reported() -> None:
    progress = BackfillProgress(("before",), 5)
    for report in (read(0, 1), delivered(0, 2), delivered(1, 1), read(1, 0)):
        take(progress, report)
        assert (progress.cursor, progress.rows) == (("before",), 5)
    take(progress, read(0, 0, 7))
    assert (progress.cursor, progress.rows) == (("1",), 5 + 10 + 7 + 10)
    assert not progress.finished
    take(progress, done(2))
    assert progress.finished


def test_done_is_reported_before_the_last_range() -> None:
    progress = BackfillProgress(None, 0)
    take(progress, delivered(0, 1))
    take(progress, done(1))
    assert not progress.finished
    take(progress, read(0, 0))
    assert progress.finished


def test_a_table_without_rows() -> None:
    progress = BackfillProgress(None, 0)
    take(progress, done(0))
    assert progress.finished
    assert (progress.cursor, progress.rows) == (None, 0)


def test_nothing_counts_behind_a_range_that_failed() -> None:
    progress = BackfillProgress(None, 0)
    take(progress, read(0, 0), delivered(0, 1), failed(1, 0), read(1, 1), delivered(1, 2), read(2, 0),
         delivered(2, 1), done(3))  # fmt: skip
    assert (progress.cursor, progress.rows) == (("0",), 10)
    assert not progress.finished
    assert progress.failure is not None
    assert progress.transient
    take(progress, failed(2, 0, transient=False))
    assert not progress.transient, "what can't be mended is not tried again"


def test_a_task_that_is_run_again_counts_once() -> None:
    progress = BackfillProgress(None, 0)
    take(progress, read(0, 0), read(0, 0), delivered(0, 1), read(0, 0))
    assert progress.rows == 10


def test_a_range_that_no_task_reports() -> None:
    progress = BackfillProgress(None, 0)
    progress.take_event(delivered(0, 1), 100.0)
    progress.check(129.0, 30.0)
    assert progress.failure is None
    progress.check(131.0, 30.0)
    assert progress.failure is not None
    assert progress.transient


def test_a_reader_that_goes_back_by_itself() -> None:
    progress = BackfillProgress(None, 0)
    take(progress, read(0, 0), delivered(0, 1), read(1, 0), delivered(0, 1, 4))
    assert (progress.cursor, progress.rows) == (("0",), 10)
    take(progress, read(0, 0, 7, 4), read(1, 0, 7, 4), delivered(1, 1, 4), done(2, 4))
    assert (progress.cursor, progress.rows, progress.finished) == (("1",), 24, True)


def test_what_fails_of_an_attempt_that_was_given_up() -> None:
    """Its rows come again with the next attempt, unless they are held to be delivered."""
    progress = BackfillProgress(None, 0)
    take(
        progress,
        started(1),
        read(0, 0),
        delivered(0, 1),
        started(4),
        failed(1, 0),
        failed(2, 0, transient=False),
    )
    assert progress.failure is None
    take(progress, read(0, 0, 7, 4), delivered(0, 1, 4), failed(0, 0, 4), done(1, 4))
    assert (progress.cursor, progress.rows, progress.finished) == (("0",), 17, True)
    progress = BackfillProgress(None, 0)
    take(progress, started(1), delivered(0, 1), started(4), failed(0, 0))
    assert progress.failure is not None


@pytest.mark.parametrize("after", [delivered(2, 1), delivered(1, 1, 2), done(2), done(1, 2)])
def test_an_event_that_was_lost(after: Report) -> None:
    """Nothing counts behind it."""
    progress = BackfillProgress(None, 0)
    take(progress, read(0, 0), delivered(0, 1), read(2, 0), read(1, 0, 10, 2), after, done(3))
    assert (progress.cursor, progress.rows, progress.finished) == (("0",), 10, False)
    assert progress.failure is not None
    assert (progress.failure.code, progress.transient) == ("event_lost", True)


def test_a_delay_comes_and_goes() -> None:
    progress = BackfillProgress(None, 0)
    take(progress, Delayed(3, 1, "x", "Busy."))
    assert progress.delayed == "Busy."
    take(progress, Delayed(3, 1, None, None))
    assert progress.delayed is None
    take(progress, Failed(3, 1, "no_table", "Gone.", "Make it."))
    assert progress.failure is not None
    assert (progress.failure.text, progress.transient) == ("Gone. Make it.", False)


@given(st.data())
def test_in_any_order(data: st.DataObject) -> None:
    """Tasks and reader report over connections of their own; each alone keeps its order."""
    ranges = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    broken = data.draw(st.sets(st.sampled_from(range(len(ranges))), max_size=1))
    tasks = [
        failed(chunk, index) if chunk in broken and index == 0 else read(chunk, index, 10**chunk)
        for chunk, count in enumerate(ranges)
        for index in range(count)
    ]
    tasks = data.draw(st.permutations(tasks))
    reader: list[Event] = [delivered(chunk, count) for chunk, count in enumerate(ranges)]
    reader.append(done(len(ranges)))
    progress = BackfillProgress(None, 0)
    while tasks or reader:
        of_reader = reader and (not tasks or data.draw(st.booleans()))
        before = progress.rows
        take(progress, reader.pop(0) if of_reader else tasks.pop())
        assert progress.rows >= before
    fails = {chunk for chunk in broken if ranges[chunk]}
    whole = min(fails, default=len(ranges))
    assert progress.cursor == (None if whole == 0 else (str(whole - 1),))
    assert progress.rows == sum(ranges[chunk] * 10**chunk for chunk in range(whole))
    assert progress.finished == (not fails)
    assert (progress.failure is not None) == bool(fails)
