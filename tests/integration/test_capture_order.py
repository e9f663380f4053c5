"""Order per group over a real Postgres, whatever the replica identity lets a delete have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from tests.integration.capturing import Message, Reader, capturing, messages, of, prepare

from penstock.embedded.handles import Database
from penstock.postgres.chunk import partition

Columns = list[str] | None
TABLE = "CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, b int)"
FULL = "ALTER TABLE t REPLICA IDENTITY FULL"
INDEX = (
    "CREATE UNIQUE INDEX t_id_a ON t (id, a)",
    "ALTER TABLE t REPLICA IDENTITY USING INDEX t_id_a",
)


def write(database: Database, seed: int) -> list[int]:
    """Make changes in some order; return the row that each message is of, rows named by birth."""
    choose = random.Random(seed)
    alive: dict[int, int] = {}
    born, history = 0, []
    with database.connect() as connection:
        for _ in range(300):
            free = [key for key in range(8) if key not in alive]
            action = choose.choice("iuuukkd")
            if action == "i" and free:
                key = choose.choice(free)
                born += 1
                alive[key] = born
                values = [key, choose.randrange(3), choose.randrange(3)]
                connection.execute("INSERT INTO t VALUES (%s, %s, %s)", values)
            elif not alive:
                continue
            elif action == "d":
                key = choose.choice(list(alive))
                history.append(alive.pop(key))
                connection.execute("DELETE FROM t WHERE id = %s", [key])
                continue
            elif action == "k" and free:
                old, key = choose.choice(list(alive)), choose.choice(free)
                alive[key] = alive.pop(old)
                connection.execute(
                    "UPDATE t SET id = %s, a = %s WHERE id = %s", [key, choose.randrange(3), old]
                )
            else:
                key = choose.choice(list(alive))
                values = [choose.randrange(3), choose.randrange(3), key]
                connection.execute("UPDATE t SET a = %s, b = %s WHERE id = %s", values)
            history.append(alive[key])
            if choose.random() < 0.3:
                connection.commit()
    return history


@pytest.mark.parametrize("identity", [(), (FULL,), INDEX], ids=["default", "full", "index"])
@pytest.mark.parametrize(
    ("group_by", "split_by"),
    [
        (None, None),
        (["a"], None),
        (["a", "b"], None),
        (["id", "b"], None),
        (None, ["a"]),
        (None, []),
    ],
    ids=str,
)
def test_order(
    database: Database, identity: Sequence[str], group_by: Columns, split_by: Columns
) -> None:
    """A row's changes are always chained, and so are a group's; both stay in one task."""
    prepare(database, TABLE, *identity)
    history = write(database, seed=7)
    with Reader(database.url, splits=3, grouping=lambda *_: (group_by, split_by)) as reader:
        chunks = []
        while more := reader.batch():
            chunks += more
    # As one batch, however many it was read in.
    batches = partition(chunks, 3)
    found = messages(batches)
    assert len(found) == len(history)
    task = {m.position: n for n, batch in enumerate(batches) for m in messages([batch])}
    rows: dict[int, list[Message]] = {}
    for message, born in zip(found, history, strict=True):
        rows.setdefault(born, []).append(message)
    for changes in rows.values():
        for before, after in pairwise(changes):
            assert before.groups & after.groups, (before, after)
        assert len({task[m.position] for m in changes}) == 1
    columns = group_by or (split_by or ["id"])
    reported = [m for m in found if all(column in m.record for column in columns)]
    groups: dict[tuple[Any, ...], list[Message]] = {}
    for message in reported:
        groups.setdefault(tuple(message.record[c] for c in columns), []).append(message)
    for changes in groups.values():
        assert len({task[m.position] for m in changes}) == 1
        if split_by is None:
            assert set.intersection(*(m.groups for m in changes)), "a group's own hash"


def test_a_key_that_is_another_while_it_runs(database: Database) -> None:
    """Messages on either side of the change can't be ordered by hash, so no batch has both."""
    with capturing(database, TABLE, splits=3) as reader:
        with database.connect() as connection:
            connection.execute("INSERT INTO t SELECT i, i, i FROM generate_series(1, 20) i")
            connection.execute("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (a)")
            connection.execute("UPDATE t SET b = 0")
        found = []
        while chunks := reader.batch():
            found.append(of(chunks))
    assert sum(map(len, found)) == 40
    for batch in found:
        assert len({message.action for message in batch}) == 1
