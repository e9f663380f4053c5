"""The keys of bastions in the store: those that Penstock makes, and the host keys that are pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from penstock.bastion import new_private_key
from penstock.config.bastion import Bastion
from penstock.config.settings import Config
from penstock.config.sources import OutboxSource, PostgresSource
from penstock.core import queries
from penstock.streams.store import Store

S = TypeVar("S", PostgresSource, OutboxSource)

SQL: Final = queries.load("penstock.streams", "bastions.sql")


def with_bastions(config: Config, store: Store | str) -> Config:
    """Return a configuration with what the store has of its bastions; makes keys that are missing.

    The store, or the one at a URL, is not asked where no bastion lacks a key. Raises `StoreError`.
    """
    bastions = config.bastions()
    if all(bastion.private_key and bastion.host_key for bastion in bastions.values()):
        return config
    if isinstance(store, Store):
        return config.reached_by(completed(store, bastions))
    with Store.open(store) as opened:
        return config.reached_by(completed(opened, bastions))


def reachable(source: S, name: str, store: Store) -> S:
    """Return a source by itself with what the store has of its bastion, if it has one.

    Raises `StoreError`, and `ValueError` for a private key's file that can't be read.
    """
    if source.bastion is None:
        return source
    return source.behind(completed(store, {name: source.bastion.of(name)})[name])


def completed(store: Store, bastions: Mapping[str, Bastion]) -> dict[str, Bastion]:
    """Return bastions with the keys of the store, where the configuration has none of its own.

    A private key that neither has is made and kept. Raises `StoreError`.
    """
    found: dict[str, Bastion] = {}
    with store.connection() as connection:
        rows = connection.execute(SQL["bastions"], [list(bastions)]).fetchall()
        kept = {name: (private, host) for name, private, host in rows}
        for name, bastion in bastions.items():
            made = filled(bastion, *kept.get(name, (None, None)))
            if bastion.host_key is None:
                made = replace(made, pinned_in=store.url)
            if made.private_key is None:
                values = [name, new_private_key()]
                row: Any = connection.execute(SQL["keep_private_key"], values).fetchone()
                made = replace(made, private_key=row[0])
            found[name] = made
    return found


def filled(bastion: Bastion, private_key: str | None, host_key: str | None) -> Bastion:
    """Return a bastion with the store's keys, where it has none of its own."""
    return replace(
        bastion,
        private_key=bastion.private_key or private_key,
        host_key=bastion.host_key or host_key,
    )


def pin(store: Store, name: str, host_key: str) -> None:
    """Pin the host key of the bastion of `name`; raises `StoreError`."""
    with store.connection() as connection:
        connection.execute(SQL["pin"], [name, host_key])
