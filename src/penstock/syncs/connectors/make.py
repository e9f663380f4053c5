"""Makes the connector of a provider, and the session that it makes its requests with."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, Final

import yaml

from penstock.config.providers import (
    READY,
    AirbyteProvider,
    ProviderSettings,
    PythonProvider,
    RestProvider,
)
from penstock.syncs.auth import signer_of
from penstock.syncs.connectors.airbyte import AirbyteConnector
from penstock.syncs.connectors.contract import Access, Connector
from penstock.syncs.connectors.rest import RestConnector
from penstock.syncs.errors import SyncError
from penstock.syncs.session import ATTEMPTS, ApiSession, Budget
from penstock.syncs.tokens import TokenKeeper

_OWN_CLASSES: Final = {
    "stripe": "StripeConnector",
    "salesforce": "SalesforceConnector",
    "hubspot": "HubspotConnector",
}
_READY_FOLDER: Final = "penstock.syncs.connectors.ready"


def connector_of(
    provider: str, settings: ProviderSettings | None, properties: Mapping[str, Any]
) -> Connector:
    """Return the connector of a provider.

    Args:
        provider: Its slug.
        settings: What the user has written for it; None for a ready one.
        properties: Those of the credential.

    Raises:
        SyncError: There is no such provider, or it can't be used.
    """
    match settings:
        case RestProvider():
            return RestConnector(provider, settings, properties)
        case PythonProvider():
            # With pyarrow, that is 60 ms.
            from penstock.syncs.connectors.python import PythonConnector  # noqa: PLC0415 - see above

            return PythonConnector(provider, settings, properties)
        case AirbyteProvider():
            return AirbyteConnector(provider, settings, properties)
    if provider not in READY:
        raise SyncError(
            "connector",
            f"There is no provider {provider!r}.",
            remedy=f"Add it under providers:, or use a ready one: {', '.join(READY)}.",
        )
    ready = ready_settings(provider)
    if provider not in _OWN_CLASSES:
        return RestConnector(provider, ready, properties)
    module = importlib.import_module(f"{_READY_FOLDER}.{provider}")
    made: Connector = getattr(module, _OWN_CLASSES[provider])(provider, ready, properties)
    return made


@functools.cache
def ready_settings(provider: str) -> RestProvider:
    """Return the settings of a ready provider."""
    text = resources.files(_READY_FOLDER).joinpath(f"{provider}.yaml").read_text("utf-8")
    return RestProvider.model_validate(yaml.safe_load(text))


def session_of(
    access: Access,
    budget: Budget,
    keeper: TokenKeeper | None = None,
    *,
    sleep: Callable[[float], object] = time.sleep,
    attempts: int = ATTEMPTS,
) -> ApiSession:
    """Return a session; `keeper` keeps the tokens of OAuth, without one they last as long as it."""
    return ApiSession(
        budget,
        signer_of(access.auth, keeper),
        origin=access.origin,
        allow_private=access.allow_private,
        secrets=access.secrets,
        sleep=sleep,
        attempts=attempts,
        tokens=keeper,
    )
