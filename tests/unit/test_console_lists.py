"""Lists of the console: whatever they are searched and sorted for, their pages have each row once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.console.lists import Column, Listing

COLUMNS = (
    Column("name", "Name"),
    Column("lag", "Lag", figure=True),
    Column("stream", "Stream", value=lambda row: row["stream"].removeprefix("a")),
)
SIZE = 3
rows_of = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.text("abAB1", min_size=1, max_size=3),
            "lag": st.none() | st.integers(0, 3),
            "stream": st.sampled_from(["a", "ab", "B", "b"]),
        }
    ),
    max_size=12,
    unique_by=lambda row: row["name"],
)


def listing(rows: list[dict[str, Any]], query: dict[str, str]) -> Listing:
    url = SimpleNamespace(path="/console/things")
    visit: Any = SimpleNamespace(request=SimpleNamespace(url=url), query=query)
    return Listing(visit, rows, COLUMNS, search=("name", "stream"), size=SIZE)


def expected(rows: list[dict[str, Any]], q: str, sort: str) -> list[dict[str, Any]]:
    """Return what is found in its order: by the value, then by the name; what has none is last."""
    found = [r for r in rows if q.lower() in r["name"].lower() or q.lower() in r["stream"].lower()]
    by, down = sort.removeprefix("-"), sort.startswith("-")

    def order(row: dict[str, Any]) -> Any:
        value = row[by].removeprefix("a") if by == "stream" else row[by]
        return (value.lower() if isinstance(value, str) else value, row["name"])

    known = sorted((row for row in found if row[by] is not None), key=order, reverse=down)
    return known + [row for row in found if row[by] is None]


@given(
    rows_of,
    st.sampled_from(["", "a", "B", "1", "none"]),
    st.sampled_from(["name", "-name", "lag", "-lag", "stream", "-stream"]),
)
def test_pages_have_each_row_once_in_order(rows: list[dict[str, Any]], q: str, sort: str) -> None:
    query = {"q": q, "sort": sort}
    seen: list[dict[str, Any]] = []
    page = listing(rows, query)
    while True:
        assert page.total == len(rows)
        assert page.first == len(seen) + 1
        assert len(page.rows) <= SIZE
        seen += page.rows
        assert page.last == len(seen)
        if not page.next:
            break
        query = dict(parse_qsl(urlsplit(page.next).query))
        page = listing(rows, query)
    assert seen == expected(rows, q, sort)
    assert page.found == len(seen)
