"""Lists: search, sort and pages, all of it in the URL, so that a link shows the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final
from urllib.parse import urlencode

from penstock.api.console.page import Visit

SIZE: Final = 50
_first: Final = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its key in a row, its heading, and whether it is a figure, which stands on the right."""

    key: str
    title: str
    figure: bool = False
    sortable: bool = True
    value: Callable[[dict[str, Any]], Any] | None = None
    """What it is sorted by, where that is not the row's member `key`."""

    def of(self, row: dict[str, Any]) -> Any:
        """Return what a row is sorted by."""
        return row.get(self.key) if self.value is None else self.value(row)


class Listing:
    """A page of `rows` as the URL asks for it.

    `q` searches, `sort` sorts (`-name` downward), `cursor` is the key of the last row before.

    Args:
        visit: Whose URL it is.
        rows: All that there are.
        columns: In their order; the first one's values are the rows' keys unless `key` names them.
        search: The keys that `q` is looked for in.
        sort: How they are sorted where the URL does not say.
        size: How many stand on a page.
    """

    def __init__(
        self,
        visit: Visit,
        rows: Sequence[dict[str, Any]],
        columns: Sequence[Column],
        *,
        search: Sequence[str] = ("name",),
        sort: str = "",
        key: str = "",
        size: int = SIZE,
    ) -> None:
        self.columns = columns
        self.total = len(rows)
        """How many there are, whatever is searched for."""
        self._path = visit.request.url.path
        self._query = visit.query
        self.q = self._query.get("q", "").strip()
        key = key or columns[0].key
        self._sorting = self._query.get("sort") or sort or columns[0].key
        self._down = self._sorting.startswith("-")
        by = next((c for c in columns if c.key == self._sorting.lstrip("-")), columns[0])
        self._by = by.key
        found = self._matching(rows, search) if self.q else rows
        # By the key first: what sorts them then keeps that order among what is alike. Thousands that
        # come in the order of their keys, as they do, cost one pass so.
        keyed = sorted(found, key=lambda row: str(row[key]), reverse=self._down)
        known = [(_order(value), row) for row in keyed if (value := by.of(row)) is not None]
        known.sort(key=_first, reverse=self._down)
        found = [row for _, row in known] + [row for row in found if by.of(row) is None]
        self.found = len(found)
        """How many the search found."""
        cursor = self._query.get("cursor")
        places = (i + 1 for i, row in enumerate(found) if str(row[key]) == cursor)
        begin = next(places, 0)
        self.rows = found[begin : begin + size]
        self.first = begin + 1
        self.last = begin + len(self.rows)
        more = self.last < self.found
        self.next = self.url(cursor=str(self.rows[-1][key])) if more else ""
        """The URL of the next page, empty at the end."""
        self.start = self.url(cursor=None) if begin else ""
        """The URL of the first page, empty where this is it."""

    def url(self, **changes: str | None) -> str:
        """Return the list's URL with these members changed; None leaves one out."""
        query = {**self._query, **changes}
        query.pop("done", None)
        kept = urlencode({name: value for name, value in query.items() if value})
        return f"{self._path}?{kept}" if kept else self._path

    def sorted_by(self, column: Column) -> str:
        """Return the URL that sorts by a column, the other way round if it is sorted by it."""
        down = column.key == self._by and not self._down
        return self.url(sort=f"-{column.key}" if down else column.key, cursor=None)

    def direction(self, column: Column) -> str:
        """Return `ascending`, `descending` or `none`, as `aria-sort` has it."""
        if column.key != self._by:
            return "none"
        return "descending" if self._down else "ascending"

    def kept(self) -> dict[str, str]:
        """Return the members of the query that a search keeps."""
        return {k: v for k, v in self._query.items() if k not in ("q", "cursor", "done")}

    def _matching(
        self, rows: Sequence[dict[str, Any]], search: Sequence[str]
    ) -> list[dict[str, Any]]:
        wanted = self.q.casefold()
        return [
            row for row in rows
            if any(wanted in str(text).casefold() for key in search if (text := row.get(key)))
        ]  # fmt: skip


def _order(value: Any) -> tuple[int, Any]:
    """Return what sorts values of several types, text without regard to case."""
    if isinstance(value, bool | int | float):
        return (0, value)
    return (1, str(value).casefold())
