"""The connector whose objects a function of the user's own yields.

It runs in Penstock's process, with no limits: it is as trusted as Penstock.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.config.providers import FlagDeletes, PythonCollection, PythonProvider, Tombstones
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
from penstock.syncs.connectors.lists import ListPage
from penstock.syncs.connectors.reading import CURSOR, Reading, since_of
from penstock.syncs.connectors.records import RecordReader
from penstock.syncs.connectors.templates import filled
from penstock.syncs.errors import SyncError
from penstock.transforms.python_function import described, kind

_PAGE: Final = 500
_ENCODE: Final = msgspec.json.Encoder(decimal_format="number").encode


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What a function is asked for.

    Attributes:
        collection: Its name.
        since: From where a poll reads, as the API writes its cursor; None: all is read.
        kind: `backfill`, `poll` or `sweep`, which needs the ids of all objects.
        session: Makes requests, within the budget: `request`, or `http` for libraries that take a
            session of requests.
        settings: Those of the provider.
        properties: Those of the credential.
    """

    collection: str
    since: str | None
    kind: str
    session: Session
    settings: Mapping[str, Any]
    properties: Mapping[str, Any]


class PythonConnector:
    """Reads what a function or class yields: see `contract.Connector`."""

    def __init__(
        self, provider: str, settings: PythonProvider, properties: Mapping[str, Any]
    ) -> None:
        self._provider: Final = provider
        self._settings: Final = settings
        self._properties: Final = properties
        self._function, self._file = _load(settings.function)

    @property
    def defaults(self) -> Defaults:
        """The budget that the provider's settings allow."""
        return Defaults.allowed_by(self._settings.rate_limit)

    @property
    def access(self) -> Access:
        """How the API is reached; without `auth` the function logs in itself."""
        auth = self._settings.auth
        values = {name: str(value) for name, value in self._properties.items()}
        if auth is not None:
            auth = type(auth).model_validate(filled(auth.model_dump(), values))
        base_url = self._settings.base_url
        return Access(
            None if base_url is None else filled(base_url, values),
            auth,
            self._settings.allow_private,
            tuple(values.values()),
        )

    def collections(self, session: Session | None = None) -> Mapping[str, Collection]:  # noqa: ARG002 - of `Connector`
        """Return the collections that the settings name."""
        return {
            name: Collection(
                name,
                each.key,
                each.incremental.cursor_path if each.incremental else None,
                each.created_path,
                Deletes(each.deletes.type),
                each.incremental.overlap if each.incremental else timedelta(0),
                each.delete_notes,
            )
            for name, each in self._settings.collections.items()
        }

    def collection(self, name: str) -> Collection:
        """Return a collection that the settings name."""
        self._of(name)
        return self.collections()[name]

    def plan(
        self,
        collection: Collection,
        cursor: Json | None,
        kind: Kind,
        session: Session,  # noqa: ARG002 - Connector
    ) -> Sequence[Slice]:
        """Return one slice."""
        if kind is Kind.EVENTS:
            return []
        since = None
        if kind is Kind.POLL:
            since = since_of(self._of(collection.name).incremental, cursor, CURSOR)
        return [Slice(kind, {} if since is None else {"since": since})]

    def read(self, collection: Collection, slice_: Slice, session: Session) -> Iterator[Page]:
        """Yield what the function yields."""
        settings = self._of(collection.name)
        deletes = settings.deletes
        reads = RecordReader(
            settings.key,
            settings.incremental,
            created_path=settings.created_path,
            tombstone=deletes if isinstance(deletes, Tombstones | FlagDeletes) else None,
        )
        lists = _Yielded(self, collection.name, slice_.kind)
        return Reading(lists, reads, settings.incremental, slice_, session).pages()

    def check(self, session: Session) -> None:
        """Ask the function for its first objects, or call its `check`."""
        own = getattr(self._function, "check", None)
        name = next(iter(self._settings.collections))
        request = self._request(name, None, Kind.BACKFILL, session)
        with _Failures(self._settings.function, self._file):
            if own is not None:
                own(request)
            else:
                next(iter(self._function(request)), None)

    def yielded(
        self, name: str, since: str | None, kind_: Kind, session: Session
    ) -> Iterator[list[msgspec.Raw]]:
        """Yield the pages of the function, as JSON."""
        request = self._request(name, since, kind_, session)
        spec = self._settings.function
        page: list[msgspec.Raw] = []
        with _Failures(spec, self._file):
            found = self._function(request)
            if found is None or isinstance(found, str | bytes | Mapping):
                raise SyncError(
                    "connector", f"{spec} returns {kind(found)}: expected objects, yielded."
                )
            for each in found:
                if isinstance(each, list | tuple):
                    if page:
                        yield page
                    page = []
                    yield [_encoded(one, spec) for one in each]
                    continue
                page.append(_encoded(each, spec))
                if len(page) >= _PAGE:
                    yield page
                    page = []
        if page:
            yield page

    def _request(self, name: str, since: str | None, kind_: Kind, session: Session) -> ReadRequest:
        return ReadRequest(
            name, since, kind_.value, session, self._settings.settings, self._properties
        )

    def _of(self, name: str) -> PythonCollection:
        try:
            return self._settings.collections[name]
        except KeyError:
            raise SyncError(
                "connector",
                f"Provider {self._provider} has no collection {name!r}.",
                remedy=f"It has: {', '.join(sorted(self._settings.collections))}.",
            ) from None


