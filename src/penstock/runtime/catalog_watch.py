"""Keeps in the store which tables and columns a source has, for the filters of consumers.

A column may come or go while nothing of its table is written, so the server is asked every few seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final, Self

import structlog

from penstock.config.sources import PostgresSource
from penstock.core.backoff import Backoff
from penstock.core.errors import PenstockError
from penstock.desired import consumers
from penstock.postgres.admin import Catalog, open_catalog
from penstock.spark.planning import source_columns
from penstock.streams.store import Store

_SECONDS: Final = 3.0
_MOST_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 2.0

log = structlog.get_logger("penstock")


class CatalogWatch:
    """Looks after the tables of sources in the store at `url`, a thread each; a context manager.

    `sources` are those that have streams.
    """

    def __init__(self, url: str, sources: Mapping[str, PostgresSource]) -> None:
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(
                target=_watch, args=(url, name, source, self._stopped), name=f"tables {name}",
                daemon=True,
            )
            for name, source in sources.items()
        ]  # fmt: skip

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(_STOP_SECONDS)


def _watch(url: str, name: str, source: PostgresSource, stopped: threading.Event) -> None:
    backoff = Backoff(_SECONDS, _MOST_SECONDS, jitter=0.25)
    while not stopped.is_set():
        try:
            with open_catalog(source) as catalog:
                _follow(url, name, catalog, stopped, backoff)
        except PenstockError as error:
            if not error.transient:
                log.warning("the tables can't be noted for the filters of consumers", source=name,
                            error=str(error))  # fmt: skip
        except Exception:
            log.exception("the tables can't be noted for the filters of consumers", source=name)
        stopped.wait(backoff.after_failure())


def _follow(
    url: str, name: str, catalog: Catalog, stopped: threading.Event, backoff: Backoff
) -> None:
    seen: object = None
    while not stopped.is_set():
        if (found := catalog.fingerprint()) != seen:
            with Store(url) as store:
                consumers.note_tables(store, name, source_columns(catalog))
            seen = found
        backoff.reset()
        stopped.wait(_SECONDS)
