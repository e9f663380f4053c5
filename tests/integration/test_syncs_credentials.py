"""Tokens of OAuth that are kept in the store: encrypted, and renewed by one process at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from penstock.embedded.handles import Database
from penstock.streams.store import Store
from penstock.syncs.auth import Tokens
from penstock.syncs.credentials import SecretKey, StoredTokens
from penstock.syncs.errors import SyncError

KEY = SecretKey(["k" * 32])


@pytest.fixture
def kept(database: Database, store: Store) -> StoredTokens:
    return StoredTokens(_connecting(database), KEY, "crm", "refresh-0")


def _connecting(database: Database) -> Any:
    @contextlib.contextmanager
    def connect() -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(database.url, autocommit=True) as connection:
            yield connection

    return connect


def test_they_are_kept_encrypted(kept: StoredTokens, database: Database, store: Store) -> None:
    assert kept.load() is None
    tokens = Tokens("access-1", 1e9, "refresh-1")
    assert kept.renew(None, lambda _: tokens) == tokens
    assert StoredTokens(_connecting(database), KEY, "crm", "refresh-0").load() == tokens
    with psycopg.connect(database.url) as connection:
        row = connection.execute("select * from penstock.credential_tokens").fetchone()
    assert b"access-1" not in repr(row).encode()
    other = SecretKey(["other " * 8])
    with pytest.raises(SyncError, match="encrypted with another key"):
        StoredTokens(_connecting(database), other, "crm", "refresh-0").load()
    # The user has given another refresh token: what came of the first one does not count.
    assert StoredTokens(_connecting(database), KEY, "crm", "refresh-9").load() is None


def test_a_refresh_token_serves_once(kept: StoredTokens, database: Database) -> None:
    first = kept.renew(None, lambda _: Tokens("access-1", 1e9, "refresh-1"))
    asked: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def ask(known: Tokens | None) -> Tokens:
        assert known is not None
        asked.append(known.refresh_token)
        begun.set()
        assert go_on.wait(20)
        return Tokens("access-2", 1e9, "refresh-2")

    found: list[Tokens] = []
    other = StoredTokens(_connecting(database), KEY, "crm", "refresh-0")
    threads = [
        threading.Thread(target=lambda by=by: found.append(by.renew(first, ask)))
        for by in (kept, other)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert asked == ["refresh-1"]
    assert [each.access_token for each in found] == ["access-2", "access-2"]
