"""The configuration that commands work on: the one that a run with the same file would have.

These are the entities of the store's desired state, with those of the file in the place of what they
are there. Nothing is written for it. Without a file the desired state counts alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.config.document import Key, read_document
from penstock.config.file import has_content, load_store
from penstock.config.settings import Config, StoreSettings
from penstock.core.errors import ConfigError, EmbeddedError, StoreError
from penstock.desired.configured import usable
from penstock.desired.entities import Snapshot
from penstock.desired.from_file import document_for
from penstock.desired.plan import plan_of
from penstock.desired.state import DesiredState
from penstock.embedded.bastions import completed_bastions
from penstock.embedded.store import exists, open_store
from penstock.streams.store import Store

_NOT_MADE: Final = frozenset({"no_schema", "no_table"})
"""Codes of a store that no run has used so far."""


@dataclass(frozen=True, slots=True)
class Configured:
    """A configuration with the keys of its bastions.

    Attributes:
        config: All that can be used in this environment.
        refused: The entities that can't be used here, and why.
        failure: Why the store was not asked; `config` is then what the file has alone.
    """

    config: Config
    refused: Mapping[Key, str]
    failure: StoreError | EmbeddedError | None = None


def configured(
    file: str | os.PathLike[str],
    store: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Configured:
    """Return the configuration of a file and of the store that it, `store` or the environment names.

    An embedded store that is not there yet is not made for it. Raises `ConfigError` for what is wrong in
    the file.
    """
    path = Path(file)
    try:
        settings = load_store(path, environ, store, embedded=exists())
    except ConfigError:
        if path.exists():
            read_document(path, environ)  # raises with all that is wrong in it
        raise
    snapshot, failure = _state(settings, environ)
    base = Config(sources={}, sinks={}, store=settings.store, records=settings.records)
    specs = snapshot.specs
    if has_content(path):
        document = document_for(snapshot, path, environ)
        specs = plan_of(document, snapshot, environ=environ).applied_to(snapshot)
        specs = {key: specs[key] for key in document.entities} | specs  # in the file's order
        base = document.base.model_copy(update={"store": settings.store})
    config, refused = usable(specs, environ, base)
    try:
        config = config.reached_by(completed_bastions(config))
    except (EmbeddedError, StoreError) as error:
        failure = failure or error
    return Configured(config, refused, failure)


def _state(
    settings: StoreSettings, environ: Mapping[str, str]
) -> tuple[Snapshot, StoreError | EmbeddedError | None]:
    """Return the desired state of a store, which stays as it is; or why it can't be read."""
    empty = Snapshot(0, {})
    if settings.store is None and not exists():
        return empty, None
    try:
        with open_store(settings) as url, Store(url) as opened:
            return DesiredState(opened, environ).read(), None
    except (EmbeddedError, StoreError) as error:
        made = not isinstance(error, StoreError) or error.code not in _NOT_MADE
        return empty, error if made else None
