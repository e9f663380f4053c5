"""The connector of a REST API that settings describe: `config.providers.RestProvider`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from penstock.config.api_logins import ApiKey
from penstock.config.providers import (
    ANY,
    EventDeletes,
    FlagDeletes,
    Incremental,
    RestCollection,
    RestProvider,
    Tombstones,
)
from penstock.syncs.connectors.contract import (
    Access,
    Collection,
    Defaults,
    Deletes,
    Json,
    Kind,
    Page,
    Session,
    Slice,
)
from penstock.syncs.connectors.lists import ListReader, joined, values_of
from penstock.syncs.connectors.reading import CURSOR, DELETES_CURSOR, Reading, since_of
from penstock.syncs.connectors.records import RecordReader
from penstock.syncs.connectors.templates import filled
from penstock.syncs.errors import SyncError


class RestConnector:
    """Reads a REST API: see `contract.Connector`."""

    def __init__(
        self, provider: str, settings: RestProvider, properties: Mapping[str, Any]
    ) -> None:
        self._provider: Final = provider
        self._settings: Final = settings
        self._values: Final = values_of(properties, settings.properties)
        self._secrets: Final = tuple(str(value) for value in properties.values())

    @property
    def defaults(self) -> Defaults:
        """The budget that the provider's settings allow."""
        return Defaults.allowed_by(self._settings.rate_limit)

    @property
    def access(self) -> Access:
        """How the API is reached."""
        auth = self._settings.auth
        if auth is not None:
            auth = type(auth).model_validate(filled(auth.model_dump(), self._values))
        return Access(
            filled(self._settings.base_url, self._values),
            auth,
            self._settings.allow_private,
            tuple(_secrets(auth.model_dump()) if auth is not None else self._secrets),
        )

    def collections(self, session: Session | None = None) -> Mapping[str, Collection]:  # noqa: ARG002 - of `Connector`
        """Return the collections; one named `*` stands for all others."""
        return {
            name: _described(name, settings)
            for name, settings in self._settings.collections.items()
            if name != ANY
        }

    def collection(self, name: str) -> Collection:
        """Return a collection, which may be one of those that `*` stands for."""
        return _described(name, self._of(name))

    def plan(
        self,
        collection: Collection,
        cursor: Json | None,
        kind: Kind,
        session: Session,  # noqa: ARG002 - of `Connector`
    ) -> Sequence[Slice]:
        """Return one slice: pages of a list depend on one another."""
        settings = self._of(collection.name)
        if kind is Kind.EVENTS:
            if not isinstance(settings.deletes, EventDeletes):
                return []
            since = since_of(settings.deletes.incremental, cursor, DELETES_CURSOR)
        elif kind is Kind.POLL:
            since = since_of(settings.incremental, cursor, CURSOR)
        else:
            since = None
        return [Slice(kind, {} if since is None else {"since": since})]

    def read(self, collection: Collection, slice_: Slice, session: Session) -> Iterator[Page]:
        """Yield the pages of a slice."""
        lists, incremental, settings = self._lists(collection.name, slice_.kind, session)
        deletes = settings.deletes
        if slice_.kind is Kind.EVENTS and isinstance(deletes, EventDeletes):
            reads = RecordReader((deletes.key_path,), incremental, all_deleted=True)
        else:
            reads = RecordReader(
                settings.key,
                incremental,
                created_path=settings.created_path,
                tombstone=deletes if isinstance(deletes, Tombstones | FlagDeletes) else None,
                exclude_path=settings.exclude_path,
            )
        return Reading(lists, reads, incremental, slice_, session).pages()

    def check(self, session: Session) -> None:
        """Ask for one page, or what `check` names."""
        check = self._settings.check_request
        if check is not None:
            url = joined(
                filled(self._settings.base_url, self._values), filled(check.path, self._values)
            )
            headers = filled(self._settings.headers, self._values)
            session.request("GET", url, params=filled(check.params, self._values), headers=headers)
            return
        collections = self.collections()
        if not collections:
            raise SyncError(
                "connector",
                f"Provider {self._provider} has nothing by which to check a credential.",
                remedy="Give it check: with a path.",
            )
        first = next(iter(collections.values()))
        next(iter(self.read(first, Slice(Kind.BACKFILL), session)), None)

    def described(self, name: str, session: Session) -> Mapping[str, Any]:  # noqa: ARG002 - of `Connector`
        """Return what `{name}` stands for beside the properties, as the API names it."""
        return {}

    def _of(self, name: str) -> RestCollection:
        known = self._settings.collections
        found = known.get(name) or known.get(ANY)
        if found is None:
            raise SyncError(
                "connector",
                f"Provider {self._provider} has no collection {name!r}.",
                remedy=f"It has: {', '.join(sorted(known))}.",
            )
        return found

    def _lists(
        self, name: str, kind: Kind, session: Session
    ) -> tuple[ListReader, Incremental | None, RestCollection]:
        """Return what lists a collection, and by which cursor."""
        settings = self._of(name)
        values = {**self._values, **self.described(name, session), "collection": name}
        auth = self._settings.auth
        in_query = isinstance(auth, ApiKey) and auth.location == "query"
        hidden = auth.name if in_query and isinstance(auth, ApiKey) else None
        incremental = settings.incremental
        key = settings.key
        if kind is Kind.EVENTS and isinstance(settings.deletes, EventDeletes):
            incremental, key = settings.deletes.incremental, (settings.deletes.key_path,)
            endpoint: Any = settings.deletes
        elif kind is Kind.SWEEP and settings.sweep is not None:
            endpoint = settings.sweep
        else:
            endpoint = settings
        found = ListReader(self._settings, endpoint, incremental, key, values, hidden)
        return found, incremental, settings


def _described(name: str, settings: RestCollection) -> Collection:
    incremental = settings.incremental
    return Collection(
        name,
        settings.key,
        incremental.cursor_path if incremental else None,
        settings.created_path,
        Deletes(settings.deletes.type),
        incremental.overlap if incremental else timedelta(0),
        settings.delete_notes,
    )


def _secrets(auth: Mapping[str, Any]) -> Iterator[str]:
    public = {"type", "name", "location", "username", "client_id", "access_token_url"}
    for name, value in auth.items():
        if isinstance(value, str) and name not in public:
            yield value
