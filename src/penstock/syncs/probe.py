"""A look at a provider without a sync: its collections, its login, what is read. Writes nothing."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.config.providers import ProviderSettings
from penstock.core.text import nearest
from penstock.syncs.auth import TokenKeeper
from penstock.syncs.connectors.contract import Collection, Connector, Kind, Page, Session
from penstock.syncs.connectors.make import connector_of, session_of
from penstock.syncs.errors import SyncError
from penstock.syncs.session import LocalBudget


@contextlib.contextmanager
def opened(
    provider: str,
    settings: ProviderSettings | None,
    properties: Mapping[str, Any],
    keeper: TokenKeeper | None = None,
) -> Iterator[tuple[Connector, Session]]:
    """Give a provider's connector and a session, within the budget that the provider allows.

    Raises `SyncError`.
    """
    connector = connector_of(provider, settings, properties)
    of = connector.defaults
    budget = LocalBudget(of.allowed_requests, of.interval, of.max_concurrent_requests)
    session = session_of(connector.access, budget, keeper)
    with contextlib.closing(session):
        yield connector, session


def collection_of(connector: Connector, session: Session, name: str) -> Collection:
    """Return a collection by its name; raises `SyncError`."""
    known = connector.collections(session)
    if name in known:
        return known[name]
    if (any_other := getattr(connector, "collection", None)) is not None:
        found: Collection = any_other(name)
        return found
    raise SyncError(
        "connector",
        f"There is no collection {name!r}: expected one of {', '.join(known)}{nearest(name, known)}.",
    )


def pages(connector: Connector, session: Session, collection: Collection) -> Iterator[Page]:
    """Yield what a backfill of a collection reads; raises `SyncError`."""
    slices = connector.plan(collection, None, Kind.BACKFILL, session)
    return itertools.chain.from_iterable(
        connector.read(collection, slice_, session) for slice_ in slices
    )
