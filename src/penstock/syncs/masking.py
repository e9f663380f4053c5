"""Texts without the secrets of a credential."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, quote_plus

from penstock.core.redact import MASK, redact_url

_SHORTEST: Final = 4


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return a text that shows none of these, in no form that a request has them in."""
    for secret in secrets:
        if len(secret) >= _SHORTEST:
            encoded = base64.b64encode(secret.encode()).decode()
            for form in (secret, quote(secret, safe=""), quote_plus(secret), encoded):
                text = text.replace(form, MASK)
    return redact_url(text)
