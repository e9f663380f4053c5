"""Validates a document part by part; each mistake has its line and its key.

All mistakes of a document are reported at once. No message holds a secret: values that came from the
environment are shown as the file names them, passwords and URLs are masked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from pydantic import BaseModel, ValidationError

from penstock.config import contradictions, reserved, yaml_lines
from penstock.config.consumers import HttpConsumer
from penstock.config.explain import explanation, kind_of, path_in_file, shown, unknown_key
from penstock.config.models import CONSUMERS, SECTIONS, SINKS, TARGETS
from penstock.config.nats_consumers import NatsConsumer
from penstock.config.providers import PROVIDERS, ProviderSettings
from penstock.config.settings import Config, SparkSettings, StoreSettings
from penstock.config.sinks import Sink
from penstock.config.sources import OutboxSource, PostgresSource, slot_name
from penstock.config.strict import NAME_RULE, is_name
from penstock.config.syncs import Credential, Sync
from penstock.config.targets import Target
from penstock.config.texts import FOLDER
from penstock.core.errors import ConfigError
from penstock.core.record_forms import SYNCS
from penstock.core.text import Path as KeyPath
from penstock.core.text import dotted, nearest

_KEYS: Final = (*SECTIONS.values(), "store", "spark", "records")

_M = TypeVar("_M", bound=BaseModel)


def text_of(path: str | os.PathLike[str]) -> str:
    """Return the text of a configuration file; raises `ConfigError`."""
    file = os.fspath(path)
    try:
        data = Path(file).read_bytes()
    except FileNotFoundError:
        raise ConfigError([f"{file}: no such file: write one with `penstock init`"]) from None
    except OSError as e:
        raise ConfigError([f"{file}: cannot be read: {e.strerror}"]) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ConfigError([f"{file}:{line}: not UTF-8: save the file as UTF-8"]) from None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a document holds, each part by itself; None is a part that can't be used."""

    sources: dict[str, PostgresSource]
    outboxes: dict[str, OutboxSource]
    sinks: dict[str, Sink]
    consumers: dict[str, HttpConsumer]
    nats_consumers: dict[str, NatsConsumer]
    targets: dict[str, Target]
    providers: dict[str, ProviderSettings]
    credentials: dict[str, Credential]
    syncs: dict[str, Sync]
    spark: SparkSettings | None
    store: StoreSettings | None


