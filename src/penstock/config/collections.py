"""Which collections a provider has, as far as that stands in the package or in the configuration."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from penstock.config.providers import ANY, AirbyteProvider, ProviderSettings

_READY: Final[dict[str, tuple[str, ...]]] = {
    "stripe": ("charges", "customers", "invoices", "prices", "products", "subscriptions"),
    "github": ("issues", "pull_requests"),
}
"""Those of ready providers; of the others the API has whatever its users have made."""


def collections_of(name: str, provider: ProviderSettings | None) -> Collection[str] | None:
    """Return the names of a provider's collections; `provider` is None for a ready one.

    None: only the API, or the connector's own code, knows them.
    """
    if provider is None:
        return _READY.get(name)
    if isinstance(provider, AirbyteProvider) or ANY in provider.collections:
        return None
    return list(provider.collections)
