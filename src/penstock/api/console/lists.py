"""Lists: search, sort and pages, all of it in the URL, so that a link shows the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Self
from urllib.parse import urlencode

from penstock.api.console.page import Visit

SIZE: Final = 50
_LSN: Final = 2**64
"""More than any index within a transaction."""
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


class ListUrl:
    """The URL of a list: `q` searches it, `cursor` goes on in it."""

    def __init__(self, visit: Visit) -> None:
        self._path = visit.request.url.path
        self._query = visit.query
        self.q = self._query.get("q", "").strip()
        self.cursor = self._query.get("cursor") or None

    def url(self, **changes: str | None) -> str:
        """Return the list's URL with these members changed; None leaves one out."""
        query = {**self._query, **changes}
        query.pop("done", None)
        kept = urlencode({name: value for name, value in query.items() if value})
        return f"{self._path}?{kept}" if kept else self._path

    def kept(self) -> dict[str, str]:
        """Return the members of the query that a search keeps."""
        return {k: v for k, v in self._query.items() if k not in ("q", "cursor", "done")}


class _Table(ListUrl):
    """A list of columns, one of which sorts it: `sort` in the URL names it, `-name` sorts downward."""

    def __init__(self, visit: Visit, columns: Sequence[Column], sort: str) -> None:
        super().__init__(visit)
        self.columns = columns
        sorting = self._query.get("sort") or sort
        able = [column for column in columns if column.sortable]
        self.column = next((c for c in able if c.key == sorting.lstrip("-")), able[0])
        """What the rows are sorted by."""
        self.down = sorting.startswith("-")

    def sorted_by(self, column: Column) -> str:
        """Return the URL that sorts by a column, the other way round if it is sorted by it."""
        down = column is self.column and not self.down
        return self.url(sort=f"-{column.key}" if down else column.key, cursor=None)

    def direction(self, column: Column) -> str:
        """Return `ascending`, `descending` or `none`, as `aria-sort` has it."""
        if column is not self.column:
            return "none"
        return "descending" if self.down else "ascending"


class Listing(_Table):
    """A page of `rows` as the URL asks for it; the cursor is the key of the last row before.

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
        super().__init__(visit, columns, sort)
        self.total = len(rows)
        """How many there are, whatever is searched for."""
        self.empty = not rows
        key = key or columns[0].key
        by = self.column
        found = self._matching(rows, search) if self.q else rows
        # By the key first: what sorts them then keeps that order among what is alike. Thousands that
        # come in the order of their keys, as they do, cost one pass so.
        keyed = sorted(found, key=lambda row: str(row[key]), reverse=self.down)
        known = [(_order(value), row) for row in keyed if (value := by.of(row)) is not None]
        known.sort(key=_first, reverse=self.down)
        found = [row for _, row in known] + [row for row in found if by.of(row) is None]
        self.found = len(found)
        """How many the search found."""
        places = (i + 1 for i, row in enumerate(found) if str(row[key]) == self.cursor)
        begin = next(places, 0)
        self.rows = found[begin : begin + size]
        self.first = begin + 1
        self.last = begin + len(self.rows)
        more = self.last < self.found
        self.next = self.url(cursor=str(self.rows[-1][key])) if more else ""
        """The URL of the next page, empty at the end."""
        self.start = self.url(cursor=None) if begin else ""
        """The URL of the first page, empty where this is it."""

    def _matching(
        self, rows: Sequence[dict[str, Any]], search: Sequence[str]
    ) -> list[dict[str, Any]]:
        wanted = self.q.casefold()
        return [
            row for row in rows
            if any(wanted in str(text).casefold() for key in search if (text := row.get(key)))
        ]  # fmt: skip


class ApiListing(_Table):
    """A page of a list that the API searches, and sorts by time alone; the cursor is the API's."""

    found: Final = None
    """How many there are is not known."""

    def __init__(self, visit: Visit, columns: Sequence[Column], sort: str = "") -> None:
        super().__init__(visit, columns, sort)
        self.rows: list[dict[str, Any]] = []
        self.empty = True
        self.next = ""
        self.start = self.url(cursor=None) if self.cursor else ""

    async def read(self, visit: Visit, path: str, **query: Any) -> Self:
        """Take the rows of the page from the API's list at a path."""
        order = "newest" if self.down else "oldest"
        page = await visit.get(path, order=order, limit=SIZE, cursor=self.cursor, **query)
        self.rows = page["data"]
        self.empty = not self.rows and not self.q
        self.next = self.url(cursor=page["next"]) if page["next"] else ""
        return self


def position_order(position: Mapping[str, int] | None) -> int | None:
    """Return what sorts positions."""
    return None if position is None else position["lsn"] * _LSN + position["idx"]


def _order(value: Any) -> tuple[int, Any]:
    """Return what sorts values of several types, text without regard to case."""
    if isinstance(value, bool | int | float):
        return (0, value)
    return (1, str(value).casefold())
