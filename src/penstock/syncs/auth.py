"""Logins of APIs: bearer, basic, API key, and OAuth 2 with tokens that are kept."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec
import requests

from penstock.config.api_logins import (
    ApiKey,
    Auth,
    Bearer,
    ClientCredentials,
    HttpBasic,
    RefreshToken,
)
from penstock.syncs.errors import SyncError
from penstock.syncs.session import Send, Signer
from penstock.syncs.tokens import LocalTokens, OAuthTokens, TokenKeeper, no_token


class HeaderSigner:
    """Sets a header."""

    def __init__(self, name: str, value: str, secrets: Iterable[str]) -> None:
        self._name: Final = name
        self._value: Final = value
        self.secrets: Final[Iterable[str]] = tuple(secrets)

    def sign(self, request: requests.PreparedRequest, send: Send) -> None:  # noqa: ARG002 - Signer
        """Add the header."""
        request.headers[self._name] = self._value

    def renew(self, send: Send) -> bool:  # noqa: ARG002 - Signer
        """Return that there is no other."""
        return False


class QuerySigner:
    """Adds a key to the query."""

    def __init__(self, name: str, key: str) -> None:
        self._name: Final = name
        self._key: Final = key
        self.secrets: Final[Iterable[str]] = (key,)

    def sign(self, request: requests.PreparedRequest, send: Send) -> None:  # noqa: ARG002 - Signer
        """Add the key, once."""
        url = without_parameter(request.url or "", self._name)
        separator = "&" if "?" in url else "?"
        request.url = f"{url}{separator}{urlencode({self._name: self._key})}"

    def renew(self, send: Send) -> bool:  # noqa: ARG002 - Signer
        """Return that there is no other."""
        return False


class OAuthSigner:
    """Adds a token of OAuth 2, and gets another one where it has ended or was refused."""

    def __init__(
        self, settings: ClientCredentials | RefreshToken, keeper: TokenKeeper | None = None
    ) -> None:
        self._settings: Final = settings
        self._keeper: Final[TokenKeeper] = LocalTokens() if keeper is None else keeper
        self._tokens: OAuthTokens | None = None

    @property
    def secrets(self) -> Iterable[str]:
        """What must not be shown."""
        yield self._settings.client_secret
        if isinstance(self._settings, RefreshToken):
            yield self._settings.refresh_token
        if self._tokens is not None:
            yield self._tokens.access_token
            yield self._tokens.refresh_token

    def sign(self, request: requests.PreparedRequest, send: Send) -> None:
        """Add the token."""
        tokens = self._tokens or self._keeper.load()
        if tokens is None or tokens.is_ending:
            tokens = self._keeper.renew(tokens, lambda kept: self._asked(kept, send))
        self._tokens = tokens
        request.headers["Authorization"] = f"Bearer {tokens.access_token}"

    def renew(self, send: Send) -> bool:
        """Get another token, after the API has refused the one that there is."""
        self._tokens = self._keeper.renew(self._tokens, lambda kept: self._asked(kept, send))
        return True

    def _asked(self, kept: OAuthTokens | None, send: Send) -> OAuthTokens:
        settings = self._settings
        data = {"client_id": settings.client_id}
        if settings.client_secret:
            data["client_secret"] = settings.client_secret
        refresh = ""
        if isinstance(settings, RefreshToken):
            refresh = (kept.refresh_token if kept else "") or settings.refresh_token
            data |= {"grant_type": "refresh_token", "refresh_token": refresh}
        else:
            data["grant_type"] = "client_credentials"
        data |= settings.access_token_request_data
        request = requests.Request(
            "POST", settings.access_token_url, data=data, headers={"Accept": "application/json"}
        )
        try:
            answer = _TokenAnswer.read(send(request).content)
        except SyncError as error:
            raise no_token(error) from None
        seconds = answer.expires_in or settings.default_token_expiration
        return OAuthTokens(
            answer.access_token, time.time() + seconds, answer.refresh_token or refresh
        )


class _TokenAnswer(msgspec.Struct):
    access_token: str
    refresh_token: str | None = None
    expires_in: float | None = None

    @classmethod
    def read(cls, content: bytes) -> _TokenAnswer:
        try:
            return msgspec.json.decode(content, type=cls, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise SyncError(
                "bad_response",
                "The server's answer to a request for a token has no access_token.",
                remedy="Compare access_token_url with the API's documentation.",
            ) from None


def signer_of(auth: Auth | None, keeper: TokenKeeper | None = None) -> Signer | None:
    """Return what signs requests as the settings say; their properties are filled in already."""
    match auth:
        case None:
            return None
        case Bearer():
            return HeaderSigner("Authorization", f"Bearer {auth.token}", [auth.token])
        case HttpBasic():
            pair = base64.b64encode(f"{auth.username}:{auth.password}".encode()).decode()
            return HeaderSigner("Authorization", f"Basic {pair}", [auth.password, pair])
        case ApiKey(location="query"):
            return QuerySigner(auth.name, auth.api_key)
        case ApiKey():
            return HeaderSigner(auth.name, auth.api_key, [auth.api_key])
        case _:
            return OAuthSigner(auth, keeper)


def without_parameter(url: str, name: str) -> str:
    """Return a URL without one parameter of its query, otherwise as it was."""
    parts = urlsplit(url)
    if not any(key == name for key, _ in parse_qsl(parts.query, keep_blank_values=True)):
        return url
    kept = [
        part
        for part in parts.query.split("&")
        if name not in (key for key, _ in parse_qsl(part, keep_blank_values=True))
    ]
    return urlunsplit(parts._replace(query="&".join(kept)))
