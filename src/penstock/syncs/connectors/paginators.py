"""dlt's REST client and its paginators: the only module that imports dlt.

That takes half a second and 32 MB, reads no file and starts no thread. Nothing else of dlt is used: its
pipelines, its state, its configuration and its telemetry are not.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec
import requests
from dlt.common.configuration.specs.runtime_configuration import RuntimeConfiguration
from dlt.sources.helpers.rest_client import paginators as dlt
from dlt.sources.helpers.rest_client.client import RESTClient

from penstock.config.paginators import Paginator
from penstock.syncs.auth import without_parameter
from penstock.syncs.connectors.contract import Json, Session
from penstock.syncs.connectors.objects import items, names

_MADE: Final[Mapping[str, type[dlt.BasePaginator]]] = {
    "single_page": dlt.SinglePagePaginator,
    "json_link": dlt.JSONLinkPaginator,
    "header_link": dlt.HeaderLinkPaginator,
    "header_cursor": dlt.HeaderCursorPaginator,
    "cursor": dlt.JSONResponseCursorPaginator,
    "offset": dlt.OffsetPaginator,
    "page_number": dlt.PageNumberPaginator,
}
_PLAIN: Final = re.compile(r"\$?\.?[\w-]+(?:\.[\w-]+)*")
"""A path of names alone, which looks at no other member."""
_NO_TOTAL: Final = frozenset({"offset", "page_number"})


class _Client(RESTClient):
    """Gives objects as the bytes that came."""

    def extract_response(self, response: requests.Response, data_selector: Any) -> list[Any]:
        return items(response.content, str(data_selector))


class _Light:
    """A response whose JSON lacks the list of objects: no paginator reads it, and it is nearly all."""

    def __init__(self, response: requests.Response, unread: str) -> None:
        self._response: Final = response
        self._unread: Final = unread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    def json(self) -> Any:
        try:
            members = msgspec.json.decode(self._response.content, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._response.json()
        return {k: json.loads(bytes(raw)) for k, raw in members.items() if k != self._unread}


class ResumablePaginator(dlt.BasePaginator):
    """A paginator of dlt's whose state can be kept, and set.

    Pages that are counted by an offset begin with the last object of the page before: where another one
    stands there, they have shifted. `steps_back`: the next page is one of those.

    `unread` is the member of an answer that it does not look at.
    """

    def __init__(
        self, inner: dlt.BasePaginator, resume: Json | None, unread: str | None = None
    ) -> None:
        super().__init__()
        self._inner: Final = inner
        self._unread: Final = unread
        self._resume: Final = resume
        self.steps_back = resume is not None and resume.get("anchor") is not None

    @property
    def has_next_page(self) -> bool:
        """Whether there is another page."""
        return self._inner.has_next_page

    def init_request(self, request: requests.Request) -> None:
        """Set the first request, or the one that was next."""
        self._inner.init_request(request)
        resume = self._resume
        if resume is None:
            return
        request.url = resume["url"]
        request.params = copy.deepcopy(resume["params"])
        request.json = copy.deepcopy(resume["json"])
        if isinstance(self._inner, dlt.RangePaginator):
            self._inner.current_value = resume["value"]

    def update_state(self, response: requests.Response, data: list[Any] | None = None) -> None:
        """Note an answer."""
        inner = self._inner
        if self._unread is not None:
            response = cast("requests.Response", _Light(response, self._unread))
        if not isinstance(inner, dlt.OffsetPaginator):
            inner.update_state(response, data)
            return
        before = inner.current_value
        inner.update_state(response, data)
        only_known = self.steps_back and len(data or ()) == 1
        self.steps_back = False
        if not data or inner.limit == 1 or not inner.has_next_page:
            return
        if only_known:
            inner._has_next_page = False
            return
        # A short page does not move the offset by more than it has: something may have come behind it.
        self.steps_back = len(data) > 1
        inner.current_value = before + len(data) - self.steps_back

    def update_request(self, request: requests.Request) -> None:
        """Make the request that of the next page."""
        if self._inner.has_next_page:
            self._inner.update_request(request)

    def state(self, request: requests.Request, hidden: str | None) -> Json:
        """Return what the next page needs; without the parameter that logs in."""
        url = request.url if hidden is None else without_parameter(request.url, hidden)
        value = getattr(self._inner, "current_value", None)
        return {
            "url": url,
            "params": copy.deepcopy(request.params),
            "json": copy.deepcopy(request.json),
            "value": value,
        }


def paginator(settings: Paginator, resume: Json | None, selector: str = "$") -> ResumablePaginator:
    """Return the paginator of the settings, which goes on where `resume` says.

    `selector` is the path of the objects in an answer.
    """
    arguments = settings.model_dump(exclude={"type"}, exclude_none=True)
    if settings.type in _NO_TOTAL:
        # dlt expects `total` otherwise.
        arguments.setdefault("total_path", None)
    made = _MADE[settings.type](**arguments)
    return ResumablePaginator(made, resume, _unread(settings, selector))


def _unread(settings: Paginator, selector: str) -> str | None:
    """Return the member of an answer that has the objects, None where a path may lead into it."""
    top = next(iter(names(selector)), None)
    paths = [value for name, value in settings if name.endswith("_path") and value is not None]
    if top is None or any(top in of or not _PLAIN.fullmatch(of) for of in paths):
        return None
    return top


def client(session: Session, url: str, headers: Mapping[str, str]) -> RESTClient:
    """Return a client of dlt's that makes its requests with `session`."""
    return _Client(
        base_url=url,
        headers=dict(headers),
        session=session.http,
        config=RuntimeConfiguration(),  # its own would be looked up in files and the environment
    )