class _Yielded:
    """A function's objects, as pages; a slice that breaks off is read again from its beginning."""

    def __init__(self, connector: PythonConnector, name: str, kind_: Kind) -> None:
        self._connector: Final = connector
        self._name: Final = name
        self._kind: Final = kind_

    def pages(self, session: Session, since: str | None, resume: Json | None) -> Iterator[ListPage]:  # noqa: ARG002 - of `RecordReader`
        for page in self._connector.yielded(self._name, since, self._kind, session):
            yield ListPage(page, {})
        yield ListPage([], None)


class _Failures:
    """Raises what the user's code raises as a `SyncError`, with its line."""

    def __init__(self, spec: str, file: str) -> None:
        self._spec: Final = spec
        self._file: Final = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, SyncError) or not isinstance(error, Exception):
            return
        reason = described(error, self._file)
        raise SyncError(
            "connector", f"{self._spec} fails: {reason}.", remedy="Repair the function."
        ) from None


def _load(spec: str) -> tuple[Callable[[ReadRequest], Any], str]:
    name, _, path = spec.rpartition(":")
    try:
        if name.endswith(".py"):
            module_spec = importlib.util.spec_from_file_location(Path(name).stem, name)
            if module_spec is None or module_spec.loader is None or not Path(name).is_file():
                raise SyncError("connector", f"{spec}: there is no file {name}.")
            module = importlib.util.module_from_spec(module_spec)
            module_spec.loader.exec_module(module)
        else:
            module = importlib.import_module(name)
    except SyncError:
        raise
    except Exception as error:  # of the user's own code, whatever its class
        raise SyncError(
            "connector",
            f"{spec}: the module can't be imported: {described(error, None)}.",
            remedy="Install it where Penstock and its executors run, or add its folder to PYTHONPATH.",
        ) from None
    found: Any = getattr(module, path, None)
    if found is None or not callable(found):
        known = sorted(n for n, v in vars(module).items() if callable(v) and n[0] != "_")
        raise SyncError(
            "connector",
            f"{spec}: the module has no function {path!r}; it has: {', '.join(known[:8]) or 'none'}.",
        )
    if inspect.isclass(found):
        found = found()
        if not callable(getattr(found, "read", None)):
            raise SyncError("connector", f"{spec}: the class has no method read(request).")
        return _OfClass(found), getattr(module, "__file__", None) or name
    if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
        raise SyncError(
            "connector", f"{spec}: it is async: expected a function that yields objects."
        )
    return found, getattr(module, "__file__", None) or name


class _OfClass:
    def __init__(self, made: Any) -> None:
        self._made: Final = made
        self.check: Final = getattr(made, "check", None)

    def __call__(self, request: ReadRequest) -> Any:
        return self._made.read(request)


def _encoded(value: Any, spec: str) -> msgspec.Raw:
    """Return an object as JSON; text and bytes are JSON already."""
    if isinstance(value, bytes):
        return msgspec.Raw(value)
    if isinstance(value, str):
        return msgspec.Raw(value.encode())
    if not isinstance(value, Mapping):
        raise SyncError(
            "connector", f"{spec} yields {kind(value)}: expected a dict, or a list of them."
        )
    try:
        return msgspec.Raw(_ENCODE(value))
    except OverflowError:  # whole numbers of more than 64 bits
        return msgspec.Raw(json.dumps(value, ensure_ascii=False).encode())
