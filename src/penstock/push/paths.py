"""The path that a message's `metadata.route` adds to a webhook's URL.

A route comes from rows of a database, so it is taken as text of segments and nothing
else: it can lead to no other host, not out of the webhook's own path, and adds no query. `%XX` in it
stays as it is, as a sink's route escapes the values in it that way.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, unquote

from penstock.core.json_members import Members, text_of

_HINT: Final = b'"route"'
_METADATA: Final = Members(["metadata"])
_ROUTE: Final = Members(["route"])
_SAFE: Final = "%:@!$&'()*+,;=~"
_STRAY: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SEPARATORS: Final = re.compile(r"[/\\;]")  # some servers take a ; for the segment's end
_DOTS: Final = (".", "..")
_BLANK: Final = "".join(map(chr, range(33))) + "\x7f"


def path_of(message: bytes) -> str:
    """Return the path that a message's route gives, with a slash before each segment; "" for none."""
    if _HINT not in message:
        return ""
    value = _ROUTE(_METADATA(message)["metadata"])["route"]
    if value is None or value[:1] != b'"':
        return ""
    return "".join(map(_segment, filter(None, (text_of(value) or "").split("/"))))


def _segment(text: str) -> str:
    """Return a segment as it stands in a URL, behind its slash."""
    if any(part.strip(_BLANK) in _DOTS for part in _SEPARATORS.split(unquote(text))):
        # Servers and proxies take %2E for a dot and %2F for a slash: escaped twice they do not.
        text = quote(unquote(text), safe="").replace(".", "%2E")
        return "/" + quote(text, safe="")
    return "/" + quote(_STRAY.sub("%25", text), safe=_SAFE)
