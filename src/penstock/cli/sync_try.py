"""`penstock sync try`: what a connector reads, page by page; nothing is written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.common import (
    CONFIG,
    AsJson,
    ConfigFile,
    StoreUrl,
    errors,
    fail,
    json_text,
    missing,
    note_failure,
    unknown,
)
from penstock.cli.store import store_of
from penstock.config import STORE_VARIABLE

if TYPE_CHECKING:
    from penstock.config.providers import ProviderSettings
    from penstock.config.syncs import Credential
    from penstock.desired.with_file import Configured
    from penstock.syncs.connectors.contract import Page, Record
    from penstock.syncs.credentials import StoredTokens

_WIDTH: Final = 160
"""How many characters of an object are shown."""


def try_connector(
    connector: Annotated[
        str,
        typer.Argument(
            help="A provider's name, a YAML file that describes one, or a function as in my.py:read."
        ),
    ],
    collections: Annotated[
        list[str] | None,
        typer.Option("--collection", help="Only this one; may be repeated.", show_default=False),
    ] = None,
    credential: Annotated[
        str | None,
        typer.Option(
            help="The credential, by name; the provider's only one if unset.", show_default=False
        ),
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            help="A property in the place of a credential, as in 'api_key=${API_KEY}'; may be repeated.",
            show_default=False,
        ),
    ] = None,
    pages: Annotated[int, typer.Option(min=1, help="How many pages of each collection.")] = 2,
    objects: Annotated[int, typer.Option(min=0, help="How many objects of a page are shown.")] = 5,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Print what a connector reads, page by page, and write nothing.

    Ends with 1 if an object can't be read.
    """
    from penstock.syncs import probe

    with errors(), _properties_named():
        found = _configured(config, store_url)
        note_failure(found)
        name, settings = _provider(connector, collections or (), found)
        _note_licence(settings)
        chosen = None if properties else _credential(found, name, credential)
        values = _given(properties or ()) if chosen is None else probe.properties_of(chosen[1])
        bad = 0

        def keeper() -> StoredTokens:
            """Keep tokens where the run does: a refresh token may serve once."""
            assert chosen is not None  # noqa: S101 - else it is not called
            return probe.keeper_of(stack.enter_context(store_of(config, store_url)), *chosen)

        with contextlib.ExitStack() as stack:
            made, session = stack.enter_context(
                probe.opened(name, settings, values, None if chosen is None else keeper)
            )
            for each in collections or list(made.collections(session)):
                of = probe.collection_of(made, session, each)
                for number, page in enumerate(probe.pages(made, session, of), 1):
                    bad += len(page.unreadable)
                    for line in (
                        _as_json(each, page) if as_json else _shown(each, number, page, objects)
                    ):
                        typer.echo(line)
                    if number == pages:
                        break
    raise typer.Exit(int(bad > 0))


@contextlib.contextmanager
def _properties_named() -> Iterator[None]:
    """Name the option by which a property is given, where one is missing."""
    from penstock.syncs.errors import SyncError

    try:
        yield
    except SyncError as error:
        if error.code != "credential":
            raise
        remedy = f"{error.remedy} To try it: --property 'NAME=${{VARIABLE}}', or --credential NAME."
        raise SyncError(error.code, error.message, remedy=remedy.strip()) from None


def _configured(config: Path, store_url: str | None) -> Configured:
    """Return the configuration, an empty one where there is no file and no store."""
    from penstock.config.settings import Config
    from penstock.desired.with_file import Configured, configured
    from penstock.embedded.store import exists

    if config.exists() or store_url or os.environ.get(STORE_VARIABLE) or exists():
        return configured(config, store_url)
    return Configured(Config(sources={}, sinks={}), {})


