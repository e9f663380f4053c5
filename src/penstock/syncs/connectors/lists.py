"""Lists of a REST API, read page by page: what comes, and from where the reading goes on.

Pages are those of dlt's paginators. Where an API sorts by the cursor, each page is asked for by the
cursor of the one before as soon as that has moved: pages that are counted shift when an object changes
meanwhile, and one would be missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import requests

from penstock.config.paginators import Keyset, Paginator
from penstock.config.providers import Endpoint, Incremental, RestProvider
from penstock.syncs.connectors.contract import Json, Session
from penstock.syncs.connectors.cursors import CursorFormat
from penstock.syncs.connectors.objects import Fields, items, key_of, scalar
from penstock.syncs.connectors.templates import filled, uses
from penstock.syncs.errors import SyncError

_CURSORS: Final = ("cursor", "cursor_unix", "cursor_unix_ms", "cursor_iso")
_STABLE: Final = frozenset({"single_page", "cursor", "header_cursor"})
"""Paginators whose pages do not shift."""
_MOST_SHIFTS: Final = 20


class _ShiftedError(Exception):
    """The objects of a list have moved while it was read: it is read again."""


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page: its objects, and from where the next is read; None: it is the last.

    It is empty where the next can only be read behind this one.
    """

    objects: Sequence[msgspec.Raw]
    resume: Json | None


