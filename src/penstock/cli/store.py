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

    The embedded one runs meanwhile.
    """
    from penstock.config.file import load_store
    from penstock.embedded.store import exists, open_store

    with open_store(load_store(config, given=store, embedded=exists())) as url:
        yield url


@contextlib.contextmanager
def store_of(config: Path, store: str | None = None) -> Iterator[Store]:
    """Give the store itself."""
    from penstock.streams.store import Store

    with opened(config, store) as url, Store.open(url) as made:
        yield made
