"""What is written and by what it is relayed: rows of tables, or messages of an outbox."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import yaml

from penstock.embedded.handles import Database, Msg
from penstock.outbox.sql.install import install

from ..pipeline import Penstock
from . import publisher, writer
from .changes import Changes
from .faults import OUTBOX_FAULTS, TABLE_FAULTS, World
from .publisher import OUTBOX, Publisher
from .syncs import Syncs
from .verdict import Said, message_of_outbox, message_of_table
from .witness import Ask, ask_command, ask_readyz
from .writer import TABLES, Writer

_CONFIG: Final = """\
sources:
  chaos:
    type: postgres
    url: {postgres}
    tables: ["public.*"]
sinks:
  jetstream:
    type: nats
    source: chaos
    url: {nats}
    subject: "chaos.{{table}}.{{action}}"
spark:
  master: local[2]
"""
_PIPELINE: Final = "to-jetstream"


class Workload(Protocol):
    """One kind of source."""

    @property
    def faults(self) -> Mapping[str, Callable[[World], None]]:
        """What goes wrong, by name."""

    def read(self, message: Msg) -> Said:
        """Read a message as it stands in the stream."""

    def prepare(self, database: Database, nats: str) -> None:
        """Set up the database."""

    def processes(self, folder: Path, database: Database, nats: str) -> list[Penstock]:
        """Return what delivers to `nats`, not started."""

    def writer(self, url: str, number: int, keys: int, rate: float, seed: int) -> Writer:
        """Return a writer to keys that no other number has."""

    def disturb(self, database: Database) -> None:
        """Do what may be done at any time; raises what psycopg does."""

    @property
    def syncs(self) -> Syncs | None:
        """Syncs beside it."""

    def changes(
        self, pipelines: Sequence[Penstock], database: Database, nats: str, chance: random.Random
    ) -> Changes | None:
        """Return what changes the configuration, None where nothing does."""

    def asks(self, world: World) -> Mapping[str, Ask]:
        """Return what reports how the pipeline is, by name."""

    def differences(self, database: Database, writers: Sequence[Writer]) -> Iterator[str]:
        """Yield where the writers' idea of the database is wrong: else they can't be trusted."""


class Tables:
    """Rows, by `penstock run` on the embedded store, and the records of `syncs` beside them."""

    faults: Mapping[str, Callable[[World], None]] = TABLE_FAULTS

    def __init__(self, syncs: Syncs | None = None) -> None:
        self.syncs = syncs

    def read(self, message: Msg) -> Said:
        return message_of_table(message)

    def prepare(self, database: Database, nats: str) -> None:
        database.execute(writer.SCHEMA)

    def processes(self, folder: Path, database: Database, nats: str) -> list[Penstock]:
        config = yaml.safe_load(_CONFIG.format(postgres=database.url, nats=nats))
        if self.syncs is not None:
            more = self.syncs.config(database.url, nats)
            config = {**config, **more, "sinks": {**config["sinks"], **more["sinks"]}}
        (folder / "penstock.yaml").write_text(yaml.safe_dump(config))
        return [Penstock(folder, own_jvm=True)]

    def writer(self, url: str, number: int, keys: int, rate: float, seed: int) -> Writer:
        return Writer(url, number, keys, rate, seed)

    def disturb(self, database: Database) -> None:
        pass

    def changes(
        self, pipelines: Sequence[Penstock], database: Database, nats: str, chance: random.Random
    ) -> Changes | None:
        return Changes(pipelines[0], database, nats, chance)

    def asks(self, world: World) -> Mapping[str, Ask]:
        pipeline = world.pipelines[0]
        status = partial(ask_command, "status", "--listen", pipeline.listen, cwd=pipeline.folder)
        return {"/readyz": partial(ask_readyz, pipeline), "penstock status": status}

    def differences(self, database: Database, writers: Sequence[Writer]) -> Iterator[str]:
        believed = {
            (key.table, key.id): row.version
            for of in writers
            for key, row in of.rows.items()
            if row.exists
        }
        there = {
            (table, row[0]): row[1]
            for table in TABLES
            for row in database.execute(f"SELECT id, version FROM public.{table}")
        }
        for key in sorted({*believed, *there}):
            if believed.get(key) != there.get(key):
                yield f"{key}: believed {believed.get(key)}, there {there.get(key)}"


class Outbox:
    """Messages, by `penstock relay`, and another that stands by.

    The outbox keeps nothing that was delivered, and is swept by the test besides by the relay.
    """

    faults: Mapping[str, Callable[[World], None]] = OUTBOX_FAULTS
    syncs: Syncs | None = None

    def read(self, message: Msg) -> Said:
        return message_of_outbox(message)

    def prepare(self, database: Database, nats: str) -> None:
        with database.connect(autocommit=True) as connection:
            install(connection)
        database.execute(publisher.SCHEMA)
        config = {"sink_type": "nats", "url": nats, "subject": "chaos.{stream_table}"}
        values = [_PIPELINE, OUTBOX, json.dumps(config)]
        database.execute("SELECT tide.relay_set_outbox(%s, %s, 'chaos', %s)", values)
        database.execute("SELECT tide.relay_enable(%s)", [_PIPELINE])

    def processes(self, folder: Path, database: Database, nats: str) -> list[Penstock]:
        folders = [folder / "relay", folder / "standby"]
        for of in folders:
            of.mkdir()
        return [
            Penstock(of, "--url", database.url, command="relay", own_jvm=True) for of in folders
        ]

    def writer(self, url: str, number: int, keys: int, rate: float, seed: int) -> Writer:
        return Publisher(url, number, keys, rate, seed)

    def disturb(self, database: Database) -> None:
        database.execute("SELECT tide.outbox_sweep(%s)", [OUTBOX])

    def changes(self, *_: object) -> Changes | None:
        return None

    def asks(self, world: World) -> Mapping[str, Ask]:
        status = partial(
            ask_command, "outbox", "status", "--url", world.database.url,
            cwd=world.pipelines[0].folder,
        )  # fmt: skip
        return {"penstock outbox status": status}

    def differences(self, database: Database, writers: Sequence[Writer]) -> Iterator[str]:
        believed = {id_ for of in writers if isinstance(of, Publisher) for id_ in of.ids}
        there = {row[0] for row in database.execute("SELECT id FROM bookkeeping.published")}
        if lost := believed - there:
            yield f"published, and not there: {sorted(lost)[:10]}"
        if unknown := there - believed:
            yield f"there, and not known to be published: {sorted(unknown)[:10]}"


WORKLOADS: Final[Mapping[str, Callable[[int], Workload]]] = {
    "tables": lambda seed: Tables(Syncs(seed)),
    "outbox": lambda _: Outbox(),
}
"""By the name of the source, of a seed."""
