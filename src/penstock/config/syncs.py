"""Syncs, the credentials that they sign in with, and where records are kept.

A sync copies collections of a provider into the records table. What is copied follows from the
configuration alone; how far a sync is stands in the store.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator

from penstock.config.durations import Duration, parse
from penstock.config.sources import PostgresUrl
from penstock.config.strict import Name, Number, StrictModel, Whole

CONTINUOUS: Final = timedelta(0)
"""The `frequency` of a sync that polls again as soon as it has read all."""
_COLLECTION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_PROPERTY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")
_METADATA_BYTES: Final = 1 << 16

DEFAULT_RECORDS_SUBJECT: Final = (
    "sequin-records.default.{sync_id}.{provider}.{collection_id}.{upstream_id}"
)
DEFAULT_EVENTS_SUBJECT: Final = (
    "sequin-events.default.{sync_id}.{provider}.{collection_id}.{upstream_id}.{event_type}"
)


def _frequency(value: Any) -> timedelta:
    if value == "continuous":
        return CONTINUOUS
    if isinstance(value, timedelta) and value == CONTINUOUS:
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{error}; or continuous") from None


def check_collection(text: str) -> str:
    """Return `text` if it can name a collection, with its provider or without; raises `ValueError`."""
    provider, colon, name = text.rpartition(":")
    if not _COLLECTION.match(name) or (colon and not _COLLECTION.match(provider)):
        raise ValueError(
            f"{text!r} is no collection: expected its name, or provider:name as in stripe:customers"
        )
    return text


def _texts(value: Any) -> Any:
    # Users do not quote account numbers in YAML.
    if not isinstance(value, dict):
        return value
    return {
        key: str(each) if isinstance(each, int | float) and not isinstance(each, bool) else each
        for key, each in value.items()
    }


Frequency = Annotated[timedelta, BeforeValidator(_frequency)]
"""A duration, or `continuous`."""
Metadata = dict[str, Any]
"""What users keep with an entity; Penstock does not read it."""


class RateLimit(StrictModel):
    """How many requests a credential may make, by all that use it together."""

    allowed_requests: Whole = Field(ge=1, le=1_000_000)
    """How many requests may begin in each interval."""
    interval: Duration = timedelta(seconds=1)
    """The length of an interval."""
    max_concurrent_requests: Whole = Field(4, ge=1, le=1_000)
    """How many requests may be under way at once."""


class Credential(StrictModel):
    """What a provider's API asks for at a login; syncs name it, and none restarts when it is rotated."""

    provider: Name
    """The provider that it is for."""
    properties: Annotated[dict[str, SecretStr], BeforeValidator(_texts)] = Field(
        default_factory=dict
    )
    """What the provider asks for, such as `api_key`, by name."""
    metadata: Metadata = Field(default_factory=dict)
    """What you keep with it; it is shown as it is."""

    @field_validator("properties")
    @classmethod
    def _check_properties(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, text in value.items():
            if not _PROPERTY.match(name):
                raise ValueError(
                    f"{name!r} is no property's name: expected letters, digits and `_`"
                )
            if not text.get_secret_value():
                raise ValueError(f"{name} is empty: give its value, or leave it out")
        return value


class Sync(StrictModel):
    """A copy of collections of a SaaS API, kept up by polling."""

    provider: Name
    """The provider that it reads: a ready one, or one of `providers`."""
    collections: tuple[str, ...]
    """What is copied: names of the provider's collections."""
    credential: Name
    """The credential that it signs in with."""
    frequency: Frequency = timedelta(minutes=1)
    """How often it polls: a duration, or `continuous`."""
    sweep_interval: Duration = timedelta(hours=1)
    """How often all ids are listed, of collections whose deletes show in no other way."""
    rate_limit: RateLimit | None = None
    """The budget of its credential; that of the provider if unset, and the least of several syncs."""
    max_age_days: Whole | None = Field(None, ge=1, le=36_500)
    """How old an object may be that a backfill reads; any age if unset."""
    status: Literal["active", "disabled"] = "active"
    """A disabled sync does nothing, and keeps its records and cursors."""
    max_deleted_share: Number = Field(0.3, gt=0, le=1)
    """What share of a collection a sweep may delete before it stops and asks."""
    external_id: str | None = Field(None, min_length=1, max_length=255)
    """Your own id of it; it is shown as it is."""
    metadata: Metadata = Field(default_factory=dict)
    """What you keep with it; it is shown as it is."""

    @field_validator("collections")
    @classmethod
    def _check_collections(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("expected at least one collection")
        return tuple(map(check_collection, value))

    @property
    def is_continuous(self) -> bool:
        """Whether it polls again as soon as it has read all."""
        return self.frequency == CONTINUOUS

    @property
    def collection_ids(self) -> tuple[str, ...]:
        """The ids of its collections, with their provider: `stripe:customers`."""
        return tuple(collection_id(self.provider, each) for each in self.collections)

    @property
    def collection_names(self) -> tuple[str, ...]:
        """The names of its collections, without their provider."""
        return tuple(each.rpartition(":")[2] for each in self.collections)


class RecordsSettings(StrictModel):
    """Where records are kept, and how they are named in NATS."""

    store: PostgresUrl | None = None
    """The Postgres of the records table; the store if unset."""
    retention: Duration = timedelta(days=7)
    """How long the stream `events` keeps its messages."""
    records_subject: str = Field(DEFAULT_RECORDS_SUBJECT, min_length=1)
    """The subject of a record in NATS."""
    events_subject: str = Field(DEFAULT_EVENTS_SUBJECT, min_length=1)
    """The subject of an event in NATS."""


def collection_ids(spec: Mapping[str, Any] | None) -> list[str]:
    """Return the ids of a sync's collections, of its keys as the file has them."""
    named = None if spec is None else spec.get("collections")
    names = named if isinstance(named, list | tuple) else ()
    return [collection_id(str(spec.get("provider")), str(name)) for name in names if spec]


def collection_id(provider: str, name: str) -> str:
    """Return a collection's id, from its name or from the id itself."""
    return name if ":" in name else f"{provider}:{name}"
