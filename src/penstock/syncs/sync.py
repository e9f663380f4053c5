"""What the scheduler knows of a sync: settings alone, without secrets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CONTINUOUS: Final = 0.0
"""The frequency of a sync that polls again as soon as it may."""

Key = tuple[str, str]
"""A sync's id and a collection's id."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How many requests a credential may make: so many in `interval` seconds, so many at a time."""

    requests: int = 10
    interval: float = 1.0
    concurrency: int = 4


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """The settings of a sync.

    Attributes:
        id: Its UUID.
        name: Its name.
        provider: The provider's slug.
        credential: The name of its credential; syncs of one credential share its budget.
        credential_version: Another value once the credential's properties or its provider's settings
            have changed by hand: what a credential stopped goes on then.
        collections: The collections' ids, `provider:collection`.
        frequency: Seconds between two polls, or `CONTINUOUS`.
        sweep_interval: Seconds between two sweeps, of collections whose deletes are seen by one.
        max_age: How old an object may be, in seconds, that a backfill takes; None: any.
        max_deleted_share: The share of a collection that a sweep may delete without a question.
        limit: What the user allows; None: what the provider allows.
        active: Whether it runs.
    """

    id: str
    name: str
    provider: str
    credential: str
    credential_version: str
    collections: tuple[str, ...]
    frequency: float = 60.0
    sweep_interval: float = 3600.0
    max_age: float | None = None
    max_deleted_share: float = 0.3
    limit: Limit | None = None
    active: bool = True
