"""The connector of a declarative manifest of Airbyte, which airbyte-cdk runs in a process of its own.

A read is one slice of ours. What the manifest divides it into (times, partitions) is how it goes on:
what is complete is not read again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.config.providers import (
    ANY,
    AirbyteCollection,
    AirbyteProvider,
    FlagDeletes,
    Tombstones,
    manifest_of,
)
from penstock.syncs.airbyte.conversation import Conversation
from penstock.syncs.airbyte.process import Said
from penstock.syncs.connectors.contract import (
    Access,
    Collection,
    Defaults,
    Deletes,
    Json,
    Kind,
    Page,
    Record,
    Session,
    Slice,
    Unreadable,
)
from penstock.syncs.connectors.cursors import CursorFormat, time_of
from penstock.syncs.connectors.objects import excerpt
from penstock.syncs.connectors.records import RecordReader
from penstock.syncs.connectors.templates import filled, uses
from penstock.syncs.errors import SyncError

_T = TypeVar("_T")
_CURSOR: Final = "airbyte"
_MOST_DONE: Final = 5_000
"""So many parts of a read are remembered at most; of more, the later ones are read again."""
_TOKEN_PATH: Final = ("credentials", "refresh_token")
_SECOND: Final = timedelta(seconds=1)
_CHECK_ATTEMPTS: Final = 2
_ISO: Final = CursorFormat("iso8601")


class AirbyteConnector:
    """Runs a manifest: see `contract.Connector`."""

    def __init__(
        self, provider: str, settings: AirbyteProvider, properties: Mapping[str, Any]
    ) -> None:
        self._provider: Final = provider
        self._settings: Final = settings
        self._values: Final = {name: str(value) for name, value in properties.items()}
        self._known: dict[str, Collection] | None = None

    @property
    def defaults(self) -> Defaults:
        """The budget that the provider's settings allow."""
        return Defaults.allowed_by(self._settings.rate_limit)

    @property
    def access(self) -> Access:
        """How the API is reached; the manifest signs in."""
        return Access(
            allow_private=self._settings.allow_private,
            secrets=tuple(self._values.values()),
            rotates=bool(self._replaced),
        )

    def collections(self, session: Session | None = None) -> Mapping[str, Collection]:
        """Return the manifest's streams; those that the API has to name only with a session."""
        if self._known is None:
            talk = Conversation(session, self.access.secrets)
            try:
                found = list(talk.messages(self._order("discover")))[-1].streams
            except SyncError:
                if talk.needs_session:
                    return {}
                raise
            names = [name for name, _, _ in found]
            for name in self._settings.collections:
                if name != ANY:
                    self._of(name, dict.fromkeys(names))
            self._known = {name: self._described(name, key, by) for name, key, by in found}
        return self._known

    def collection(self, name: str) -> Collection:
        """Return a stream by its name."""
        return self._of(name, self.collections())

    def plan(
        self,
        collection: Collection,
        cursor: Json | None,
        kind: Kind,
        session: Session,  # noqa: ARG002 - Connector
    ) -> Sequence[Slice]:
        """Return one slice."""
        if kind is Kind.EVENTS:
            return []
        if not collection.key:
            raise SyncError(
                "connector",
                f"The manifest names no primary key of {collection.name}.",
                remedy=f"Name the fields that identify an object: collections.{collection.name}."
                "primary_key of the provider.",
            )
        since = (cursor or {}).get(_CURSOR) if kind is Kind.POLL else None
        return [Slice(kind, {} if since is None else {"since": since})]

    def read(self, collection: Collection, slice_: Slice, session: Session) -> Iterator[Page]:
        """Yield what the manifest reads, and at the end the cursor up to which that is all."""
        resume, known = slice_.resume, slice_.resume or {}
        since: Json = slice_.of.get("since") or {}
        # What changes from now on may be missed by what follows, and is read again.
        until = known.get("until") or (session.now - _SECOND).isoformat()
        order = self._order(
            "read", stream=collection.name, cursor_field=collection.cursor_field,
            **{"from": since.get("from")}, since=since.get("value"), newest=known.get("newest"),
            overlap=collection.overlap.total_seconds(), until=until, done=known.get("done", []),
        )  # fmt: skip
        reads = self._reader(collection)
        talk = Conversation(session, self.access.secrets)
        with contextlib.closing(talk.messages(order)) as messages:
            for said in messages:
                if slice_.kind is Kind.SWEEP:
                    talk.refuse_ignored()
                if said.do != "end":
                    resume = _resume(resume, said, until)
                    yield self._page(collection, slice_.kind, said, reads, resume)
                    continue
                moves = slice_.kind is not Kind.SWEEP and said.cursor is not None
                yield Page([], cursor={_CURSOR: said.cursor} if moves else None, is_last=True)

    def check(self, session: Session) -> None:
        """Have the manifest check its connection."""
        talk = Conversation(session, self.access.secrets, _CHECK_ATTEMPTS)
        for _ in talk.messages(self._order("check")):
            pass

    def _order(self, do: str, **fields: Any) -> dict[str, Any]:
        settings = self._settings
        self._refuse_tokens()
        components = None
        if (file := settings.components) is not None:
            try:
                components = [Path(file).expanduser().read_text("utf-8"), file]
            except (OSError, UnicodeDecodeError) as error:
                raise SyncError(
                    "connector",
                    f"The components of {self._provider} can't be read: {error}.",
                    remedy="Put the file where Penstock and its executors run.",
                ) from None
        return {
            "do": do,
            "manifest": settings.manifest.code,
            "components": components,
            "config": self._config,
            **fields,
        }

    @functools.cached_property
    def _config(self) -> Json:
        config, values = self._settings.config, self._values
        own = {name: each for name, each in values.items() if not uses(config, name)}
        return {**own, **filled(config, values)}

    @functools.cached_property
    def _replaced(self) -> set[str]:
        return _replaced(self._settings.manifest.code, self._config)

    def _refuse_tokens(self) -> None:
        if len(self._replaced) > 1:
            raise SyncError(
                "connector",
                "Two logins of the manifest replace their refresh tokens, and a credential has one.",
                remedy="Leave one of them in config.",
            )
        if not self._replaced <= set(self._values.values()):
            raise SyncError(
                "credential",
                "The API replaces the refresh token that stands in config, and Penstock keeps the new"
                " one with the credential.",
                remedy="Make the token a property of the credential, and let config name it: {NAME}.",
            )

    def _of(self, name: str, known: Mapping[str, _T]) -> _T:
        if name not in known:
            raise SyncError(
                "not_found",
                f"The manifest of {self._provider} has no stream {name!r}.",
                remedy=f"It has: {', '.join(sorted(known))}.",
            )
        return known[name]

    def _described(self, name: str, key: Sequence[str], cursor_field: str | None) -> Collection:
        of = self._own(name)
        if isinstance(of.primary_key, str):
            key = [of.primary_key]
        return Collection(
            name,
            tuple(of.primary_key or key),
            cursor_field,
            of.created_path,
            Deletes(of.deletes.type),
            of.overlap,
            of.delete_notes,
        )

    def _own(self, name: str) -> AirbyteCollection:
        given = self._settings.collections
        return given.get(name) or given.get(ANY) or AirbyteCollection()

    def _reader(self, collection: Collection) -> RecordReader:
        of = self._own(collection.name)
        tombstone = of.deletes if isinstance(of.deletes, Tombstones | FlagDeletes) else None
        return RecordReader(
            collection.key, created_path=collection.created_field, tombstone=tombstone
        )

    def _page(
        self,
        collection: Collection,
        kind: Kind,
        said: Said,
        reads: RecordReader,
        resume: Json | None,
    ) -> Page:
        records: list[Record] = []
        unreadable: list[Unreadable] = []
        bad = dict(said.bad)
        for number, (raw, at) in enumerate(zip(said.records, said.times, strict=True)):
            found, _, _ = reads.read(raw)
            if number in bad:
                found = Unreadable(bad[number], excerpt(raw))
            if isinstance(found, Unreadable):
                unreadable.append(found)
            elif found is not None:
                records.append(_at(found, at))
        self._refuse(collection, kind, said, unreadable)
        return Page(records, unreadable, resume)

    def _refuse(
        self, collection: Collection, kind: Kind, said: Said, unreadable: Sequence[Unreadable]
    ) -> None:
        if not (count := len(said.records)):
            return
        if len(unreadable) == count or (unreadable and kind is Kind.SWEEP):
            raise SyncError(
                "bad_response",
                f"{len(unreadable):,} of {count:,} objects of a page can't be read: "
                f"{unreadable[0].reason}.",
                remedy="Compare the primary key, and the cursor's field and formats in the manifest,"
                " with what the API answers.",
            )
        has_cursor = collection.cursor_field is not None and kind is not Kind.SWEEP
        if has_cursor and not any(each is not None for each in said.times):
            raise SyncError(
                "bad_response",
                f"None of the {count:,} objects of a page has the cursor {collection.cursor_field}:"
                " polls would miss changes.",
                remedy="Correct cursor_field in the manifest.",
            )


