"""The store that a command works on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.streams.store import Store


@contextlib.contextmanager
def opened(config: Path) -> Iterator[str]:
    """Give the URL of the store that a file names, or of the embedded one, which then runs.

    Where there is no file, it is the embedded one that a run has left here.
    """
    from penstock.config.file import is_missing, load_store
    from penstock.config.settings import StoreSettings
    from penstock.embedded.store import FOLDER, open_store

    here = is_missing(config) and (FOLDER / "store").is_dir()
    with open_store(StoreSettings() if here else load_store(config)) as url:
        yield url


@contextlib.contextmanager
def store_of(config: Path) -> Iterator[Store]:
    """Give the store that a file names."""
    from penstock.streams.store import Store

    with opened(config) as url, Store.open(url) as store:
        yield store
