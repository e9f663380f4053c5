"""Reads one slice of a collection: records, and a cursor that never passes what has been read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final, Protocol

from penstock.config.providers import Incremental
from penstock.syncs.connectors.contract import (
    Json,
    Kind,
    Page,
    Record,
    Session,
    Slice,
    Unreadable,
)
from penstock.syncs.connectors.cursors import CursorFormat, Value
from penstock.syncs.connectors.lists import ListPage
from penstock.syncs.connectors.records import RecordReader
from penstock.syncs.errors import SyncError

CURSOR: Final = "value"
DELETES_CURSOR: Final = "deletes"
_SECOND: Final = timedelta(seconds=1)


class Lists(Protocol):
    """Lists objects page by page: `lists.ListReader`."""

    def pages(self, session: Session, since: str | None, resume: Json | None) -> Iterator[ListPage]:
        """Yield the pages from the cursor `since`, or from where `resume` says."""


class Reading:
    """Reads one slice.

    Args:
        lists: Where objects come from.
        reads: Makes records of them.
        incremental: The cursor.
        slice_: What is read; `since` in it is the cursor from which.
        session: Makes the requests.
    """

    def __init__(
        self,
        lists: Lists,
        reads: RecordReader,
        incremental: Incremental | None,
        slice_: Slice,
        session: Session,
    ) -> None:
        self._list: Final = lists
        self._reads: Final = reads
        self._incremental: Final = incremental
        self._format: Final = CursorFormat(incremental.format) if incremental else None
        self._kind: Final = slice_.kind
        self._since: Final[str | None] = slice_.of.get("since")
        self._resume: Final = slice_.resume
        self._session: Final = session
        self._member: Final = DELETES_CURSOR if self._kind is Kind.EVENTS else CURSOR
        resume = self._resume or {}
        self._newest: str | None = resume.get("newest")
        self._newest_value: Value | None = None
        self._until: datetime | None = (
            datetime.fromisoformat(resume["until"]) if "until" in resume else None
        )

    def pages(self) -> Iterator[Page]:
        """Yield the pages."""
        answers = self._list.pages(self._session, self._since, (self._resume or {}).get("list"))
        for answer in answers:
            if self._until is None:
                # An object that changes from now on may be missed by what follows, and is read again.
                self._until = self._session.now - _SECOND
            page, stops = self._page(answer)
            yield page
            if stops:
                return

    def _page(self, answer: ListPage) -> tuple[Page, bool]:
        records: list[Record] = []
        unreadable: list[Unreadable] = []
        values: list[Value] = []
        for each in answer.objects:
            found, value, text = self._reads.read(each)
            if isinstance(found, Unreadable):
                unreadable.append(found)
            elif found is not None:
                records.append(found)
            if value is not None and text is not None:
                values.append(value)
                self._note(value, text)
        self._refuse(answer, unreadable, values)
        stops = answer.resume is None or self._is_behind(values)
        resume: Json | None = None
        if not stops and answer.resume and self._until is not None:
            resume = {
                "list": answer.resume,
                "newest": self._newest,
                "until": self._until.isoformat(),
            }
        return (
            Page(records, unreadable, resume, self._cursor(stops), is_last=stops),
            stops,
        )

    def _note(self, value: Value, text: str) -> None:
        assert self._format is not None  # noqa: S101 - it has read the value
        if self._newest is not None and self._newest_value is None:
            self._newest_value = self._format.parse(self._newest)
        if self._newest_value is None or value > self._newest_value:  # type: ignore[operator]  # of one format
            self._newest, self._newest_value = text, value

    def _refuse(
        self, answer: ListPage, unreadable: Sequence[Unreadable], values: Sequence[Value]
    ) -> None:
        if not answer.objects:
            return
        if unreadable and (self._kind is Kind.SWEEP or len(unreadable) == len(answer.objects)):
            raise SyncError(
                "bad_response",
                f"{len(unreadable):,} of {len(answer.objects):,} objects of a page can't be read: "
                f"{unreadable[0].reason}.",
                remedy="Compare primary_key and cursor_path with what the API answers.",
            )
        if self._incremental is not None and not values and self._kind is not Kind.SWEEP:
            raise SyncError(
                "bad_response",
                f"None of the {len(answer.objects):,} objects of a page has the cursor "
                f"{self._incremental.cursor_path}: polls would miss changes.",
                remedy="Compare cursor_path with what the API answers.",
            )

    def _is_behind(self, values: Sequence[Value]) -> bool:
        """Whether all that follows is older than what the slice reads."""
        if self._incremental is None or self._incremental.order != "descending":
            return False
        if self._since is None or self._format is None or not values:
            return False
        return min(values) < self._format.parse(self._since)  # type: ignore[operator]  # of one format

    def _cursor(self, is_last: bool) -> Json | None:
        if self._kind is Kind.SWEEP or self._newest is None or self._until is None:
            return None
        if self._incremental is None or self._format is None:
            return None
        if self._incremental.order != "ascending" and not is_last:
            return None
        return {self._member: self._format.capped(self._newest, self._until)}


def since_of(incremental: Incremental | None, cursor: Json | None, member: str) -> str | None:
    """Return from where a slice reads: the cursor, and its overlap before it."""
    text = (cursor or {}).get(member)
    if incremental is None or text is None:
        return None
    return CursorFormat(incremental.format).back(str(text), incremental.overlap)
