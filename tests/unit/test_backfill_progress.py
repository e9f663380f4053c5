"""How far a backfill is: chunks count in their order, and nothing behind one that is missing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backfill.events import Delayed, Delivered, Done, Event, Failed, Started
from penstock.backfill.progress import BackfillProgress


def delivered(chunk: int, rows: int = 10, attempt: int = 1) -> Delivered:
    return Delivered(3, attempt, chunk, rows, (str(chunk),))


def done(chunks: int, attempt: int = 1) -> Done:
    return Done(3, attempt, chunks)


def take(progress: BackfillProgress, *events: Event) -> None:
    """Take events as they come: through their JSON form."""
    for event in events:
        progress.take_event(Event.from_json(json.loads(json.dumps(event.to_json()))))


def test_chunks_count_as_they_are_delivered() -> None:
    progress = BackfillProgress(("before",), 5)
    take(progress, Started(3, 1), delivered(0, 7))
    assert (progress.cursor, progress.rows, progress.moved) == (("0",), 12, True)
    take(progress, delivered(1, 0))
    assert (progress.cursor, progress.rows, progress.finished) == (("1",), 12, False)
    take(progress, done(2))
    assert progress.finished


def test_a_table_without_rows() -> None:
    progress = BackfillProgress(None, 0)
    take(progress, done(0))
    assert progress.finished
    assert (progress.cursor, progress.rows) == (None, 0)


def test_a_reader_that_goes_back_by_itself() -> None:
    progress = BackfillProgress(None, 0)
    take(progress, delivered(0), Started(3, 4), delivered(0, 7, 4))
    assert (progress.cursor, progress.rows) == (("0",), 17)
    take(progress, delivered(1, 7, 4), done(2, 4))
    assert (progress.cursor, progress.rows, progress.finished) == (("1",), 24, True)


@pytest.mark.parametrize("after", [delivered(2), delivered(1, 10, 2), done(2), done(1, 2)])
def test_an_event_that_was_lost(after: Event) -> None:
    """Nothing counts behind it."""
    progress = BackfillProgress(None, 0)
    take(progress, delivered(0), after, delivered(1), done(2))
    assert (progress.cursor, progress.rows, progress.finished) == (("0",), 10, False)
    assert progress.failure is not None
    assert (progress.failure.code, progress.transient) == ("event_lost", True)


def test_a_failure_that_can_not_be_mended_goes_before_one_that_can() -> None:
    progress = BackfillProgress(None, 0)
    take(progress, delivered(1))
    assert progress.transient
    take(progress, Failed(3, 1, "no_table", "Gone.", "Make it."))
    assert progress.failure is not None
    assert (progress.failure.text, progress.transient) == ("Gone. Make it.", False)
    take(progress, delivered(2))
    assert progress.failure.code == "no_table"


def test_a_delay_comes_and_goes() -> None:
    progress = BackfillProgress(None, 0)
    take(progress, Delayed(3, 1, "x", "Busy."))
    assert progress.delayed == "Busy."
    take(progress, Delayed(3, 1, None, None))
    assert progress.delayed is None


@given(st.lists(st.integers(0, 100), max_size=8), st.sets(st.integers(0, 8), max_size=2))
def test_what_is_lost_never_counts(rows: list[int], lost: set[int]) -> None:
    events: list[Event] = [delivered(chunk, count) for chunk, count in enumerate(rows)]
    events.append(done(len(rows)))
    progress = BackfillProgress(None, 0)
    take(progress, *(event for number, event in enumerate(events) if number not in lost))
    whole = min([*lost, len(rows)])
    assert progress.cursor == (None if whole == 0 else (str(whole - 1),))
    assert progress.rows == sum(rows[:whole])
    assert progress.finished == (min([*lost, len(events)]) == len(events))
