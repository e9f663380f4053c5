"""A look at a provider without a sync: its collections, its login, what is read. Writes no record."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.config.providers import ProviderSettings
from penstock.config.syncs import Credential
from penstock.core.text import nearest
from penstock.streams.connection import own_connection
from penstock.streams.errors import embedded_log
from penstock.streams.store import Store
from penstock.syncs.connectors.contract import Collection, Connector, Kind, Page, Session
from penstock.syncs.connectors.make import connector_of, session_of
from penstock.syncs.credentials import StoredTokens, origin_of, secret_key
from penstock.syncs.errors import SyncError
from penstock.syncs.local_budget import LocalBudget
from penstock.syncs.session import ATTEMPTS
from penstock.syncs.tokens import LazyTokens, TokenKeeper

CHECK_ATTEMPTS: Final = 2
"""How often a check asks an API that does not answer: somebody waits for it."""


@contextlib.contextmanager
def opened(
    provider: str,
    settings: ProviderSettings | None,
    properties: Mapping[str, Any],
    keeper: Callable[[], TokenKeeper] | None = None,
    attempts: int = ATTEMPTS,
) -> Iterator[tuple[Connector, Session]]:
    """Give a provider's connector and a session, within the budget that the provider allows.

    `keeper` is called where the login has tokens, which a refresh would replace for all that use the
    credential; without one they last as long as the session. What fails is asked for `attempts` times.
    Raises `SyncError`.
    """
    connector = connector_of(provider, settings, properties)
    of, access = connector.defaults, connector.access
    budget = LocalBudget(of.allowed_requests, of.interval, of.max_concurrent_requests)
    keeps = None if keeper is None else LazyTokens(keeper)
    with contextlib.closing(session_of(access, budget, keeps, attempts=attempts)) as session:
        yield connector, session


def keeper_of(store: Store, name: str, credential: Credential) -> StoredTokens:
    """Return what keeps a credential's tokens in the store, for all processes; raises `SyncError`.

    What was handed out for other properties than today's is not used.
    """
    log = embedded_log(store.url)
    key = secret_key(None if log is None else Path(log).parent)
    origin = origin_of(properties_of(credential))
    own = partial(own_connection, store.url)
    return StoredTokens(store.connection, own, key, name, origin)


def properties_of(credential: Credential) -> dict[str, str]:
    """Return a credential's properties as they are: secrets."""
    return {name: text.get_secret_value() for name, text in credential.properties.items()}


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