class Reader:
    """Validates a document part by part, so that one mistake does not hide another.

    Mistakes are added to the document's `problems`; `file` is where the document came from, `folder`
    where the files lie that it names, None where none may be read.
    """

    def __init__(
        self, document: yaml_lines.Document, file: str = "", folder: str | None = None
    ) -> None:
        self.file = file
        self.document = document
        self._folder = folder

    @classmethod
    def of_file(cls, path: str | os.PathLike[str], environ: Mapping[str, str]) -> Self:
        """Read a file; raises `ConfigError` where there is nothing to validate."""
        file = os.fspath(path)
        folder = os.path.dirname(file)  # noqa: PTH120 - "" is the current one here
        return cls.of_text(text_of(file), environ, file, folder)

    @classmethod
    def of_text(
        cls, text: str, environ: Mapping[str, str], file: str, folder: str | None = None
    ) -> Self:
        """Read a text as that of `file`; raises `ConfigError` as `of_file` does."""
        document = yaml_lines.parse(text, environ)
        if document.value is None and not document.problems:
            message = f"{file}:1: the file is empty: write one with `penstock init`"
            raise ConfigError([message])
        return cls(document, file, folder)

    def check(self) -> None:
        """Raise `ConfigError` with the problems in the order of the file, if there are any."""
        if problems := sorted(self.document.problems, key=lambda problem: problem[0]):
            raise ConfigError(
                [
                    f"{self.file}:{line}:{f' {dotted(path)}:' if path else ''} {message}"
                    for line, path, message in problems
                ]
            )

    def root(self) -> dict[str, Any] | None:
        """Return the document by its keys, None where it has none."""
        root = self.document.value
        if not isinstance(root, dict):
            if root is not None:
                self.problem((), "expected the keys sources and sinks")
            return None
        for key in root:
            if key not in _KEYS:
                self.problem((key,), unknown_key(key, _KEYS))
        return root

    def store(self, root: dict[str, Any]) -> StoreSettings | None:
        """Validate where the store is, and the records."""
        given = {key: root[key] for key in StoreSettings.model_fields if key in root}
        return self.model(StoreSettings, given, ())

    def config(self) -> Config | None:
        """Validate all parts, and that they fit each other."""
        parts = self.entities()
        if parts is None:
            return None
        self.references(parts)
        self.settings(parts)
        if self.document.problems or parts.spark is None or parts.store is None:
            return None
        return Config(
            sources=parts.sources, sinks=parts.sinks, outboxes=parts.outboxes,
            consumers=parts.consumers, nats_consumers=parts.nats_consumers, targets=parts.targets,
            providers=parts.providers, credentials=parts.credentials, syncs=parts.syncs,
            store=parts.store.store, records=parts.store.records, spark=parts.spark,
        )  # fmt: skip

    def settings(self, parts: Parts) -> None:
        """Check that the store and Spark fit each other."""
        master = "local" if parts.spark is None else parts.spark.master
        has_url = "store" in self.document.value
        for path, message in contradictions.of_store(
            has_url=has_url, master=master, outboxes=parts.outboxes
        ):
            self.problem(path, message)

    def references(self, parts: Parts) -> None:
        """Check what entities say of each other."""
        root = self.document.value
        given = names_of(root, "sinks")
        streams = {n: _kind(sink) for n, sink in given.items() if _type(sink) == "stream"}
        sources = {name: str(given[name].get("source")) for name in streams}
        syncs, names = names_of(root, "syncs"), list(names_of(root, "sources"))
        if syncs:
            streams |= reserved.KINDS
            names.append(SYNCS)
        for path, message in (
            *reserved.of_names(names_of(root, "sources"), given, syncs),
            *reserved.of_variables(parts.sinks, parts.nats_consumers, sources),
            *contradictions.of_sinks(parts.sources, parts.sinks, names),
            *contradictions.of_consumers(parts.consumers, given, streams),
            *contradictions.of_nats_consumers(parts.nats_consumers, given, streams),
            *contradictions.of_targets(
                parts.targets,
                {**parts.sources, **parts.outboxes},
                parts.sinks,
                {**parts.consumers, **parts.nats_consumers},
                names_of(root, "targets"),
            ),
            *contradictions.of_syncs(
                parts.providers,
                parts.credentials,
                parts.syncs,
                names_of(root, "providers"),
                names_of(root, "credentials"),
            ),
        ):
            self.problem(path, message)

    def entities(self) -> Parts | None:
        """Validate each part by itself: what it refers to may be elsewhere."""
        root = self.root()
        if root is None:
            return None
        sources: dict[str, PostgresSource] = {}
        outboxes: dict[str, OutboxSource] = {}
        for name, value in self.parts(root, "sources"):
            if _type(value) == "outbox":
                if outbox := self.model(OutboxSource, value, ("sources", name)):
                    outboxes[name] = outbox
                continue
            default = slot_name(f"penstock_{name}")
            filled = {"slot": default, "publication": default} | value
            if source := self.model(PostgresSource, filled, ("sources", name)):
                sources[name] = source
        sinks: dict[str, Sink] = {}
        given = names_of(root, "sources")
        relayed = [name for name, source in given.items() if _type(source) == "outbox"]
        for name, value in self.parts(root, "sinks"):
            if sink := self.typed(SINKS, value, ("sinks", name)):
                sinks[name] = sink
                if sink.source in relayed:
                    message = (
                        f"{sink.source!r} is an outbox, whose pipelines are set in its database:"
                        " select tide.relay_set_outbox(…)"
                    )
                    self.problem(("sinks", name, "source"), message)
        consumers: dict[str, HttpConsumer] = {}
        nats_consumers: dict[str, NatsConsumer] = {}
        for name, value in self.parts(root, "consumers") if root.get("consumers") else ():
            consumer = self.typed(CONSUMERS, {"type": "pull"} | value, ("consumers", name))
            if isinstance(consumer, NatsConsumer):
                nats_consumers[name] = consumer
            elif consumer is not None:
                consumers[name] = consumer
        targets: dict[str, Target] = {}
        for name, value in self.parts(root, "targets") if root.get("targets") else ():
            if target := self.typed(TARGETS, value, ("targets", name)):
                targets[name] = target
        providers: dict[str, ProviderSettings] = {}
        for name, value in self.parts(root, "providers") if root.get("providers") else ():
            if provider := self.typed(PROVIDERS, value, ("providers", name)):
                providers[name] = provider
        spark = self.model(SparkSettings, root.get("spark") or {}, ("spark",))
        return Parts(
            sources, outboxes, sinks, consumers, nats_consumers, targets, providers,
            self.untyped(Credential, root, "credentials"), self.untyped(Sync, root, "syncs"),
            spark, self.store(root),
        )  # fmt: skip

    def parts(self, root: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the parts under a key by name; without the key there are none."""
        if key not in root:
            return
        value = root[key]
        if not isinstance(value, dict) or not value:
            if value in ({}, None):
                self.problem((key,), f"missing: expected at least one {key[:-1]} under a name")
            else:
                self.problem((key,), f"expected {key} by name, got {kind_of(value)}")
            return
        for name, part in value.items():
            if not is_name(name):
                self.problem((key, name), f"{name!r} is not a name: expected {NAME_RULE}")
            if isinstance(part, dict):
                yield name, part
            else:
                self.problem((key, name), f"expected the {key[:-1]}'s keys, got {kind_of(part)}")

    def untyped(self, model: type[_M], root: dict[str, Any], key: str) -> dict[str, _M]:
        """Validate the parts of a kind that has one model, by name."""
        parts = self.parts(root, key) if root.get(key) else ()
        found = {name: self.model(model, value, (key, name)) for name, value in parts}
        return {name: each for name, each in found.items() if each is not None}

    def typed(
        self, models: Mapping[str, type[_M]], value: dict[str, Any], path: KeyPath
    ) -> _M | None:
        """Validate a part whose `type` selects its model."""
        if model := models.get(_type(value)):
            return self.model(model, value, path)
        types = " or ".join(map(repr, models))
        where, given = (*path, "type"), value.get("type")
        if "type" not in value:
            self.problem(where, f"missing: this key has no default; expected {types}")
        else:
            text = shown(where, given, self.document)
            self.problem(where, f"expected {types}, got {text}{nearest(given, models)}")
        return None

    def model(self, model: type[_M], value: Any, path: KeyPath) -> _M | None:
        """Validate a part by its model."""
        try:
            return model.model_validate(value, context={FOLDER: self._folder})
        except ValidationError as e:
            for error in e.errors(include_url=False, include_context=True):
                where = (*path, *path_in_file(error["loc"], value))
                self.problem(where, explanation(model, error, where, self.document))
            return None

    def problem(self, path: KeyPath, message: str) -> None:
        """Add a mistake, unless what is wrong there is known."""
        # What a missing variable leaves behind is wrong too, and so is the list that it stands in:
        # not worth a second message.
        if not any(
            known == path or (known[:-1] == path and isinstance(known[-1], int))
            for _, known, _ in self.document.problems
        ):
            self.document.problems.append((self.document.line(path), path, message))


def names_of(root: Any, key: str) -> dict[str, Any]:
    """Return the parts under a key as the file has them, wrong ones too."""
    value = root.get(key) if isinstance(root, dict) else None
    return value if isinstance(value, dict) else {}


def _kind(sink: Any) -> str:
    return str(sink.get("kind", "changes")) if isinstance(sink, Mapping) else ""


def _type(part: Any) -> str:
    """Return what a part names as its type, or nothing."""
    value = part.get("type") if isinstance(part, dict) else None
    return value if isinstance(value, str) else ""
