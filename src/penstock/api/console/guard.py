"""What every answer and every change of the console goes through: headers, and proof of its origin."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from penstock.api.console.forms import CSRF, Form
from penstock.api.console.sessions import PATH, Session

_CSP: Final = "; ".join(
    [
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:",
        "connect-src 'self'", "form-action 'self'", "frame-ancestors 'none'", "base-uri 'none'",
    ]
)  # fmt: skip
HEADERS: Final = {
    "Content-Security-Policy": _CSP,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # Not `no-referrer`: browsers would send forms with the Origin `null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def secured(response: Response) -> Response:
    """Return an answer with the console's headers; no cache keeps it unless it says otherwise."""
    for name, value in HEADERS.items():
        response.headers[name] = value
    response.headers.setdefault("Cache-Control", "no-store")
    return response


def refusal(request: Request, session: Session, form: Form) -> str:
    """Return why a change is refused as one that another site may have sent, or nothing."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        own = site == "same-origin"
    else:
        own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if not own:
        return "It came from another site. Open the console itself, and do it there."
    if not session.vouches_for(form[CSRF] or request.headers.get("x-csrf-token", "")):
        return "Its page is of a session that has ended. Load the page again, and repeat it."
    return ""


def own_path(text: str) -> str:
    """Return a path of the console that a login may lead to; that of another site leads to the start."""
    plain = text.startswith(f"{PATH}/") and text.isprintable() and "\\" not in text
    return text if plain and not text.startswith(f"{PATH}/log") else PATH
