"""Tokens of OAuth 2, and what keeps them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.syncs.errors import SyncError

_EARLY: Final = 60.0
"""How many seconds before its end a token is replaced."""


@dataclass(frozen=True, slots=True)
class OAuthTokens:
    """Tokens of OAuth 2; `expires_at` is in seconds since 1970."""

    access_token: str
    expires_at: float
    refresh_token: str = ""

    @property
    def is_ending(self) -> bool:
        """Whether it is time for others."""
        return self.expires_at - _EARLY <= time.time()


class TokenKeeper(Protocol):
    """Keeps the tokens of one credential, for all processes that use it."""

    def load(self) -> OAuthTokens | None:
        """Return the tokens that are kept."""

    def renew(
        self, stale: OAuthTokens | None, ask: Callable[[OAuthTokens | None], OAuthTokens]
    ) -> OAuthTokens:
        """Return tokens other than `stale`.

        Those are the ones that another process has got, or else what `ask` returns, which is kept.
        Only one caller asks at a time: a refresh token may serve once.
        """


class LocalTokens:
    """Keeps tokens in memory; `changed` is called with new ones."""

    def __init__(self, changed: Callable[[OAuthTokens], object] | None = None) -> None:
        self._lock: Final = threading.Lock()
        self._changed: Final = changed
        self._tokens: OAuthTokens | None = None

    def load(self) -> OAuthTokens | None:
        """Return the tokens that are kept."""
        return self._tokens

    def renew(
        self, stale: OAuthTokens | None, ask: Callable[[OAuthTokens | None], OAuthTokens]
    ) -> OAuthTokens:
        """Return tokens other than `stale`."""
        with self._lock:
            if self._tokens is None or self._tokens == stale:
                self._tokens = ask(self._tokens)
                if self._changed is not None:
                    self._changed(self._tokens)
            return self._tokens


class LazyTokens:
    """Keeps tokens with what `make` returns, which is called once they are needed."""

    def __init__(self, make: Callable[[], TokenKeeper]) -> None:
        self._make: Final = make
        self._keeper: TokenKeeper | None = None

    def load(self) -> OAuthTokens | None:
        """Return the tokens that are kept."""
        return self._made().load()

    def renew(
        self, stale: OAuthTokens | None, ask: Callable[[OAuthTokens | None], OAuthTokens]
    ) -> OAuthTokens:
        """Return tokens other than `stale`."""
        return self._made().renew(stale, ask)

    def _made(self) -> TokenKeeper:
        if self._keeper is None:
            self._keeper = self._make()
        return self._keeper


def no_token(error: SyncError) -> SyncError:
    """Return the error of a request for a token, where the login is at fault."""
    if error.code not in {"refused", "forbidden"}:
        return error
    return SyncError(
        "unauthorized",
        f"The server gives no token. {error.message}",
        remedy="Log in again, and give the credential what it gets.",
    )
