"""The configuration that the API works with: the desired state of its store."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple
from uuid import UUID

from pydantic import SecretStr

from penstock.api.manage.context import Context
from penstock.api.problems import Problem
from penstock.config.bastion import Bastion
from penstock.config.document import Key, Spec
from penstock.config.models import SECTIONS
from penstock.config.settings import Config
from penstock.config.sources import PostgresSource
from penstock.config.targets import HttpTarget, Target, bastion_of
from penstock.core import queries
from penstock.core.text import dotted
from penstock.desired.configured import usable_config, validated
from penstock.desired.entities import Snapshot
from penstock.streams.bastions import completed, reachable, with_bastions
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.api.manage", "manage.sql")


async def config_of(context: Context) -> tuple[Config, Mapping[Key, str]]:
    """Return the configuration of the desired state, and what can't be used in this process."""
    snapshot = await context.run(context.state.read)
    return await context.run(_usable, snapshot, context.store)


async def pipelines_of(context: Context, consumers: Collection[str] = ()) -> Config:
    """Return what can be used of the same; of the consumers those of these names alone."""
    kinds = SECTIONS.keys() - ({"consumer"} if not consumers else ())
    snapshot = await context.run(context.state.read, kinds)
    kept = {
        key: entity
        for key, entity in snapshot.entities.items()
        if entity.kind != "consumer" or entity.name in consumers
    }
    return (await context.run(_usable, replace(snapshot, entities=kept), context.store))[0]


def _usable(snapshot: Snapshot, store: Store) -> tuple[Config, Mapping[Key, str]]:
    base = Config(sources={}, sinks={}, store=SecretStr(store.url))
    config, refused = usable_config(snapshot, os.environ, base)
    return with_bastions(config, store), refused


async def source_of(context: Context, text: str) -> PostgresSource:
    """Return the settings of the source that a path has by its name or UUID; raises `Problem`."""
    name, _, settings = await configured_of(context, "source", text)
    try:
        return await context.run(reachable, settings, name, context.store)
    except ValueError as error:
        raise _unreachable("source", name, error) from None


async def target_of(context: Context, text: str) -> tuple[Target, Bastion | None]:
    """Return a target by its name or UUID, and its bastion as the store has it; raises `Problem`."""
    name, _, target = await configured_of(context, "target", text)
    try:
        bastion = bastion_of(name, target)
        if isinstance(target, HttpTarget):
            target.ca()
            target.identity()
    except ValueError as error:
        raise _unreachable("target", name, error) from None
    if bastion is None:
        return target, None
    return target, (await context.run(completed, context.store, {name: bastion}))[name]


class ConfiguredEntity(NamedTuple):
    """An entity that can be used in this process: its name, its id, and its settings by its model."""

    name: str
    id: UUID
    settings: Any


async def configured_of(context: Context, kind: str, text: str) -> ConfiguredEntity:
    """Return the entity of a path by its name or UUID; raises `Problem` of one that can't be used."""
    name = await name_of(context, kind, text)
    key: Key = kind, name

    def read() -> tuple[Spec, UUID] | None:
        with context.store.connection() as connection:
            return connection.execute(_SQL["spec"], key).fetchone()

    found = await context.run(read)
    if found is None:
        raise Problem(404, f"There is no {kind} {text!r}.")
    spec, id_ = found
    parts, problems = validated({key: spec}, os.environ)
    settings = getattr(parts, SECTIONS[kind]).get(name)
    if settings is None:
        raise Problem(
            409,
            f"{kind.capitalize()} {name!r} can't be used in this process: "
            + "; ".join(f"{dotted(path)}: {message}" for _, path, message in problems),
        )
    return ConfiguredEntity(name, id_, settings)


def _unreachable(kind: str, name: str, error: ValueError) -> Problem:
    return Problem(409, f"{kind.capitalize()} {name!r} can't be reached from here: {error}.")


async def name_of(context: Context, kind: str, text: str) -> str:
    """Return the name of the entity that a path has by its name or its UUID.

    What is no entity's UUID is a name, of one that may not be there.
    """
    if "\0" in text:
        raise Problem(404, f"There is no {kind} {text!r}.")
    try:
        wanted = UUID(text)
    except ValueError:
        return text

    def look() -> str:
        with context.store.connection() as connection:
            row = connection.execute(_SQL["name_of"], [kind, wanted]).fetchone()
        return text if row is None else str(row[0])

    return await context.run(look)
