"""The store that a command works on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.streams.store import Store


@contextlib.contextmanager
def opened(config: Path, store: str | None = None) -> Iterator[str]:
    """Give the URL of the store that `store`, a file or the environment names; see `load_store`.

    The embedded one runs meanwhile; without a file it is the one that a run has left here.
    """
    with opened_both(config, store) as (url, _):
        yield url


@contextlib.contextmanager
def opened_both(config: Path, store: str | None = None) -> Iterator[tuple[str, str]]:
    """Give the URL of the store, and that of the records table's Postgres, often the same."""
    from penstock.config.file import load_store
    from penstock.embedded.store import exists, open_store

    settings = load_store(config, given=store, embedded=exists())
    records = settings.records.store
    with open_store(settings) as url:
        yield url, url if records is None else records.get_secret_value()


@contextlib.contextmanager
def store_of(config: Path, store: str | None = None) -> Iterator[Store]:
    """Give the store itself."""
    from penstock.streams.store import Store

    with opened(config, store) as url, Store.open(url) as made:
        yield made
