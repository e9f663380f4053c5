"""The start of an endpoint's answer, as it may stand in a log, a status or a dead letter."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote, unquote_plus, urlsplit

from penstock.config.consumers import WebhookSettings
from penstock.core.redact import MASK, redact_url

KEPT_BYTES: Final = 1_000
"""How much of a body is searched: a secret that begins in what is shown must be whole."""
_SHOWN: Final = 200
_SHORTEST: Final = 4  # what is shorter would mask half of any text
_SENT: Final = "/%:@!$&'()*+,;=~?"  # what a request's target has unescaped
_BLANK: Final = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")


class Quoting:
    """Quotes answers of the endpoint of `settings`, without the secrets that it was sent."""

    def __init__(self, settings: WebhookSettings) -> None:
        found = _of_url(settings.url.get_secret_value())
        found |= {secret.get_secret_value() for secret in settings.secrets}
        for value in settings.headers.values():
            text = value.get_secret_value()
            found |= {text, *text.split()}
        found |= _in_json(found)
        found |= {_BLANK.sub(" ", secret) for secret in found}
        found -= {"Basic", "Bearer", "Token"}
        self._secrets = sorted(
            (s for s in found if len(s) >= _SHORTEST), key=lambda s: (-len(s), s)
        )

    def quote(self, body: bytes) -> str:
        """Return the start of a body in one line, empty where there is no text in it."""
        text = _BLANK.sub(" ", body[:KEPT_BYTES].decode(errors="replace")).strip()
        if len(body) >= KEPT_BYTES:
            text = text.rpartition(" ")[0]  # the last word may be half a secret
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        text = redact_url(text)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _of_url(text: str) -> set[str]:
    """Return the credentials and the query's values: as written, as meant, and as they are sent."""
    url = urlsplit(text)
    found = {part for part in (url.username, url.password) if part}
    for part in url.query.split("&"):
        name, _, value = part.partition("=")
        found.add(value or name)
    found |= {unquote(part) for part in found} | {unquote_plus(part) for part in found}
    found |= {quote(part, safe=_SENT) for part in found}
    if url.username is not None:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
        found |= {pair, base64.b64encode(pair.encode()).decode()}
    return found


def _in_json(texts: Iterable[str]) -> set[str]:
    """Return texts as they stand between the quotes of JSON; some programs escape slashes too."""
    found = {json.dumps(text, ensure_ascii=a)[1:-1] for text in texts for a in (False, True)}
    return found | {text.replace("/", r"\/") for text in found}
