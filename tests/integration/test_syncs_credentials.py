"""Tokens of OAuth that are kept in the store: encrypted, and renewed by one process at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from urllib.parse import parse_qsl

import psycopg
import pytest

from penstock.config.api_logins import RefreshToken
from penstock.embedded.handles import Database
from penstock.streams.connection import own_connection
from penstock.streams.store import Store
from penstock.syncs.auth import signer_of
from penstock.syncs.credentials import SecretKey, StoredTokens
from penstock.syncs.errors import SyncError
from penstock.syncs.local_budget import LocalBudget
from penstock.syncs.session import ApiSession
from penstock.syncs.tokens import OAuthTokens

from ..loopback_api import Answer, Asked, LoopbackApi
from ..waits import Later, at_once

KEY = SecretKey(["k" * 32])


@pytest.fixture
def kept(database: Database, store: Store) -> StoredTokens:
    return keeper(store)


def keeper(
    store: Store, origin: str = "refresh-0", credential: str = "crm", key: SecretKey = KEY
) -> StoredTokens:
    own = partial(own_connection, store.url)
    return StoredTokens(store.connection, own, key, credential, origin)


@pytest.fixture
def other_store(database: Database, store: Store) -> Iterator[Store]:
    """The store as another executor has it."""
    with contextlib.closing(Store(database.url)) as other:
        yield other


def test_they_are_kept_encrypted(kept: StoredTokens, database: Database, store: Store) -> None:
    assert kept.load() is None
    tokens = OAuthTokens("access-1", 1e9, "refresh-1")
    assert kept.renew(None, lambda _: tokens) == tokens
    assert keeper(store).load() == tokens
    with psycopg.connect(database.url) as connection:
        row = connection.execute("select * from penstock.credential_tokens").fetchone()
    assert b"access-1" not in repr(row).encode()
    other = SecretKey(["other " * 8])
    with pytest.raises(SyncError, match="encrypted with another key"):
        keeper(store, key=other).load()
    # The user has given another refresh token: what came of the first one does not count.
    assert keeper(store, "refresh-9").load() is None


def test_a_refresh_token_serves_once(kept: StoredTokens, other_store: Store) -> None:
    first = kept.renew(None, lambda _: OAuthTokens("access-1", 1e9, "refresh-1"))
    asked: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def ask(known: OAuthTokens | None) -> OAuthTokens:
        assert known is not None
        asked.append(known.refresh_token)
        begun.set()
        assert go_on.wait(20)
        return OAuthTokens("access-2", 1e9, "refresh-2")

    renewing = [Later(partial(by.renew, first, ask)) for by in (kept, keeper(other_store))]
    assert begun.wait(20)
    go_on.set()
    found = [each.result(20) for each in renewing]
    assert asked == ["refresh-1"]
    assert [each.access_token for each in found] == ["access-2", "access-2"]


def test_while_a_server_gives_no_token_other_credentials_go_on(
    kept: StoredTokens, store: Store
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def ask(_: OAuthTokens | None) -> OAuthTokens:
        begun.set()
        assert go_on.wait(60)
        return OAuthTokens("access-1", 1e9, "refresh-1")

    renewing = Later(lambda: kept.renew(None, ask))
    assert begun.wait(30)
    try:
        assert Later(keeper(store, credential="erp").load).result(30) is None
    finally:
        go_on.set()
    renewing.result(30)


def test_a_token_is_kept_though_the_connection_breaks_meanwhile(
    kept: StoredTokens, store: Store, database: Database
) -> None:
    def ask(_: OAuthTokens | None) -> OAuthTokens:
        with psycopg.connect(database.url, autocommit=True) as connection:
            ended = connection.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname ="
                " current_database() and state = 'idle in transaction'"
            ).fetchall()
        assert ended == [(True,)]
        return OAuthTokens("access-1", 1e9, "refresh-1")

    tokens = kept.renew(None, ask)
    assert keeper(store).load() == tokens


class OAuth:
    """An API whose refresh tokens serve once; one that comes again ends the login for good.

    Only the newest access token is taken, and for `uses` requests: those who have another get 401.
    """

    def __init__(self, uses: int) -> None:
        self.issued = 0
        self.is_revoked = False
        self._uses = uses
        self._left = 0
        self._lock = threading.Lock()

    def answer(self, asked: Asked) -> Answer:
        with self._lock:
            if asked.path != "/token":
                good = asked.headers["authorization"] == f"Bearer access-{self.issued}"
                if not good or not self._left or self.is_revoked:
                    return Answer(status=401)
                self._left -= 1
                return Answer({"fine": True})
            form = dict(parse_qsl(asked.body.decode()))
            if self.is_revoked or form["refresh_token"] != f"refresh-{self.issued}":
                self.is_revoked = True
                return Answer({"error": "invalid_grant"}, status=400)
            self.issued, self._left = self.issued + 1, self._uses
            return Answer({
                "access_token": f"access-{self.issued}", "refresh_token": f"refresh-{self.issued}",
                "expires_in": 3600,
            })  # fmt: skip


def test_executors_that_refresh_at_once_do_not_end_each_others_login(
    store: Store, other_store: Store
) -> None:
    oauth = OAuth(uses=7)
    failures: list[SyncError] = []

    def executor(of: Store) -> ApiSession:
        auth = RefreshToken(
            type="oauth2_refresh_token", access_token_url=f"{api.url}/token", client_id="me",
            client_secret="hush", refresh_token="refresh-0",
        )  # fmt: skip
        signer = signer_of(auth, keeper(of))
        budget = LocalBudget(10_000, max_concurrent_requests=100)
        return ApiSession(budget, signer, allow_private=True)

    def work(session: ApiSession) -> None:
        for _ in range(10):
            while True:
                try:
                    session.request("GET", f"{api.url}/things")
                except SyncError as error:
                    # Others may use the new token up before this one comes to it.
                    if error.code != "unauthorized" or oauth.is_revoked:
                        failures.append(error)
                        return
                else:
                    break

    with LoopbackApi(oauth.answer) as api:
        sessions = [executor(of) for of in (store, other_store) for _ in range(3)]
        at_once(*[partial(work, each) for each in sessions])
        assert not failures
        assert oauth.issued >= len(sessions) * 10 / 7
        issued = oauth.issued
        # A process that starts anew goes on with what is kept: the user's own token has served.
        work(executor(store))
        assert not failures
        assert oauth.issued - issued <= 2
    kept = keeper(other_store).load()
    assert kept is not None
    assert kept.refresh_token == f"refresh-{oauth.issued}"
