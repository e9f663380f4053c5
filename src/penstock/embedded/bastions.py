"""The keys of bastions, for commands that need the store for nothing else."""

from __future__ import annotations

from penstock.config.bastion import Bastion
from penstock.config.settings import Config
from penstock.embedded.store import open_store
from penstock.streams.bastions import completed
from penstock.streams.store import Store


def completed_bastions(config: Config) -> dict[str, Bastion]:
    """Return a configuration's bastions with their keys; opens the store only if it has some.

    Raises `EmbeddedError` and `StoreError`.
    """
    bastions = config.bastions()
    if all(bastion.private_key and bastion.host_key for bastion in bastions.values()):
        return bastions
    with open_store(config) as url, Store.open(url) as store:
        return completed(store, bastions)
