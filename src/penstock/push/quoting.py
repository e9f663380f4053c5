"""The start of an endpoint's answer, as it may stand in a log, a status or a dead letter."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.redact import MASK, redact_url
from penstock.streams.consumer_settings import WebhookSettings

KEPT_BYTES: Final = 1_000
"""How much of a body is looked at: a secret that begins in what is shown must be whole."""
_SHOWN: Final = 200
_SHORTEST: Final = 4  # what is shorter would mask half of any text
_BLANK: Final = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")


class Quoting:
    """Quotes answers of the endpoint of `settings`, without the secrets that it was sent."""

    def __init__(self, settings: WebhookSettings) -> None:
        url = urlsplit(settings.url.get_secret_value())
        found = {secret.get_secret_value() for secret in settings.secrets}
        found |= {unquote(part) for part in (url.username, url.password) if part}
        found |= {value for _name, value in parse_qsl(url.query)}
        for value in settings.headers.values():
            text = value.get_secret_value()
            found |= {text, *text.split()}
        found -= {"Basic", "Bearer", "Token"}
        self._secrets = sorted((s for s in found if len(s) >= _SHORTEST), key=len, reverse=True)

    def quote(self, body: bytes) -> str:
        """Return the start of a body in one line, empty where there is no text in it."""
        text = _BLANK.sub(" ", body[:KEPT_BYTES].decode(errors="replace")).strip()
        if len(body) >= KEPT_BYTES:
            text = text.rpartition(" ")[0]  # the last word may be half a secret
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        text = redact_url(text)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
