"""pgoutput messages into chunks: positions, tables, barriers. No I/O and no lock of its own.

The catalog has to be asked about each Relation message, which may take a while, so `handle` hands
it back, and `learn` takes the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

import structlog

from penstock.core.message import Position, format_lsn
from penstock.postgres import pgoutput
from penstock.postgres.chunk import Chunk, ChunkBuilder
from penstock.postgres.pgoutput import (
    Begin,
    Commit,
    Delete,
    Insert,
    ProtocolError,
    Relation,
    Update,
)
from penstock.postgres.progress import SlotProgress
from penstock.postgres.raw_rows import RawRows, raw_rows
from penstock.postgres.table import Shape, Table
from penstock.postgres.transaction import Transaction
from penstock.postgres.values import Converter
from penstock.postgres.watermarks import Recent, Watch

CHUNK_ROWS: Final = 4_000
CHUNK_BYTES: Final = 2 << 20
_MOVED: Final = 10_000  # rows with a new key that are remembered under their old one
_ALL: Final = 1 << 62
PREFIX: Final = "penstock"
"""Of the logical messages that are ours."""
_CHANGES: Final = (b"I", b"U")
"""Of a new row: an N behind the relation's OID says that no old one comes first."""
_OID: Final = Struct(">I").unpack_from

Includes = Callable[[str, str], bool]
IsAltered = Callable[[int, tuple[str, str], list[tuple[str, int, int]]], bool]
Grouping = Callable[[str, str], tuple[list[str] | None, list[str] | None]]

log = structlog.get_logger("penstock.capture")


