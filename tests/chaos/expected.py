"""What a sink or consumer that was made in the middle must have, may have, and must not have."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from penstock.embedded.handles import Msg

from .verdict import Verdict, steps_of
from .writer import TABLES, Key

State = Literal["must", "may", "not"]
Marks = list[tuple[int, State]]


class Said(NamedTuple):
    """A message: where it lies in the source, of which table and keys it is, and what it says."""

    lsn: int
    idx: int
    table: str
    keys: tuple[Key, ...]
    what: tuple[Any, ...]


@dataclass
class Expected:
    """`stream` holds what a sink or consumer got; `begin` are its marks, from which LSN on what counts.

    Of a pull consumer `got` is that.
    """

    stream: str
    begin: Marks = field(default_factory=lambda: [(0, "may")])
    removed: bool = False
    got: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self._marks = {table: list(self.begin) for table in TABLES}

    def mark(self, lsn: int, state: State, table: str | None = None) -> None:
        """Note what counts for what is committed from `lsn` on, in place of what was noted for that."""
        for name in TABLES if table is None else (table,):
            marks = self._marks[name]
            marks[bisect.bisect_left(marks, lsn, key=lambda mark: mark[0]) :] = [(lsn, state)]

    def marks_of(self, table: str) -> Marks:
        """Return what is noted of a table."""
        return list(self._marks[table])

    def state(self, said: Said) -> State:
        """Return what counts for a message."""
        marks = self._marks[said.table]
        at = bisect.bisect_right(marks, said.lsn, key=lambda mark: mark[0])
        return marks[at - 1][1]


def said_by(bodies: Iterable[Mapping[str, Any]]) -> list[tuple[str, Said]]:
    """Return what messages say, with their ids."""
    found = []
    for body in bodies:
        of = body["metadata"]
        keys = tuple(key for key, _ in steps_of(dict(body)))
        what = (body["action"], body["record"], body["changes"])
        said = Said(of["commit_lsn"], of["commit_idx"], of["table_name"], keys, what)
        found.append((of["idempotency_key"], said))
    return found


def bodies(messages: Iterable[Msg]) -> Iterable[Mapping[str, Any]]:
    """Yield the bodies of messages."""
    return (json.loads(message.data) for message in messages)


def judge(
    name: str,
    expected: Expected,
    all_of_them: Mapping[str, Said],
    got: Sequence[tuple[str, Said]],
    verdict: Verdict,
) -> None:
    """Blame what is lost, repeated, out of order or not its own in what `name` got."""
    seen: set[str] = set()
    last: dict[Key, tuple[int, int]] = {}
    for id_, said in got:
        if id_ in seen:
            verdict.blame("duplicate", f"{name}: {id_}")
            continue
        seen.add(id_)
        if all_of_them.get(id_) != said:
            verdict.blame("unexpected", f"{name}: {id_} {said}, committed {all_of_them.get(id_)}")
        elif expected.state(said) == "not":
            verdict.blame("unexpected", f"{name}: {id_} of {said.table} at {said.lsn} is filtered")
        for key in said.keys:
            at = (said.lsn, said.idx)
            if at <= last.get(key, (0, -1)):
                verdict.blame("out of order", f"{name}: {key} {at} behind {last[key]}")
            last[key] = at
    lost = [
        (said.lsn, id_)
        for id_, said in all_of_them.items()
        if expected.state(said) == "must" and id_ not in seen
    ]
    if lost:
        where = (
            f"of {len(all_of_them)} committed, {len(seen)} there; from {min(lost)} to {max(lost)}"
        )
        verdict.blame("lost", f"{name}: {len(lost)} {where}", len(lost))
