"""Logins at the console: a random id in the browser's cookie, its hash in the store.

They are in the store, and not signed cookies, for three reasons. Every API process of a store knows a
login, and its end, without a shared key. A logout ends a cookie that somebody copied. And who reads the
store can't forge one: only hashes are there, as with tokens. Each request reads its session together
with its token, one row by a primary key, so that a revoked token ends it at once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from penstock.api.auth import Grant
from penstock.core import queries
from penstock.streams.store import Store

COOKIE: Final = "penstock_session"
PATH: Final = "/console"
IDLE: Final = timedelta(hours=2)
"""How long a login lasts without a request."""
LONGEST: Final = timedelta(days=7)
_STALE: Final = timedelta(minutes=1)  # requests of one minute are noted once
_ID_BYTES: Final = 32

_SQL: Final = queries.load("penstock.api.console", "sessions.sql")


@dataclass(frozen=True, slots=True)
class Session:
    """What a browser's cookie stands for; `grant` is None before the login."""

    id: str
    grant: Grant | None = None

    @classmethod
    def new(cls) -> Session:
        """Return one of a visitor who has not logged in."""
        return cls(secrets.token_urlsafe(_ID_BYTES))

    @property
    def csrf(self) -> str:
        """What a form of this session carries; the id can't be computed from it."""
        return hashlib.sha256(b"csrf:" + self.id.encode()).hexdigest()

    def vouches_for(self, csrf: str) -> bool:
        """Return whether a form with this `csrf` is from one of the session's own pages."""
        return hmac.compare_digest(self.csrf.encode(), csrf.encode())


class Sessions:
    """The logins in a store. Its methods block, and raise `StoreError`."""

    def __init__(self, store: Store, idle: timedelta = IDLE) -> None:
        self._store = store
        self._bounds = {"idle": idle, "longest": LONGEST, "stale": min(_STALE, idle / 4)}

    def begin(self, token: str) -> Session | None:
        """Return a new session for a token, None where that is unknown or revoked."""
        session = Session.new()
        values = {"token": hashlib.sha256(token.encode()).digest(), **self._values(session.id)}
        with self._store.connection() as connection:
            connection.execute(_SQL["begin"], values)
        return self.find(session.id)

    def find(self, session: str) -> Session | None:
        """Return the session with this id, None where there is none any more."""
        values = self._values(session)
        with self._store.connection() as connection:
            row = connection.execute(_SQL["find"], values).fetchone()
            if row is None:
                return None
            name, role, is_stale = row
            if is_stale:
                connection.execute(_SQL["touch"], values)
        return Session(session, Grant(name, role, None))

    def end(self, session: str) -> None:
        """End a session; its id is worthless from now on."""
        with self._store.connection() as connection:
            connection.execute(_SQL["end"], self._values(session))

    def _values(self, session: str) -> dict[str, Any]:
        return {"hash": hashlib.sha256(session.encode()).digest(), **self._bounds}


def id_of(request: Request) -> str | None:
    """Return the id in a request's cookie."""
    return request.cookies.get(COOKIE)


def set_cookie(request: Request, response: Response, session: Session) -> None:
    """Give a session to the browser: for this site's own requests, and for no script."""
    response.set_cookie(
        COOKIE, session.id, path=PATH, httponly=True, samesite="strict", secure=is_https(request)
    )


def drop_cookie(request: Request, response: Response) -> None:
    """Have the browser forget its session."""
    response.delete_cookie(
        COOKIE, path=PATH, httponly=True, samesite="strict", secure=is_https(request)
    )


def is_https(request: Request) -> bool:
    """Return whether the browser speaks TLS, with this server or with a proxy in front of it."""
    # A client that makes the header up only has its own cookie sent over TLS alone.
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