class Decoder:
    """Turns one slot's messages into chunks.

    Args:
        start: Messages up to and with this position are passed by.
        splits: The number of splits of a chunk.
        includes: Returns whether a table is captured.
        grouping: Gives a table's `group_by` and `split_by` (see `Table`).
        truncates: Whether a truncate becomes a message.
        emit: Takes each chunk.
        is_altered: Returns whether the query's plan was not made for a table's rows (`Planned`).
    """

    def __init__(
        self,
        start: Position,
        *,
        splits: int,
        includes: Includes,
        grouping: Grouping,
        truncates: bool,
        emit: Callable[[Chunk], None],
        is_altered: IsAltered = lambda *_: False,
    ) -> None:
        self.progress = SlotProgress(start)
        self.recent = Recent()
        self.watch: Watch | None = None
        """The table under backfill."""
        self.altered: tuple[Position, tuple[str, str]] | None = None
        """The newest message before rows that the query's plan was not made for, and their table."""
        self.truncates_skipped = 0
        self._includes = includes
        self._grouping = grouping
        self._truncates = truncates
        self._emit = emit
        self._is_altered = is_altered
        self._builder = ChunkBuilder(start, splits)
        self._database = self._tag = ""
        self._utf8 = True
        self._tag_bytes = b""
        self._tables: dict[int, Table | None] = {}
        self._raw: dict[int, RawRows] = {}
        self._before: dict[int, Table] = {}
        self._moved: dict[int, int] = {}
        self._begun: Begin | None = None
        self._transaction: Transaction | None = None
        self._lsn, self._idx = start  # of the newest message read
        self._next_idx = 0
        self._skip_idx = -1
        self._barrier = False

    @property
    def read(self) -> Position:
        """The position of the newest message that was read."""
        # Once a transaction: half the time of `Position`'s own call.
        return tuple.__new__(Position, (self._lsn, self._idx))

    @property
    def lsn(self) -> int:
        """The commit LSN of the transaction under way, 0 between two."""
        return 0 if self._begun is None else self._begun.final_lsn

    @property
    def xid(self) -> int | None:
        """The id of the transaction under way, None between two."""
        return None if self._begun is None else self._begun.xid

    @property
    def source(self) -> tuple[str, str]:
        """The database's name and the source's tag; empty before the first connection."""
        return self._database, self._tag

    @property
    def unsealed(self) -> int:
        """The bytes of WAL that are not in a chunk yet."""
        return self._builder.bytes

    @property
    def unsealed_rows(self) -> int:
        """The messages that are not in a chunk yet."""
        return self._builder.rows

    def connected(self, database: str, tag: str, *, utf8: bool = True) -> None:
        """Start anew on a new connection, which sends every relation again.

        `utf8`: its text is UTF-8 for certain.
        """
        self.progress.interrupted()
        self._utf8 = utf8
        self._database, self._tag, self._tag_bytes = database, tag, tag.encode()
        self._tables.clear()
        self._raw.clear()
        self._begun = None

    def handle(self, data: bytes) -> Relation | None:
        """Take one message; returns the relation to look up and `learn` before the next one.

        Raises:
            ProtocolError: The message can't be one, or not at this place.
        """
        kind = data[:1]
        if kind == b"B":
            self._begin(pgoutput.begin(data))
            return None
        if kind == b"C":
            self._commit(pgoutput.commit(data))
            return None
        if kind in _CHANGES and data[5:6] == b"N" and self._wait(data):
            return None
        event = pgoutput.parse(data)
        if isinstance(event, Insert | Update | Delete):
            self._change(event, len(data))
        elif isinstance(event, pgoutput.Relation):
            if self._includes(event.schema, event.name):
                return event
            self._tables[event.oid] = None
            self._raw.pop(event.oid, None)
        elif isinstance(event, pgoutput.Truncate):
            self._truncate(event)
        elif isinstance(event, pgoutput.Message):
            self._message(event)
        # A message of ours has nothing of Origin and Type.
        return None

    def learn(
        self, relation: Relation, shape: Shape, converter: Callable[[int], Converter | None]
    ) -> None:
        """Take what the catalog has of the relation that `handle` returned."""
        group_by, split_by = self._grouping(relation.schema, relation.name)
        table = Table(
            relation, shape=shape, converter=converter, database=self._database, tag=self._tag,
            group_by=group_by, split_by=split_by, moved=self._moved,
        )  # fmt: skip
        before = self._before.get(relation.oid)
        if before is not None and not table.same_grouping(before):
            self._fence()
        if table.groups.missing and (
            before is None or before.groups.missing != table.groups.missing
        ):
            log.warning(
                "the table lacks columns to group by; its own key takes their place",
                table=f"{relation.schema}.{relation.name}",
                columns=table.groups.missing,
                lsn=format_lsn(self.lsn),
            )
        self._tables[relation.oid] = self._before[relation.oid] = table
        raw = raw_rows(table, utf8=self._utf8)
        if raw is None:
            self._raw.pop(relation.oid, None)
        else:
            self._raw[relation.oid] = raw
        if self.altered is None and self._next_idx > self._skip_idx:
            columns = [(c.name, c.type_oid, c.type_modifier) for c in relation.columns]
            name = relation.schema, relation.name
            if self._is_altered(self.lsn, name, columns):
                self.seal()
                self.altered = self.read, name

    def seal(self) -> None:
        """Make a chunk of what was read since the last one, if anything was."""
        builder = self._builder
        if builder.rows:
            barrier, self._barrier = self._barrier, False
            self._emit(builder.take(self.read, barrier=barrier))
            if len(self._moved) > _MOVED:
                self._moved.clear()
                self._barrier = True

    def _fence(self) -> None:
        """Keep what follows out of the batch of what came before: their hashes don't compare."""
        self.seal()
        self._barrier = True

    def _begin(self, event: Begin) -> None:
        if self._begun is not None:
            raise ProtocolError("Begin inside a transaction")
        lsn = event.final_lsn
        self._begun = event
        self._transaction = None
        self._next_idx = 0
        self.recent.add(event.xid)
        if self.watch is not None:
            self.watch.begin(event.xid)
        # After a reconnect the server starts at the last transaction that it knows confirmed.
        self._skip_idx = -1 if lsn > self._lsn else self._idx if lsn == self._lsn else _ALL
        self.progress.begin(lsn)

    def _commit(self, event: Commit) -> None:
        if self._begun is None:
            raise ProtocolError("Commit without Begin")
        self._begun = None
        self.progress.commit(self._lsn, self._idx, event.end_lsn, event.timestamp)

    def _under_way(self, what: str) -> Transaction:
        """Return what the messages of the transaction under way share."""
        begun = self._begun
        if begun is None:
            raise ProtocolError(f"{what} outside of a transaction")
        if self._transaction is None:
            self._transaction = Transaction(*begun, self._tag_bytes)
        return self._transaction

    def _table(self, oid: int) -> Table | None:
        try:
            return self._tables[oid]
        except KeyError:
            raise ProtocolError(f"a change of relation {oid}, which was never described") from None

    def _wait(self, data: bytes) -> bool:
        """Keep a change until its chunk is sealed; False where it must be made a message at once."""
        rows, begun = self._raw.get(_OID(data, 1)[0]), self._begun
        if rows is None or begun is None or self.watch is not None:
            return False
        idx = self._next_idx
        self._next_idx = idx + 1
        if idx > self._skip_idx:
            lsn, microseconds, xid = begun
            rows.data.append(data)
            rows.indexes.append(idx)
            rows.lsns.append(lsn)
            rows.microseconds.append(microseconds)
            rows.xids.append(xid)
            self._builder.add_raw(rows, len(data))
            self._added(lsn, idx)
        return True

    def _change(self, event: Insert | Update | Delete, size: int) -> None:
        idx = self._next_idx
        self._next_idx = idx + 1
        table = self._table(event.relation)
        if table is None or idx <= self._skip_idx:
            return
        transaction = self._under_way("a change")
        self._builder.add(table.change(event, transaction, idx), size)
        if self.watch is not None:
            self.watch.change(table, event, transaction.xid)
        self._added(transaction.lsn, idx)

    def _added(self, lsn: int, idx: int) -> None:
        self._lsn, self._idx = lsn, idx
        builder = self._builder
        if builder.rows >= CHUNK_ROWS or builder.bytes >= CHUNK_BYTES:
            self.seal()

    def _truncate(self, event: pgoutput.Truncate) -> None:
        transaction = self._under_way("Truncate")
        for oid in event.relations:
            idx = self._next_idx
            self._next_idx += 1
            table = self._table(oid)
            if table is None or idx <= self._skip_idx:
                continue
            if self.watch is not None:
                self.watch.truncate(table, transaction.xid)
            if not self._truncates:
                self.truncates_skipped += 1
                log.warning(
                    "truncate not delivered: no sink lists the action",
                    table=f"{table.schema}.{table.name}",
                    lsn=format_lsn(transaction.lsn),
                )
                continue
            # A truncate concerns every row of its table, so nothing may overtake it.
            self._fence()
            self._builder.add(table.truncate(transaction, idx), 100)
            self._lsn, self._idx = transaction.lsn, idx
            self.seal()

    def _message(self, event: pgoutput.Message) -> None:
        if event.prefix != PREFIX or not event.transactional or self.watch is None:
            return
        if self._begun is None:
            raise ProtocolError("a transactional message outside of a transaction")
        mark = self.watch.watermark(event.content, self._begun, self._moves)
        if mark is None:
            return
        if mark.reads is not None:
            self.seal()
            start, end = self.read, mark.reads.end
            self._emit(self._builder.reads(start, mark.reads, mark.rows))
            self._lsn, self._idx = end
        mark.passed(mark)

    def _moves(self, schema: str, name: str) -> tuple[tuple[int, int], ...]:
        tied = any(
            t.groups.tied for t in self._before.values() if (t.schema, t.name) == (schema, name)
        )
        return tuple(self._moved.items()) if tied else ()
