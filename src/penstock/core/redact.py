"""Keeps secrets out of logs, errors and output: passwords in URLs and connection strings."""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "***"

_NEXT_URL = re.compile(r",(?=\s*[A-Za-z][A-Za-z0-9+.-]*://)")
_PARAMETER = re.compile(
    r"([?&;][^=&#\s]*(?:password|passwd|pwd|token|secret|nkey|apikey|api_key)[^=&#\s]*=)[^&#\s]*",
    re.I,
)
_KEYWORD = re.compile(
    r"((?:^|\s)(?:ssl)?(?:password|passwd|pwd|token|secret)\s*=\s*)('(?:\\.|[^'\\])*(?:'|\Z)|\S+)",
    re.I,
)
# Before these servers' `@` may stand a token alone, which is a secret and no name.
_TOKEN_SCHEMES = frozenset({"nats", "tls", "ws", "wss"})


def redact_url(url: str) -> str:
    """Return a URL, a comma-separated list of them or a libpq connection string without secrets.

    Where a malformed URL leaves in doubt what is the password, more is masked rather than less.
    """
    return ",".join(_redact_one(part) for part in _NEXT_URL.split(url))


def _redact_one(url: str) -> str:
    url = _KEYWORD.sub(rf"\g<1>{MASK}", _PARAMETER.sub(rf"\g<1>{MASK}", url))
    scheme, separator, rest = url.partition("://")
    if not separator:
        # `user:secret@host` without its scheme; a connection string has `host=` and no such part.
        before, at, after = url.rpartition("@")
        return f"{MASK}@{after}" if at and "=" not in before else url
    # The last `@`, because a password with a forgotten %40 in it must not show its end.
    user_info, at, address = rest.rpartition("@")
    if not at:
        return url
    user, colon, _ = user_info.partition(":")
    if scheme.strip().lower() in _TOKEN_SCHEMES:
        return f"{scheme}://{MASK}@{address}"
    return f"{scheme}://{user}:{MASK}@{address}" if colon else f"{scheme}://{user}@{address}"
