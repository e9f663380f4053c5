"""Checks syncs: tries each credential with one harmless request, and reports what a sync can't see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from penstock.config.api_logins import RefreshToken
from penstock.config.providers import AirbyteProvider
from penstock.config.settings import Config
from penstock.config.syncs import Credential, Sync
from penstock.core.errors import PenstockError, StoreError
from penstock.core.finding import Finding
from penstock.core.text import nearest
from penstock.streams.store import Store
from penstock.syncs import probe
from penstock.syncs.connectors.airbyte import loaded
from penstock.syncs.connectors.contract import Deletes
from penstock.syncs.connectors.make import connector_of
from penstock.syncs.credentials import StoredTokens
from penstock.syncs.errors import SyncError

_NO_DELETES: Final = "set `deletes: {type: sweep}` for the collection, if all its ids can be listed"

_NO_ANSWER: Final = (
    "see whether the API answers from this machine, and whether its address is right"
)


def inspect(config: Config) -> Iterator[Finding]:
    """Check all credentials and syncs of a configuration."""
    url = None if config.store is None else config.store.get_secret_value()
    for name, credential in config.credentials.items():
        with contextlib.ExitStack() as stack:
            store = None if url is None else stack.enter_context(Store(url))
            yield _tried(config, name, credential, store)
    for name, provider in config.providers.items():
        if isinstance(provider, AirbyteProvider):
            yield Finding("ok", f"provider {name}", f"it loads the {loaded(provider)}")
    for name, sync in config.syncs.items():
        yield from _seen(config, name, sync)


def _tried(config: Config, name: str, credential: Credential, store: Store | None) -> Finding:
    what = f"credential {name}"
    provider = credential.provider
    keeper: Callable[[], StoredTokens] | None = None
    if store is not None:
        keeper = partial(probe.keeper_of, store, name, credential)
    try:
        properties = probe.properties_of(credential)
        settings = config.providers.get(provider)
        if keeper is None and _rotates(config, credential):
            # A refresh token may serve once, and the next one would be lost.
            message = (
                "not tried: its tokens are in the embedded store, which is not started for that"
            )
            return Finding("warning", what, message, "penstock sync list shows how its syncs are")
        opened = probe.opened(provider, settings, properties, keeper, probe.CHECK_ATTEMPTS)
        with opened as (connector, session):
            connector.check(session)
    except SyncError as error:
        return Finding("error", what, error.message, error.remedy or _NO_ANSWER)
    except StoreError as error:
        return Finding(
            "warning", what, f"not tried, as its tokens are in the store: {error.message}"
        )
    return Finding("ok", what, f"{provider} takes it")


def _rotates(config: Config, credential: Credential) -> bool:
    """Whether a login replaces its own token; raises `SyncError`."""
    settings = config.providers.get(credential.provider)
    connector = connector_of(credential.provider, settings, probe.properties_of(credential))
    return connector.access.rotates or isinstance(connector.access.auth, RefreshToken)


def _seen(config: Config, name: str, sync: Sync) -> Iterator[Finding]:
    credential = config.credentials[sync.credential]
    settings = config.providers.get(sync.provider)
    if sync.status == "disabled":
        yield Finding("warning", f"sync {name}", "it is disabled, so nothing is read")
    try:
        connector = connector_of(sync.provider, settings, probe.properties_of(credential))
        known = connector.collections()
    except PenstockError as error:
        yield Finding("error", f"sync {name}", error.message, error.remedy)
        return
    for short, id_ in zip(sync.collection_names, sync.collection_ids, strict=True):
        collection = known.get(short)
        if collection is None and isinstance(settings, AirbyteProvider) and known:
            expected = f"expected one of {', '.join(known)}{nearest(short, known)}"
            yield Finding(
                "error", f"sync {name}", f"the manifest has no stream {short!r}: {expected}"
            )
        if collection is None:
            continue  # the API alone knows it
        what = f"sync {name}: {id_}"
        if collection.deletes is Deletes.NONE:
            notes = collection.delete_notes or "the API does not show them"
            yield Finding("warning", what, f"deletes are not seen: {notes}", _NO_DELETES)
        elif collection.delete_notes:
            yield Finding("ok", what, f"deletes by {collection.deletes}: {collection.delete_notes}")
