"""A sync of one collection in memory: the connector is Penstock's, the API is a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import responses
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import requests
from pydantic import BaseModel, TypeAdapter
from requests.adapters import BaseAdapter

from penstock.config.providers import PROVIDERS, ProviderSettings
from penstock.syncs.connectors.contract import Connector, Json, Kind, Unreadable
from penstock.syncs.connectors.make import connector_of, session_of
from penstock.syncs.local_budget import LocalBudget

_ANY_JSON: Final = TypeAdapter(Any)


@dataclass(frozen=True)
class ApiRequest:
    """A request that the connector makes; `params` has the last value of each name of the query."""

    method: str
    path: str
    params: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


@dataclass(frozen=True)
class ApiAnswer:
    """An answer; `body` is bytes, or what becomes JSON."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class InMemorySync:
    """Reads one collection by its connector, and keeps its records as a sync does.

    Args:
        provider: The settings as the file has them, or the name of a ready provider.
        collection: The collection's name.
        answer: The API: it returns what becomes JSON, or an `ApiAnswer`.
        properties: Those of the credential.

    Attributes:
        records: The objects by their ids, without deleted ones.
        deleted: The ids of deleted objects.
        unreadable: What could not be read.
        requests: All requests, in their order.
        waits: How many seconds the session would have waited, each time.
    """

    def __init__(
        self,
        provider: Mapping[str, Any] | str,
        collection: str,
        answer: Callable[[ApiRequest], Any],
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        slug, settings = provider, None
        if not isinstance(provider, str):
            slug, settings = "api", _settings(provider)
        assert isinstance(slug, str)  # noqa: S101 - of the two
        self.connector: Final[Connector] = connector_of(slug, settings, properties or {})
        self.records: Final[dict[str, Any]] = {}
        self.deleted: Final[set[str]] = set()
        self.unreadable: Final[list[Unreadable]] = []
        self.requests: Final[list[ApiRequest]] = []
        self.waits: Final[list[float]] = []
        self.cursor: Json | None = None
        self._collection: Final = self.connector.collection(collection)
        self._answer: Final = answer
        budget = LocalBudget(sleep=lambda _: None)
        self._session: Final = session_of(self.connector.access, budget, sleep=self.waits.append)
        for scheme in ("https://", "http://"):
            self._session.http.mount(scheme, _Adapter(self._answered))

    def backfill(self) -> None:
        """Read all of the collection."""
        self._job(Kind.BACKFILL)

    def poll(self) -> None:
        """Read what has changed since, and the API's feed of deletes where it has one."""
        self._job(Kind.POLL)
        self._job(Kind.EVENTS)

    def sweep(self) -> None:
        """List all ids: what is missing is deleted, as by a second list that is the same."""
        missing = self.records.keys() - self._job(Kind.SWEEP)
        for key in missing:
            del self.records[key]
        self.deleted.update(missing)

    def check(self) -> None:
        """Try the credential."""
        self.connector.check(self._session)

    def _job(self, kind: Kind) -> set[str]:
        seen: set[str] = set()
        for slice_ in self.connector.plan(self._collection, self.cursor, kind, self._session):
            for page in self.connector.read(self._collection, slice_, self._session):
                self.unreadable.extend(page.unreadable)
                for record in page.records:
                    seen.add(record.upstream_id)
                    if kind is Kind.SWEEP:
                        continue
                    if record.deleted:
                        self.records.pop(record.upstream_id, None)
                        self.deleted.add(record.upstream_id)
                    else:
                        self.records[record.upstream_id] = json.loads(record.data)
                        self.deleted.discard(record.upstream_id)
                if page.cursor is not None:
                    self.cursor = {**(self.cursor or {}), **page.cursor}
        return seen

    def _answered(self, request: requests.PreparedRequest) -> ApiAnswer:
        parts = urlsplit(request.url or "")
        body = request.body or b""
        params = parse_qs(parts.query, keep_blank_values=True)
        asked = ApiRequest(
            request.method or "",
            parts.path,
            {name: values[-1] for name, values in params.items()},
            dict(request.headers),
            body.encode() if isinstance(body, str) else body,
        )
        self.requests.append(asked)
        found = self._answer(asked)
        return found if isinstance(found, ApiAnswer) else ApiAnswer(found)


class _Adapter(BaseAdapter):
    """Answers requests without a network."""

    def __init__(self, answer: Callable[[requests.PreparedRequest], ApiAnswer]) -> None:
        super().__init__()
        self._answer: Final = answer

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        found = self._answer(request)
        response = requests.Response()
        response.status_code = found.status
        response.reason = responses.get(found.status, "")
        response.headers.update({"Content-Type": "application/json", **found.headers})
        body = found.body
        response._content = body if isinstance(body, bytes) else _ANY_JSON.dump_json(body)
        response.url = request.url or ""
        response.request = request
        return response

    def close(self) -> None:
        """Do nothing."""


def _settings(provider: Mapping[str, Any]) -> ProviderSettings:
    type_ = str(provider.get("type"))
    model: type[BaseModel] | None = PROVIDERS.get(type_)
    if model is None:
        raise ValueError(f"type: {provider.get('type')!r} is none of {', '.join(PROVIDERS)}")
    found = model.model_validate(provider)
    assert isinstance(found, ProviderSettings)  # noqa: S101 - it is of PROVIDERS
    return found