def _provider(
    text: str, collections: Sequence[str], found: Configured
) -> tuple[str, ProviderSettings | None]:
    from penstock.config.provider_file import read_provider
    from penstock.config.providers import READY, PythonProvider

    path, colon, _ = text.rpartition(":")
    if text.endswith((".yaml", ".yml")):
        if not Path(text).is_file():
            raise fail(f"{text}: no such file; it has the keys of one provider, as type: rest", 2)
        return read_provider(text)
    if text.endswith(".py"):
        raise fail(f"{text}: name the function or class too, as in {text}:read", 2)
    if colon and path.endswith(".py"):
        if not collections:
            raise fail(f"{text}: name what it is asked for, as in --collection contacts", 2)
        spec = {"type": "python", "function": text, "collections": {n: {} for n in collections}}
        return Path(path).stem, PythonProvider.model_validate(spec)
    own = found.config.providers
    if text in own:
        return text, own[text]
    if text in READY:
        return text, None
    if ("provider", text) in found.refused:
        raise fail(missing(found, "provider", text, own), 2)
    if text in found.config.syncs:
        provider = found.config.syncs[text].provider
        raise fail(f"{text} is a sync: name its provider, as in penstock sync try {provider}", 2)
    reason = unknown("provider", text, [*own, *READY])
    raise fail(f"{reason}; a YAML file or a function is named as in crm.yaml or my.py:read", 2)


def _note_licence(settings: ProviderSettings | None) -> None:
    from penstock.config.providers import AirbyteProvider

    if isinstance(settings, AirbyteProvider):
        from penstock.syncs.connectors.airbyte import loaded

        typer.echo(f"It loads the {loaded(settings)}.", err=True)


def _given(texts: Sequence[str]) -> dict[str, str]:
    """Return properties of the command line, with their variables filled in."""
    from penstock.config.yaml_lines import Document, filled

    document = Document()
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise fail("--property: expected a name and its value, as in api_key=${API_KEY}", 2)
        values[name] = str(filled(value, os.environ, (name,), document))
        if not values[name] and not document.problems:
            raise fail(f"--property {name}: it is empty: give its value, or leave it out", 2)
    if document.problems:
        raise fail("; ".join(f"--property {at[0]}: {text}" for _, at, text in document.problems), 2)
    return values


def _credential(
    found: Configured, provider: str, name: str | None
) -> tuple[str, Credential] | None:
    """Return the credential that is named, or the provider's only one."""
    known = {n: c for n, c in found.config.credentials.items() if c.provider == provider}
    if name is None:
        if len(known) > 1:
            raise fail(
                f"provider {provider} has several credentials: choose one by --credential:"
                f" {', '.join(known)}",
                2,
            )
        return next(iter(known.items()), None)
    if name not in known:
        raise fail(missing(found, "credential", name, known), 2)
    return name, known[name]


def _shown(collection: str, number: int, page: Page, objects: int) -> Iterator[str]:
    count = len(page.records)
    cursor = "" if page.cursor is None else f", cursor {json_text(page.cursor)}"
    last = ", the last" if page.is_last else ""
    yield f"{collection}: page {number}: {count} object{'' if count == 1 else 's'}{cursor}{last}"
    for record in page.records[:objects]:
        data = record.data.decode(errors="replace")
        text = data if len(data) <= _WIDTH else f"{data[:_WIDTH]}…"
        at = "" if record.updated_at is None else f" {record.updated_at.isoformat()}"
        yield f"  {record.upstream_id}{at}{' deleted' if record.deleted else ''} {text}".rstrip()
    if count > objects:
        yield f"  … and {count - objects} more"
    for bad in page.unreadable:
        yield f"  ✗ can't be read: {bad.reason}"


def _as_json(collection: str, page: Page) -> Iterator[str]:
    for record in page.records:
        yield json_text(_record(collection, record))
    for bad in page.unreadable:
        yield json_text({"collection": collection, "error": bad.reason, "text": bad.text})


def _record(collection: str, record: Record) -> dict[str, Any]:
    import orjson

    return {
        "collection": collection,
        "upstream_id": record.upstream_id,
        "data": orjson.loads(record.data) if record.data else None,
        "upstream_created_at": record.created_at,
        "upstream_updated_at": record.updated_at,
        "deleted": record.deleted,
    }