class ListReader:
    """Reads one list.

    Args:
        provider: Where the API is.
        endpoint: The request.
        incremental: The cursor that `{cursor}` in the request stands for.
        key: The fields of an object's id.
        values: What `{name}` stands for.
        hidden: A parameter that logs in, and stands in no resume token.
    """

    def __init__(
        self,
        provider: RestProvider,
        endpoint: Endpoint,
        incremental: Incremental | None,
        key: Sequence[str],
        values: Mapping[str, Any],
        hidden: str | None = None,
    ) -> None:
        self._provider: Final = provider
        self._endpoint: Final = endpoint
        self._incremental: Final = incremental
        self._format: Final = CursorFormat(incremental.format) if incremental else None
        self._key: Final = tuple(key)
        self._values: Final = dict(values)
        self._hidden: Final = hidden
        chosen = endpoint.paginator or provider.paginator
        assert chosen is not None  # noqa: S101 - the provider's model requires one
        self._paginator: Final[Paginator] = chosen
        paths = [*key, *([incremental.cursor_path] if incremental else [])]
        self._fields: Final = Fields(paths)
        asks = (endpoint.path, endpoint.params, endpoint.json_body)
        self._restarts: Final = (
            incremental is not None
            and incremental.order == "ascending"
            and any(uses(each, *_CURSORS) for each in asks)
            and (chosen.type not in _STABLE if incremental.restart is None else incremental.restart)
        )

    def pages(self, session: Session, since: str | None, resume: Json | None) -> Iterator[ListPage]:
        """Yield the pages from the cursor `since`, or from where `resume` says."""
        if since is None and self._incremental is not None:
            since = self._incremental.initial_value
        if isinstance(self._paginator, Keyset):
            yield from self._by_key(session, self._paginator, since, resume)
            return
        at = resume["at"] if resume else since
        request = resume.get("request") if resume else None
        seen: set[bytes] = set()
        shifts = 0
        while True:
            moved: str | None = None
            try:
                for answer in self._resumed(session, at, request):
                    _refuse_repetition(seen, answer)
                    moved = self._moved(at, answer) if answer.resume else None
                    if moved is not None:
                        yield ListPage(answer.objects, {"at": moved})
                        break
                    yield answer
            except _ShiftedError:
                shifts += 1
                if shifts > _MOST_SHIFTS:
                    raise SyncError(
                        "bad_response",
                        "Objects change faster than their pages can be read: these shift each time.",
                        remedy="Page by a token or by keyset, where the API allows it.",
                        transient=True,
                    ) from None
                seen.clear()
                request = None
                continue
            if moved is None:
                return
            at, request = moved, None

    def _resumed(
        self, session: Session, at: str | None, request: Json | None
    ) -> Iterator[ListPage]:
        """Yield pages; from the beginning where the API does not know any more where it was."""
        answers = self._paged(session, at, request)
        try:
            first = next(answers, None)
        except SyncError as error:
            if request is None or error.code not in {"refused", "not_found"}:
                raise
            yield from self._paged(session, at, None)
            return
        if first is not None:
            yield first
            yield from answers

    def _moved(self, at: str | None, answer: ListPage) -> str | None:
        """Return the cursor by which to ask for what follows, None where the paginator goes on."""
        if not self._restarts or self._format is None:
            return None
        newest = None
        for each in answer.objects:
            try:
                text = scalar(self._fields.read(each)[-1])
                value = None if text is None else self._format.parse(text)
            except ValueError:
                continue
            if value is not None and (newest is None or value > newest[0]):  # type: ignore[operator]  # of one format
                newest = value, text
        if newest is None or newest[1] is None:
            return None
        below = self._format.just_before(newest[1])
        if at is not None and self._format.parse(below) <= self._format.parse(at):  # type: ignore[operator]  # of one format
            return None
        return below

    def _by_key(
        self, session: Session, settings: Keyset, since: str | None, resume: Json | None
    ) -> Iterator[ListPage]:
        at, key = (resume["at"], resume["key"]) if resume else (since, settings.initial_key)
        while True:
            request = self._request(at, key)
            response = session.request(
                request["method"],
                request["url"],
                params=request["params"],
                json=request["json"],
                headers=self._headers(),
            )
            objects = items(response.content, self._endpoint.data_selector)
            if len(objects) < settings.limit:
                yield ListPage(objects, None)
                return
            *parts, cursor = self._fields.read(objects[-1])
            try:
                following = scalar(cursor) or at, key_of(parts, self._key)
            except ValueError as error:
                raise SyncError("bad_response", f"The last object of a page: {error}.") from None
            if following == (at, key):
                raise _stuck(f"from {at}, {key}")
            at, key = following
            yield ListPage(objects, {"at": at, "key": key})

    def _paged(self, session: Session, at: str | None, resume: Json | None) -> Iterator[ListPage]:
        from penstock.syncs.connectors.paginators import client, paginator  # noqa: PLC0415 - 0.5 s

        request = self._request(at, None)
        pager = paginator(self._paginator, resume, self._endpoint.data_selector)
        pages = client(session, request["url"], self._headers()).paginate(
            path=request["url"],
            method=request["method"],
            params=request["params"],
            json=request["json"],
            paginator=pager,
            data_selector=self._endpoint.data_selector,
        )
        anchor: str | None = resume.get("anchor") if resume else None
        try:
            for page in pages:
                objects = list(page)
                if anchor is not None and (not objects or self._id(objects[0]) != anchor):
                    raise _ShiftedError
                following = None
                if pager.has_next_page:
                    anchor = self._id(objects[-1]) if pager.steps_back else None
                    state = pager.state(page.request, self._hidden)
                    following = {"at": at, "request": {**state, "anchor": anchor}}
                yield ListPage(objects, following)
        except ValueError as error:
            # Its text may hold the whole answer.
            raise SyncError(
                "bad_response",
                f"The answer does not have what the paginator {self._paginator.type} needs "
                f"({type(error).__name__}).",
                remedy="Compare the paginator's paths with what the API answers.",
            ) from None
        except requests.exceptions.RequestException as error:
            raise SyncError(
                "refused", f"The next page can't be asked for: {type(error).__name__}."
            ) from None

    def _id(self, raw: msgspec.Raw) -> str | None:
        try:
            return key_of(self._fields.read(raw)[: len(self._key)], self._key)
        except ValueError:
            return None

    def _request(self, at: str | None, key: str | None) -> Json:
        values: dict[str, Any] = dict(self._values)
        if at is not None and self._format is not None:
            values |= self._format.forms(at)
        if key is not None:
            values["key"] = key
        path = filled(self._endpoint.path, values)
        if path is None:
            raise SyncError(
                "connector",
                f"The path {self._endpoint.path} holds a cursor, and there is none at first.",
                remedy="Give incremental an initial_value.",
            )
        return {
            "method": self._endpoint.method,
            "url": joined(filled(self._provider.base_url, values), path),
            "params": filled(self._endpoint.params, values),
            "json": filled(self._endpoint.json_body, values),
        }

    def _headers(self) -> dict[str, str]:
        found: dict[str, str] = filled(
            {**self._provider.headers, **self._endpoint.headers}, self._values
        )
        return found


def joined(base: str, path: str) -> str:
    """Return a path behind the base URL; a whole URL stays as it is."""
    if path.startswith(("http://", "https://")):
        return path
    return f"{base.rstrip('/')}/{path.lstrip('/')}"


def _refuse_repetition(seen: set[bytes], answer: ListPage) -> None:
    """Raise `SyncError` if the API gives the same page again and again."""
    if answer.resume is None:
        return
    mark = msgspec.json.encode([answer.resume.get("at"), answer.resume.get("request")])
    if mark in seen:
        raise _stuck("the next page is one that has been read")
    seen.add(mark)


def _stuck(where: str) -> SyncError:
    return SyncError(
        "bad_response",
        f"The pages do not end: {where}.",
        remedy="Compare the paginator with the API's documentation.",
    )


def values_of(properties: Mapping[str, Any], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return what `{name}` stands for."""
    return {**defaults, **{name: str(value) for name, value in properties.items()}}
