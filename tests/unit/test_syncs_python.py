"""The python connector: functions and classes of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.loopback_api import Answer, LoopbackApi

from penstock.config.providers import PythonProvider
from penstock.syncs.connectors.contract import Kind
from penstock.syncs.connectors.make import connector_of, session_of
from penstock.syncs.connectors.python import PythonConnector
from penstock.syncs.errors import SyncError
from penstock.syncs.local_budget import LocalBudget

CODE = """
import datetime, decimal

def read(request):
    assert request.properties["key"] == "hush"
    if request.since:
        yield {"id": 2, "updated_at": request.since}
        return
    yield {"id": 10**20, "updated_at": "2026-05-01T00:00:00Z", "n": decimal.Decimal("1.10")}
    yield b'{"id": 2, "n": 1.10, "updated_at": "2026-05-01T00:00:01Z"}'
    yield [{"id": 3, "updated_at": datetime.datetime(2026, 5, 1, 0, 0, 2)}, {"id": 4}]

def fetched(request):
    yield from request.session.request("GET", request.settings["url"]).json()

def failing(request):
    yield {"id": 1, "updated_at": "2026-05-01"}
    raise KeyError("hush")

def text(request):
    yield 7

class Mine:
    def read(self, request):
        yield {"id": 1, "updated_at": "2026-05-01"}

    def check(self, request):
        raise ValueError("not good")
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return str(path)


def made(function: str, **more: Any) -> PythonConnector:
    collection = {"incremental": {"cursor_path": "updated_at"}}
    settings = PythonProvider.model_validate(
        {"type": "python", "function": function, "collections": {"things": collection}, **more}
    )
    found = connector_of("mine", settings, {"key": "hush"})
    assert isinstance(found, PythonConnector)
    return found


def job(of: PythonConnector, cursor: Any = None) -> list[Any]:
    session = session_of(of.access, LocalBudget(1000))
    collection = of.collections()["things"]
    pages: list[Any] = []
    for slice_ in of.plan(collection, cursor, Kind.POLL, session):
        pages += of.read(collection, slice_, session)
    return pages


def test_a_function_of_a_file(module: str) -> None:
    of = made(f"{module}:read")
    pages = job(of)
    records = [record for page in pages for record in page.records]
    assert [record.upstream_id for record in records] == [str(10**20), "2", "3", "4"]
    assert b'"n":1.10' in records[0].data.replace(b" ", b"")
    assert records[1].data == b'{"id": 2, "n": 1.10, "updated_at": "2026-05-01T00:00:01Z"}'
    assert pages[-1].is_last
    assert not any(page.resume for page in pages), "it goes on nowhere"
    assert pages[-1].cursor == {"value": "2026-05-01T00:00:02"}
    (page, _) = job(of, pages[-1].cursor)
    assert b"2026-04-30T23:59:02Z" in page.records[0].data


def test_its_requests_obey(module: str) -> None:
    with LoopbackApi(lambda _: Answer([{"id": 1, "updated_at": "2026-05-01"}])) as api:
        settings = {"url": api.url}
        with pytest.raises(SyncError, match="not an address of the public internet"):
            job(made(f"{module}:fetched", settings=settings))
        assert len(job(made(f"{module}:fetched", settings=settings, allow_private=True))) == 2


def test_failures_name_the_line_and_no_secret(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "hush")
    with pytest.raises(SyncError, match=r"mine.py, line \d+: KeyError") as caught:
        job(made(f"{module}:failing"))
    assert caught.value.code == "connector"
    assert "hush" not in str(caught.value)
    with pytest.raises(SyncError, match="yields an int"):
        job(made(f"{module}:text"))


def test_a_class_and_its_check(module: str) -> None:
    of = made(f"{module}:Mine")
    assert [record.upstream_id for page in job(of) for record in page.records] == ["1"]
    with pytest.raises(SyncError, match="ValueError: not good"):
        of.check(session_of(of.access, LocalBudget()))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("no_such_module:read", "can't be imported"), ("nowhere.py:read", "there is no file"),
        ("json:nothing", "has no function 'nothing'"),
    ],
)  # fmt: skip
def test_what_is_not_there(function: str, text: str) -> None:
    with pytest.raises(SyncError, match=text):
        made(function)
