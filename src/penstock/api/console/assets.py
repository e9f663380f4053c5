"""Stylesheet, scripts and their licences. An address has the file's hash, so that caches keep it."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES: Final = frozenset(
    {
        "console.css", "console.js", "charts.js", "rounds.js", "sinks.js", "icon.svg",
        "htmx/htmx.min.js", "htmx/LICENSE",
        "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "uplot/LICENSE",
    }
)  # fmt: skip


def asset(name: str) -> str:
    """Return the address of a file."""
    return f"/console/static/{name}?v={_read(name)[1]}"


async def serve(request: Request) -> Response:
    """Answer with a file."""
    name = request.path_params["name"]
    if name not in _FILES:
        return Response(f"There is no {name}.", 404, media_type="text/plain")
    kept = "max-age=31536000, immutable" if "v" in request.query_params else "no-cache"
    kind = _TYPES.get(name.rpartition(".")[2], "text/plain")
    return Response(_read(name)[0], headers={"Cache-Control": kept}, media_type=kind)


@functools.cache
def _read(name: str) -> tuple[bytes, str]:
    content = resources.files("penstock.api.console").joinpath("static", name).read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:12]
