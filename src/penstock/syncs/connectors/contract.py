"""What a connector is: it plans slices of a collection, and reads them page by page.

A connector does no scheduling, keeps no state and writes nothing. It is made anew wherever it is
needed, from the provider's settings and a credential's properties. Requests go through a `Session`,
which has the budget, the retries and the login.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol, Self

import msgspec
import requests

from penstock.config.api_logins import Auth
from penstock.config.providers import RateDefaults
from penstock.syncs.errors import SyncError
from penstock.syncs.tokens import TokenKeeper

Json = dict[str, Any]
"""A small JSON object: a cursor, a slice or a resume token."""


class Deletes(StrEnum):
    """How a collection's deletes are seen."""

    TOMBSTONE = "tombstone"
    """The API lists deleted objects as such, beside the others."""
    FLAG = "flag"
    """A field of the object says that it is deleted, or archived."""
    EVENTS = "events"
    """The API has a feed of events, which names deleted objects."""
    SWEEP = "sweep"
    """All ids are listed from time to time: what is missing is deleted."""
    NONE = "none"
    """The API does not show them."""


class Kind(StrEnum):
    """What a job does with a collection."""

    BACKFILL = "backfill"
    """Reads all of it, from the beginning."""
    POLL = "poll"
    """Reads what has changed since the cursor."""
    EVENTS = "events"
    """Reads the API's feed of events for deletes."""
    SWEEP = "sweep"
    """Lists all ids, completely."""


@dataclass(frozen=True, slots=True)
class Collection:
    """One collection of a provider.

    Attributes:
        name: Its name, without the provider.
        key: The field, or the fields joined, that identify an object.
        cursor_field: The field by which it is polled; None: each poll reads all.
        created_field: The field that has when the object was made.
        deletes: How its deletes are seen.
        overlap: How far a poll reads back behind the cursor.
        delete_notes: Which deletes the API does not report, in a sentence; empty where it reports all.
    """

    name: str
    key: tuple[str, ...] = ("id",)
    cursor_field: str | None = None
    created_field: str | None = None
    deletes: Deletes = Deletes.NONE
    overlap: timedelta = timedelta(seconds=60)
    delete_notes: str = ""


class Record(msgspec.Struct, frozen=True):
    """An object of the API. `data` is its JSON as it came; `deleted`: it is a tombstone of one.

    A tombstone may have no `data` of its own: then it is empty, and the last known one stays.
    """

    upstream_id: str
    data: bytes
    created_at: datetime | None = None
    updated_at: datetime | None = None
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that can't be read: a dead letter. `text` is the beginning of what came."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """What one answer of the API holds.

    Attributes:
        records: The objects; in a sweep only their ids count.
        unreadable: What could not be read.
        resume: From where the slice goes on behind this page; None: from its beginning. Where it is that
            of the page before, this page is read again.
        cursor: What the collection's cursor becomes once all pages of the slice up to this one are
            written; None where this page does not move it. Its members replace those of the same
            names, and the others stay: polls and feeds of deletes have members of their own.
        is_last: Whether the slice ends with it.
    """

    records: Sequence[Record]
    unreadable: Sequence[Unreadable] = ()
    resume: Json | None = None
    cursor: Json | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a collection that one job reads; `of` is the connector's own, small and JSON.

    `resume` is from where it goes on, as a `Page` had it.
    """

    kind: Kind
    of: Json = field(default_factory=dict)
    resume: Json | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a provider allows a credential where the user sets nothing."""

    allowed_requests: int = 10
    interval: timedelta = timedelta(seconds=1)
    max_concurrent_requests: int = 4

    @classmethod
    def allowed_by(cls, limit: RateDefaults) -> Self:
        """Return what a provider's settings allow."""
        return cls(limit.allowed_requests, limit.interval, limit.max_concurrent_requests)


@dataclass(frozen=True, slots=True)
class Access:
    """How a session reaches a provider; its settings have the credential's properties already.

    `origin` is the URL that alone gets the login; None: no login. `rotates`: the login replaces its
    own refresh token.
    """

    origin: str | None = None
    auth: Auth | None = None
    allow_private: bool = False
    secrets: tuple[str, ...] = ()
    rotates: bool = False


class Session(Protocol):
    """Does a connector's requests, within its credential's budget.

    It waits for the budget, signs in, retries what is transient, and raises `SyncError` for all else.
    """

    def request(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> requests.Response:
        """Return a successful response; raises `SyncError`."""

    def exchange(
        self, request: requests.PreparedRequest
    ) -> tuple[requests.Response | None, SyncError | None]:
        """Send a request once as it is, without a login; return the answer, and what is wrong with it.

        For those who sign in and try again by themselves; without an answer there is an error.
        """

    def wait(self, seconds: float) -> None:
        """Wait, unless the run ends."""

    @property
    def http(self) -> requests.Session:
        """The same as a session of requests, for libraries that take one: each of its requests obeys."""

    @property
    def tokens(self) -> TokenKeeper:
        """What keeps the credential's tokens of OAuth, for those who sign in by themselves."""

    @property
    def now(self) -> datetime:
        """The time, by the API's own clock where its answers show that (`Date`)."""


class Connector(Protocol):
    """Reads one provider. Its methods may make requests, and raise `SyncError`."""

    @property
    def defaults(self) -> Defaults:
        """The budget that the provider's documentation allows."""

    @property
    def access(self) -> Access:
        """How its API is reached: `make.session_of` makes a session of it."""

    def collections(self, session: Session | None = None) -> Mapping[str, Collection]:
        """Return the collections by name; those that the API must be asked for only with a session."""

    def collection(self, name: str) -> Collection:
        """Return a collection by its name, also one that the API must be asked for."""

    def plan(
        self, collection: Collection, cursor: Json | None, kind: Kind, session: Session
    ) -> Sequence[Slice]:
        """Return the slices of a job, in the order in which they move the cursor."""

    def read(self, collection: Collection, slice_: Slice, session: Session) -> Iterator[Page]:
        """Yield the pages of a slice, from where it resumes."""

    def check(self, session: Session) -> None:
        """Make one harmless request, which needs the credential."""
