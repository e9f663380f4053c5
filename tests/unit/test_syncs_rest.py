"""The rest connector: paging, cursors, deletes and what can't be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.loopback_api import Answer, Asked, LoopbackApi

from penstock.config.providers import RestProvider
from penstock.syncs.connectors.contract import Json, Kind, Page, Slice
from penstock.syncs.connectors.make import connector_of, session_of
from penstock.syncs.connectors.rest import RestConnector
from penstock.syncs.errors import SyncError
from penstock.syncs.session import ApiSession

START = datetime(2026, 5, 1, tzinfo=UTC)


class Free:
    def acquire(self) -> None: ...

    def release(self, headers: object, status: int) -> None: ...


class Changing:
    """An API sorted by `updated_at`, of `size` objects a page; `before` runs before each page."""

    def __init__(self, size: int = 3) -> None:
        self.things: dict[int, Json] = {}
        self.size = size
        self.before: list[Any] = []

    def put(self, key: int, at: int, **more: Any) -> None:
        self.things[key] = {"id": key, "updated_at": _time(at), **more}

    def __call__(self, asked: Asked) -> Answer:
        if self.before and asked.path == "/things":
            change = self.before.pop(0)
            change() if change else None
        since = asked.query.get("since")
        found = sorted(self.things.values(), key=lambda each: (each["updated_at"], each["id"]))
        if asked.query.get("dir") == "desc":
            found.reverse()
        elif since:
            found = [each for each in found if each["updated_at"] >= since]
        offset = int(asked.query.get("offset", 0))
        page = found[offset : offset + self.size]
        more = offset + self.size < len(found)
        return Answer({"meta": {"next": str(offset + self.size) if more else None}, "things": page})


def _time(seconds: int) -> str:
    return (START + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def _date(seconds: int) -> str:
    return format_datetime(START + timedelta(seconds=seconds), usegmt=True)


def connector(url: str, **changes: Any) -> RestConnector:
    things = {
        "path": "things", "params": {"since": "{cursor}"}, "data_selector": "things",
        "incremental": {"cursor_path": "updated_at", "order": "ascending"}, **changes,
    }  # fmt: skip
    raw = {
        "type": "rest", "base_url": url, "allow_private": True, "collections": {"things": things},
        "paginator": {"type": "offset", "limit": 3},
    }  # fmt: skip
    return RestConnector("mine", RestProvider.model_validate(raw), {})


def opened(of: RestConnector) -> ApiSession:
    return session_of(of.access, Free(), sleep=lambda _: None)


def job(of: RestConnector, cursor: Json | None = None, kind: Kind = Kind.POLL) -> list[Page]:
    with_session = opened(of)
    collection = of.collection("things")
    pages: list[Page] = []
    for slice_ in of.plan(collection, cursor, kind, with_session):
        pages += of.read(collection, slice_, with_session)
    assert pages[-1].is_last
    assert not any(page.is_last for page in pages[:-1])
    return pages


def ids(pages: list[Page]) -> list[str]:
    return [record.upstream_id for page in pages for record in page.records]


@pytest.fixture
def things() -> Iterator[tuple[Changing, LoopbackApi]]:
    changing = Changing()
    with LoopbackApi(changing) as api:
        yield changing, api


def test_objects_keep_their_bytes(things: tuple[Changing, LoopbackApi]) -> None:
    raw = b'{"id": 12345678901234567890, "n": 1.10, "updated_at": "2026-05-01T00:00:00.5Z",  "e":1e400}'
    with LoopbackApi(lambda _: Answer(b'{"things": [' + raw + b"]}")) as api:
        (page,) = job(connector(api.url, paginator={"type": "single_page"}))
    (record,) = page.records
    assert record.data == raw
    assert record.upstream_id == "12345678901234567890"
    assert record.updated_at == START + timedelta(seconds=0.5)
    assert page.cursor == {"value": "2026-05-01T00:00:00.5Z"}


def test_an_object_that_changes_between_pages_hides_no_other(
    things: tuple[Changing, LoopbackApi],
) -> None:
    changing, api = things
    for key in range(9):
        changing.put(key, key * 10)
    # The first three have been read; one moves to the end, and all others shift by one.
    changing.before = [None, lambda: changing.put(0, 500)]
    found = ids(job(connector(api.url)))
    assert set(found) == {str(key) for key in range(9)}
    assert found[-1] == "0"


def test_a_sweep_whose_pages_shift_misses_no_id(things: tuple[Changing, LoopbackApi]) -> None:
    changing, api = things
    for key in range(9):
        changing.put(key, key)
    changing.before = [None, lambda: [changing.things.pop(key) for key in (0, 1)]]
    found = ids(job(connector(api.url, incremental=None), kind=Kind.SWEEP))
    assert set(found) >= {str(key) for key in range(2, 9)}


def test_pages_that_shift_each_time_are_an_error(things: tuple[Changing, LoopbackApi]) -> None:
    changing, api = things
    for key in range(100):
        changing.put(key, key)
    changing.before = [lambda key=key: changing.things.pop(key) for key in range(60)]
    with pytest.raises(SyncError, match="shift each time") as caught:
        job(connector(api.url, incremental=None))
    assert caught.value.transient


def test_equal_times_across_pages(things: tuple[Changing, LoopbackApi]) -> None:
    changing, api = things
    for key in range(10):
        changing.put(key, 7)
    pages = job(connector(api.url))
    assert set(ids(pages)) == {str(key) for key in range(10)}
    changing.put(10, 7)
    changing.put(11, 7)
    assert {"10", "11"} <= set(ids(job(connector(api.url), pages[-1].cursor)))


def test_a_newer_object_is_not_hidden_by_the_cursor_of_an_unsorted_list(
    things: tuple[Changing, LoopbackApi],
) -> None:
    changing, api = things
    for key in range(6):
        changing.put(key, key)
    future = int((datetime.now(UTC) - START).total_seconds()) + 7200
    changing.put(6, future)
    of = connector(api.url, incremental={"cursor_path": "updated_at"})
    pages = job(of)
    assert [page.cursor for page in pages[:-1]] == [None] * (len(pages) - 1)
    cursor = pages[-1].cursor
    assert cursor is not None
    # What changes while the list is read is read again: the cursor stands before its beginning.
    assert datetime.fromisoformat(cursor["value"]) < datetime.now(UTC)


def test_the_clock_of_the_api_counts(things: tuple[Changing, LoopbackApi]) -> None:
    changing, api = things
    api.date = "Fri, 01 May 2026 00:01:00 GMT"
    changing.put(1, 3600)
    (*_, last) = job(connector(api.url, incremental={"cursor_path": "updated_at"}))
    assert last.cursor is not None
    assert last.cursor["value"] < _time(61)


def test_a_descending_list_ends_at_the_cursor(things: tuple[Changing, LoopbackApi]) -> None:
    changing, api = things
    for key in range(30):
        changing.put(key, key * 100)
    of = connector(
        api.url,
        params={"dir": "desc"},
        incremental={"cursor_path": "updated_at", "order": "descending"},
    )
    pages = job(of, {"value": _time(2500)})
    assert set(ids(pages)) >= {"29", "28", "27", "26", "25"}
    assert len(pages) == 3
    assert pages[-1].cursor == {"value": _time(2900)}
    assert pages[0].cursor is None


def test_resume_reads_the_rest(things: tuple[Changing, LoopbackApi]) -> None:
    changing, api = things
    for key in range(10):
        changing.put(key, 7)
    of = connector(api.url)
    pages = job(of)
    again = Slice(Kind.POLL, {}, json.loads(json.dumps(pages[1].resume)))
    rest = list(of.read(of.collection("things"), again, opened(of)))
    assert ids(rest) == ids(pages[2:])
    assert rest[-1].cursor == pages[-1].cursor


def test_an_api_that_gives_the_same_page_again_is_an_error() -> None:
    same = Answer({"things": [{"id": 1, "updated_at": _time(0)}], "next": "x"})
    with LoopbackApi(lambda _: same) as api:
        of = connector(
            api.url, paginator={"type": "cursor", "cursor_path": "next", "cursor_param": "after"}
        )
        with pytest.raises(SyncError, match="do not end") as caught:
            job(of)
    assert caught.value.code == "bad_response"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"things": [{"id": 1}, {"id": 2}]}, "None of the 2 objects of a page has the cursor"),
        ({"things": [{"id": 1, "updated_at": "soon"}]}, "'soon' is no time"),
        ({"other": []}, "it lacks things"),
        ({"things": 7}, "neither a list nor an object"),
        ([], "it is no object"),
        ({"things": [{"updated_at": "2026-05-01"}]}, "it lacks its key id"),
    ],
)
def test_what_moves_no_cursor_is_an_error(body: Any, text: str) -> None:
    with LoopbackApi(lambda _: Answer(body)) as api, pytest.raises(SyncError, match=text) as caught:
        job(connector(api.url, paginator={"type": "single_page"}))
    assert caught.value.code == "bad_response"


def test_an_object_that_cannot_be_read_stops_no_other() -> None:
    body = {"things": [{"id": {}, "updated_at": _time(0)}, {"id": 2, "updated_at": _time(1)}]}
    with LoopbackApi(lambda _: Answer(body)) as api:
        of = connector(api.url, paginator={"type": "single_page"})
        (page,) = job(of)
        assert ids([page]) == ["2"]
        assert "its key id can't be read" in page.unreadable[0].reason
        # A sweep that misses an id would delete it.
        with pytest.raises(SyncError, match="can't be read"):
            job(of, kind=Kind.SWEEP)


def test_keys_of_several_fields_do_not_meet() -> None:
    body = {"things": [{"a": "x:y", "b": "z"}, {"a": "x", "b": "y:z"}, {"a": "x\\", "b": "y"}]}
    with LoopbackApi(lambda _: Answer(body)) as api:
        pages = job(
            connector(
                api.url, paginator={"type": "single_page"}, primary_key=["a", "b"], incremental=None
            )
        )
    assert ids(pages) == ["x\\:y:z", "x:y\\:z", "x\\\\:y"]


def test_deletes_by_flag_and_tombstone() -> None:
    body = {
        "things": [
            {"id": 1, "s": {"x": "gone"}, "d": None},
            {"id": 2, "s": {"x": "here"}, "d": "2026"},
        ]
    }
    single = {"type": "single_page"}
    with LoopbackApi(lambda _: Answer(body)) as api:
        flag = {"type": "flag", "path": "s.x", "value": "gone"}
        (page,) = job(connector(api.url, paginator=single, deletes=flag, incremental=None))
        assert [record.deleted for record in page.records] == [True, False]
        tombstone = {"type": "tombstone", "path": "d"}
        (page,) = job(connector(api.url, paginator=single, deletes=tombstone, incremental=None))
        assert [record.deleted for record in page.records] == [False, True]


def test_the_feed_of_deletes_has_a_cursor_of_its_own() -> None:
    def answer(asked: Asked) -> Answer:
        assert asked.path == "/deleted"
        return Answer([{"of": 5, "at": _time(9), "id": 1}])

    events = {
        "type": "events", "path": "deleted", "params": {"from": "{cursor}"}, "key_path": "of",
        "incremental": {"cursor_path": "at"}, "paginator": {"type": "single_page"},
    }  # fmt: skip
    with LoopbackApi(answer) as api:
        of = connector(api.url, deletes=events)
        (page,) = job(of, {"value": _time(1)}, Kind.EVENTS)
        (record,) = page.records
        assert (record.upstream_id, record.deleted, record.data) == ("5", True, b"")
        assert page.cursor == {"deletes": _time(9)}
        job(of, page.cursor, Kind.EVENTS)
        assert api.asked[1].query == {"from": "2026-04-30T23:59:09Z"}
        assert "from" not in api.asked[0].query


def test_a_key_in_the_query_stands_in_no_resume_token() -> None:
    def answer(asked: Asked) -> Answer:
        assert asked.query["api_key"] == "hush"
        more = (
            {"next": f"{api.url}/things?page=2&api_key=hush"} if "page" not in asked.query else {}
        )
        return Answer({"things": [{"id": len(api.asked), "updated_at": _time(0)}], **more})

    with LoopbackApi(answer) as api:
        provider = RestProvider.model_validate(
            {
                "type": "rest", "base_url": api.url, "allow_private": True,
                "auth": {"type": "api_key", "name": "api_key", "api_key": "{k}", "location": "query"},
                "paginator": {"type": "json_link"},
                "collections": {"things": {"path": "things", "data_selector": "things"}},
            }
        )  # fmt: skip
        pages = job(RestConnector("mine", provider, {"k": "hush"}))
    assert ids(pages) == ["1", "2"]
    assert "hush" not in json.dumps(pages[0].resume)


def test_a_property_that_the_credential_lacks() -> None:
    of = connector("http://127.0.0.1:9/{tenant}")
    with pytest.raises(SyncError, match="lacks the property tenant"):
        _ = of.access


def test_a_provider_without_a_paginator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"collections\.things has no paginator"):
        RestProvider.model_validate(
            {"type": "rest", "base_url": "https://x", "collections": {"things": {"path": "things"}}}
        )


def test_an_unknown_provider() -> None:
    with pytest.raises(SyncError, match="no provider 'nothere'"):
        connector_of("nothere", None, {})


_CHANGES = st.lists(
    st.one_of(st.none(), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), max_size=3)),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=4, max_size=12),
    _CHANGES,
    st.sampled_from(["offset", "keyset"]),
)
@example([0, 1, 2, 3, 4, 5], [None, [(0, 3)]], "offset")
@example([0, 0, 0, 0, 0, 0], [None, None, [(0, 0), (1, 0)]], "offset")
@example([0, 0, 1, 1], [None, [(0, 3)], None, [(1, 1), (0, 2), (0, 3)], [(0, 3)] * 2], "offset")
@example([0, 0, 1, 1], [None, [(0, 0)], [(2, 0)], [(1, 0), (0, 3)], [(0, 3)] * 3], "offset")
def test_whatever_changes_meanwhile_the_polls_reach_the_state_of_the_api(
    times: list[int], changes: list[list[tuple[int, int]] | None], paginator: str
) -> None:
    """Objects change between pages, with equal times too, and come late, within the overlap."""
    changing = Changing()
    clock = [200]

    def change(those: list[tuple[int, int]]) -> None:
        for key, seconds in those:
            # An API's clock stands still or moves on; its answers show it.
            clock[0] += seconds
            changing.put(key, clock[0])
        api.date = _date(clock[0])

    for key, at in enumerate(times):
        changing.put(key, at * 20)
    changing.before = [
        None if those is None else (lambda those=those: change(those)) for those in changes
    ]
    with LoopbackApi(changing if paginator != "keyset" else _Keyset(changing)) as api:
        api.date = _date(clock[0])
        pagers: dict[str, Any] = {
            "offset": {"type": "offset", "limit": 3},
            "keyset": {"type": "keyset", "limit": 3, "initial_key": "-1"},
        }
        incremental: dict[str, Any] = {
            "cursor_path": "updated_at",
            "order": "ascending",
            "restart": True,
            "overlap": "10s",
        }
        if paginator == "keyset":
            incremental["initial_value"] = _time(0)
        of = connector(
            api.url, paginator=pagers[paginator], incremental=incremental,
            params={"since": "{cursor}", "behind": "{key}"},
        )  # fmt: skip
        known: dict[str, Any] = {}
        cursor: Json | None = None
        while True:
            quiet = not changing.before
            for page in job(of, cursor):
                for record in page.records:
                    known[record.upstream_id] = json.loads(record.data)
                cursor = {**(cursor or {}), **(page.cursor or {})}
            if quiet:
                break
    assert known == {str(key): each for key, each in changing.things.items()}


class _Keyset:
    def __init__(self, of: Changing) -> None:
        self._of = of

    def __call__(self, asked: Asked) -> Answer:
        if self._of.before:
            change = self._of.before.pop(0)
            change() if change else None
        since, behind = asked.query["since"], int(asked.query["behind"])
        found = sorted((each["updated_at"], key) for key, each in self._of.things.items())
        rest = [self._of.things[key] for at, key in found if (at, key) > (since, behind)]
        return Answer({"things": rest[:3]})
