"""What it means when an API answers with no success, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
import requests

from penstock.syncs.errors import SyncError
from penstock.syncs.rate_headers import RateHeaders

_LONGEST_TEXT: Final = 300
_TEXTS: Final = ("error_description", "message", "detail", "error", "title", "errors")
_LIMIT_WORDS: Final = ("rate limit", "request_limit_exceeded", "too many requests")
_THROTTLING: Final = frozenset({425, 429})


def is_throttled(response: requests.Response, left: RateHeaders, after: float | None) -> bool:
    """Return whether an answer says that there were too many requests: some APIs use 403 for it."""
    if response.status_code in _THROTTLING:
        return True
    if response.status_code != 403:
        return False
    text = response.text[:2000].lower()
    return left.remaining == 0 or after is not None or any(word in text for word in _LIMIT_WORDS)


def status_of(response: requests.Response) -> str:
    """Return the API's reason for its refusal, in its own words, shortened."""
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


def broken(error: Exception, where: str, text: str) -> SyncError:
    """Return the error of a request that has no answer; both texts are without secrets."""
    reasons = requests.exceptions
    if isinstance(error, reasons.SSLError):
        return SyncError(
            "unavailable",
            f"{where} has a TLS certificate that can't be verified.",
            remedy="Repair it, or add its CA to the file that REQUESTS_CA_BUNDLE names.",
        )
    if isinstance(error, reasons.Timeout):
        return SyncError("timed_out", f"{where} does not answer in time.", transient=True)
    if isinstance(error, reasons.ProxyError):
        return SyncError("unavailable", f"The proxy to {where} fails.", transient=True)
    transient = (
        reasons.ConnectionError,
        reasons.ChunkedEncodingError,
        reasons.ContentDecodingError,
    )
    if isinstance(error, transient):
        return SyncError("unavailable", f"{where} {_reason(error)}.", transient=True)
    return SyncError("refused", f"{where} can't be asked: {text[:200]}.")


def _reason(error: Exception) -> str:
    names = {type(each).__name__ for each in _causes(error)}
    if names & {"NameResolutionError", "gaierror"}:
        return "has a name that does not resolve"
    if "ConnectionRefusedError" in names or "NewConnectionError" in names:
        return "takes no connection"
    return "breaks the connection off"


def _causes(error: BaseException) -> Iterable[BaseException]:
    stack: list[Any] = [error]
    seen: set[int] = set()
    while stack:
        each = stack.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            stack += [each.__cause__, each.__context__, getattr(each, "reason", None), *each.args]
