"""Stripe: lists have no filter by change, so that polls read the events.

A list is read newest first, in an order that changes do not move. An event holds its object as it was
then; of several events of an object in a slice the newest counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from penstock.syncs.connectors.contract import (
    Collection,
    Json,
    Kind,
    Page,
    Record,
    Session,
    Slice,
    Unreadable,
)
from penstock.syncs.connectors.objects import Fields, excerpt, scalar
from penstock.syncs.connectors.reading import CURSOR
from penstock.syncs.connectors.rest import RestConnector
from penstock.syncs.errors import SyncError

_WINDOW: Final = timedelta(hours=6)
_KEPT: Final = timedelta(days=29)
"""Stripe keeps events for 30 days."""
_LIMIT: Final = 100
_NEVER: Final = datetime.min.replace(tzinfo=UTC)
_TYPES: Final = {
    "customers": ("customer.*", "customer"),
    "subscriptions": ("customer.subscription.*", "subscription"),
    "invoices": ("invoice.*", "invoice"),
    "charges": ("charge.*", "charge"),
    "products": ("product.*", "product"),
    "prices": ("price.*", "price"),
}
_DELETES: Final = frozenset(
    {"customer.deleted", "invoice.deleted", "product.deleted", "price.deleted"}
)
"""`customer.subscription.deleted` is none: the subscription stays, canceled."""
_EVENT: Final = Fields(["id", "type", "created", "data.object"])
_OBJECT: Final = Fields(["id", "object", "created"])


class _Answer(msgspec.Struct):
    data: list[msgspec.Raw]
    has_more: bool = False


class StripeConnector(RestConnector):
    """Reads lists once, and then events."""

    def plan(
        self, collection: Collection, cursor: Json | None, kind: Kind, session: Session
    ) -> Sequence[Slice]:
        """Return the list, or the hours that have passed since the cursor."""
        since = (cursor or {}).get(CURSOR)
        if kind is Kind.EVENTS:
            return []
        if kind is Kind.SWEEP:
            return [Slice(kind)]
        if kind is Kind.BACKFILL or since is None:
            # Events count from here on, by the API's clock, which the request shows. The plan is stored
            # before the list is read: what is deleted between its first page and a kill is among them.
            self._get(session, "v1/events", {"limit": 1, **self.event_filter(collection.name)})
            return [Slice(kind, {"began": _epoch(session.now) - 1})]
        start = datetime.fromtimestamp(int(since), UTC) - collection.overlap
        now = session.now
        if now - start > _KEPT:
            return [Slice(kind, {"began": _epoch(now) - 1})]
        slices: list[Slice] = []
        while now - start > _WINDOW:
            slices.append(Slice(kind, {"from": _epoch(start), "to": _epoch(start + _WINDOW)}))
            start += _WINDOW
        return [*slices, Slice(kind, {"from": _epoch(start)})]

    def read(self, collection: Collection, slice_: Slice, session: Session) -> Iterator[Page]:
        """Yield the pages of a list, or the objects of a slice's events."""
        if "from" in slice_.of:
            yield self._changed(collection.name, slice_.of, session)
        else:
            yield from self._listed(collection.name, slice_, session)

    def event_filter(self, name: str) -> Json:
        """Return the parameters by which Stripe gives the events of a collection."""
        return {"type": _TYPES[name][0]}

    def _listed(self, name: str, slice_: Slice, session: Session) -> Iterator[Page]:
        params = dict(self._of(name).params)
        resume = slice_.resume or {}
        if "after" in resume:
            params["starting_after"] = resume["after"]
        while True:
            try:
                answer = self._get(session, f"v1/{name}", params)
            except SyncError as error:
                if error.code not in {"refused", "not_found"} or "after" not in resume:
                    raise
                # The last object that was read is gone: from those of its second on.
                params.pop("starting_after", None)
                params["created[lte]"] = resume["created"]
                resume = {}
                continue
            records: list[Record] = []
            unreadable: list[Unreadable] = []
            for each in answer.data:
                found = _record(each, None)
                (records if isinstance(found, Record) else unreadable).append(found)  # type: ignore[arg-type]  # the list is the type's
            if slice_.kind is Kind.SWEEP and unreadable:
                raise SyncError("bad_response", f"An object can't be read: {unreadable[0].reason}.")
            if not answer.has_more or not answer.data:
                cursor = None if slice_.kind is Kind.SWEEP else {CURSOR: slice_.of["began"]}
                yield Page(records, unreadable, cursor=cursor, is_last=True)
                return
            last, _, created = _OBJECT.read(answer.data[-1])
            after = scalar(last)
            if after is None or after == params.get("starting_after"):
                raise SyncError("bad_response", f"Stripe's list of {name} does not end.")
            params["starting_after"] = after
            resume = {"after": after, "created": scalar(created)}
            yield Page(records, unreadable, resume)

    def _changed(self, name: str, of: Json, session: Session) -> Page:
        object_name = _TYPES[name][1]
        params: Json = {"limit": _LIMIT, **self.event_filter(name), "created[gte]": of["from"]}
        if "to" in of:
            params["created[lt]"] = of["to"]
        newest: dict[str, Record] = {}
        unreadable: list[Unreadable] = []
        until: int | None = None
        while True:
            answer = self._get(session, "v1/events", params)
            if until is None:
                until = _epoch(session.now) - 1
            event: str | None = None
            for each in answer.data:
                raw_id, raw_type, raw_created, raw_object = _EVENT.read(each)
                event = scalar(raw_id)
                found = _record(
                    raw_object or b"{}", raw_created, deleted=scalar(raw_type) in _DELETES
                )
                if isinstance(found, Unreadable):
                    unreadable.append(found)
                elif scalar(_OBJECT.read(raw_object)[1]) == object_name:
                    _note(newest, found)
            if not answer.has_more or event is None:
                break
            params["starting_after"] = event
        end = max(min(of.get("to", until), until), of["from"])
        records = sorted(newest.values(), key=lambda each: each.updated_at or _NEVER)
        return Page(records, unreadable, cursor={CURSOR: end}, is_last=True)

    def _get(self, session: Session, path: str, params: Json) -> _Answer:
        response = session.request("GET", f"{self.access.origin}/{path}", params=params)
        try:
            return msgspec.json.decode(response.content, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SyncError(
                "bad_response", f"Stripe's answer to {path} is no list: {error}."
            ) from None


def _note(newest: dict[str, Record], found: Record) -> None:
    """Keep the newest of an object's events; a deleted one never comes back."""
    known = newest.get(found.upstream_id)
    if known is not None:
        if known.deleted:
            return
        is_newer = (found.updated_at or _NEVER) > (known.updated_at or _NEVER)
        # Of one second the first counts: Stripe lists the newest first.
        if not (found.deleted or is_newer):
            return
    newest[found.upstream_id] = found


def _record(
    raw: bytes | msgspec.Raw, changed: bytes | None, *, deleted: bool = False
) -> Record | Unreadable:
    """Return an object as a record; `changed` is when its event came about."""
    try:
        raw_id, _, raw_created = _OBJECT.read(raw)
        upstream_id = scalar(raw_id)
        created, updated = _time(raw_created), _time(changed or b"")
    except ValueError as error:
        return Unreadable(str(error), excerpt(raw))
    if not upstream_id:
        return Unreadable("it lacks its key id", excerpt(raw))
    return Record(upstream_id, b"" if deleted else bytes(raw), created, updated, deleted)


def _time(raw: bytes) -> datetime | None:
    text = scalar(raw)
    return None if text is None else datetime.fromtimestamp(int(text), UTC)


def _epoch(time: datetime) -> int:
    return int(time.timestamp())
