"""The demo's fake of a Stripe-like API: customers that are made, changed and deleted, over HTTP.

It is no Stripe, and no service of anybody's: it listens on the loopback address while the demo lasts.
Objects, lists and events look as Stripe's do, but for one thing: its list of customers is sorted by
change and takes `updated[gte]`, which Stripe's does not. That is what most other APIs have.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from string import Template
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

KEY: Final = "fake_key_of_the_demo"
"""What its requests sign in with; it is worth nothing."""
COLLECTION: Final = "fake_stripe:customers"
SETTINGS: Final = Template("""\
providers:
  fake_stripe:
    type: rest
    base_url: $url
    allow_private: true
    auth: {type: bearer, token: "{api_key}"}
    paginator: {type: cursor, cursor_path: next_page, cursor_param: page}
    rate_limit: {allowed_requests: 20, interval: 1s}
    collections:
      customers:
        path: v1/customers
        params: {"updated[gte]": "{cursor}"}
        data_selector: data
        created_path: created
        incremental: {cursor_path: updated, format: unix, order: ascending, overlap: 2s}
        deletes:
          type: events
          path: v1/events
          params: {type: customer.deleted, "created[gte]": "{cursor}"}
          data_selector: data
          key_path: data.object.id
          incremental: {cursor_path: created, format: unix, overlap: 2s}
credentials:
  fake_stripe: {provider: fake_stripe, properties: {api_key: $key}}
syncs:
  customers: {provider: fake_stripe, collections: [customers], credential: fake_stripe, frequency: 1s}
""")
"""How Penstock is to read it: a part of the demo's configuration."""

_PAGE: Final = 100

Json = dict[str, Any]


class _Object(NamedTuple):
    """A customer as the API shows it, and in which poll it was shown so first; None: in none yet."""

    shown: Json
    poll: int | None


class FakeStripe:
    """The customers of the fake; its methods are called from any thread.

    A poll shows the newest state, so that of two changes between two polls one message is made. For
    each change to have its own, `settled` names who may change: those that a poll before the latest has
    shown. That poll is in the table by then, as the polls of a collection follow one another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._customers: dict[int, _Object] = {}
        self._deleted: list[Json] = []
        self._polls = 0

    def put(self, number: int, version: int, name: str) -> None:
        """Make a customer, or change one."""
        now = int(time.time())
        with self._lock:
            before = self._customers.get(number)
            shown = {
                "id": f"cus_{number}",
                "object": "customer",
                "created": now if before is None else before.shown["created"],
                "updated": now,
                "name": name,
                "metadata": {"version": str(version)},
            }
            self._customers[number] = _Object(shown, None)

    def delete(self, number: int) -> None:
        """Delete a customer: its event alone is left."""
        with self._lock:
            gone = self._customers.pop(number).shown
            self._deleted.append(
                {
                    "id": f"evt_{len(self._deleted) + 1}",
                    "object": "event",
                    "type": "customer.deleted",
                    "created": int(time.time()),
                    "data": {"object": gone},
                }
            )

    def settled(self) -> list[int]:
        """Return the customers that may change or go, with no earlier change of theirs unread."""
        with self._lock:
            return [
                number
                for number, each in self._customers.items()
                if each.poll is not None and each.poll < self._polls
            ]

    def answer(self, path: str, query: dict[str, str]) -> Json | None:
        """Return what a GET is answered with; None where there is nothing of that path."""
        with self._lock:
            match path:
                case "/v1/customers":
                    return self._list(query)
                case "/v1/events":
                    since = int(query.get("created[gte]", 0))
                    found = [each for each in self._deleted if each["created"] >= since]
                    return _page("/v1/events", found[::-1], int(query.get("page", 0)))
        return None

    def _list(self, query: dict[str, str]) -> Json:
        if "page" not in query:
            self._polls += 1
        since = int(query.get("updated[gte]", 0))
        after = tuple(map(int, query["page"].split("-"))) if "page" in query else (0, -1)
        found = sorted(
            key
            for number, each in self._customers.items()
            if each.shown["updated"] >= since and (key := (each.shown["updated"], number)) > after
        )
        page = found[:_PAGE]
        for _, number in page:
            shown, poll = self._customers[number]
            self._customers[number] = _Object(shown, self._polls if poll is None else poll)
        return {
            "object": "list",
            "url": "/v1/customers",
            "has_more": len(found) > _PAGE,
            "next_page": "{}-{}".format(*page[-1]) if len(found) > _PAGE else None,
            "data": [self._customers[number].shown for _, number in page],
        }


def _page(url: str, objects: list[Json], at: int) -> Json:
    end = at + _PAGE
    more = end < len(objects)
    return {
        "object": "list",
        "url": url,
        "has_more": more,
        "next_page": str(end) if more else None,
        "data": objects[at:end],
    }


class FakeStripeServer:
    """Serves the fake on the loopback address while it is entered."""

    def __init__(self, api: FakeStripe) -> None:
        class Handler(_Handler):
            of = api

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="demo-fake-stripe", daemon=True
        )

    @property
    def settings(self) -> str:
        """How Penstock is to read it, as a part of a configuration."""
        url = f"http://127.0.0.1:{self._server.server_port}"
        return SETTINGS.substitute(url=url, key=KEY)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    of: FakeStripe

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self._send(401, _error("invalid_request_error", "No such API key."))
        elif (found := self.of.answer(parts.path, query)) is None:
            self._send(404, _error("invalid_request_error", f"Unrecognized path: {parts.path}."))
        else:
            self._send(200, found)

    def _send(self, status: int, body: Json) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Write nothing: the demo's screen is taken."""


def _error(kind: str, message: str) -> Json:
    return {"error": {"type": kind, "message": message}}