def _resume(before: Json | None, said: Said, until: str) -> Json | None:
    """Return from where a read goes on: it is another place only once one more part is complete."""
    done = said.done[:_MOST_DONE]
    if len(done) <= len((before or {}).get("done", ())):
        return before
    resume: Json = {"until": until, "done": done}
    return resume if said.newest is None else {**resume, "newest": said.newest}


def _at(record: Record, text: str | None) -> Record:
    """Return a record with the time that its cursor has, if it is one."""
    if text is None or "T" not in text:
        return record
    at = time_of(_ISO.parse(text))
    return Record(record.upstream_id, record.data, record.created_at, at, record.deleted)


@functools.lru_cache(maxsize=64)
def _token_paths(manifest: str) -> frozenset[tuple[str, ...]]:
    """Return where a manifest's logins that replace their refresh token have it in the configuration."""
    if "refresh_token_updater" not in manifest:
        return frozenset()
    found = set()
    stack: list[Any] = [manifest_of(manifest)]
    while stack:
        each = stack.pop()
        if isinstance(each, dict):
            if isinstance(updater := each.get("refresh_token_updater"), dict):
                found.add(tuple(updater.get("refresh_token_config_path", _TOKEN_PATH)))
            stack.extend(each.values())
        elif isinstance(each, list):
            stack.extend(each)
    return frozenset(found)


def _replaced(manifest: str, config: Json) -> set[str]:
    """Return the refresh tokens of a configuration that the API replaces."""
    found = set()
    for path in _token_paths(manifest):
        value: Any = config
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, str) and value:
            found.add(value)
    return found


def loaded(settings: AirbyteProvider) -> str:
    """Return what manifest a provider loads, its version, and the licence that it names."""
    manifest = manifest_of(settings.manifest.code)
    what = f"manifest {settings.manifest.file or 'of the configuration'}"
    version = manifest.get("version")
    metadata = manifest.get("metadata")
    for part in (manifest, metadata if isinstance(metadata, dict) else {}):
        for name in ("license", "licence"):
            if isinstance(found := part.get(name), str):
                return f"{what}, version {version}, licence {found}"
    return f"{what}, version {version}; it names no licence: see where it comes from"
