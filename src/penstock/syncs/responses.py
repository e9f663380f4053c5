"""What an answer of an API that is no success means."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import requests

from penstock.syncs.errors import SyncError
from penstock.syncs.rate_headers import RateLimit

_LONGEST_TEXT: Final = 300
_TEXTS: Final = ("error_description", "message", "detail", "error", "title", "errors")
_LIMIT_WORDS: Final = ("rate limit", "request_limit_exceeded", "too many requests")
_THROTTLING: Final = frozenset({425, 429})


def is_throttled(response: requests.Response, left: RateLimit, after: float | None) -> bool:
    """Return whether an answer says that there were too many requests: some APIs use 403 for it."""
    if response.status_code in _THROTTLING:
        return True
    if response.status_code != 403:
        return False
    text = response.text[:2000].lower()
    return left.remaining == 0 or after is not None or any(word in text for word in _LIMIT_WORDS)


def status_of(response: requests.Response) -> str:
    """Return what the API says of its refusal, in its own words, shortened."""
    text = ""
    try:
        text = _text(msgspec.json.decode(response.content))
    except (msgspec.DecodeError, UnicodeDecodeError):
        if "html" not in response.headers.get("Content-Type", ""):
            text = response.text
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f"{text[:_LONGEST_TEXT]}…" if len(text) > _LONGEST_TEXT else text


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _text(value[0]) if value else ""
    if isinstance(value, dict):
        for name in _TEXTS:
            if found := _text(value.get(name)):
                return found
    return ""


def error_of(
    status: int, *, throttled: bool, where: str, text: str, retry_after: float | None
) -> SyncError:
    """Return the error that a status of 400 or more means."""
    said = f"{where} answers {status}{f': {text}' if text else ''}"
    said = said if said.endswith((".", "!", "?", "…")) else f"{said}."
    if throttled:
        return SyncError(
            "rate_limited",
            said,
            remedy="Penstock asks again later. If it lasts, lower the sync's rate_limit.",
            transient=True,
            retry_after=retry_after,
        )
    if status >= 500:
        return SyncError("unavailable", said, transient=True, retry_after=retry_after)
    if status == 408:
        return SyncError("timed_out", said, transient=True, retry_after=retry_after)
    if status == 401:
        return SyncError(
            "unauthorized",
            said,
            remedy="The credential is wrong or has expired: give it valid properties.",
        )
    if status == 403:
        return SyncError(
            "forbidden",
            said,
            remedy="Give the credential's user or key the right to read this, or remove the collection.",
        )
    if status in {404, 410}:
        return SyncError(
            "not_found",
            said,
            remedy="Compare base_url and path with the API's documentation; the credential's user "
            "may not see the collection either.",
        )
    return SyncError("refused", said, remedy="Compare the request with the API's documentation.")
