"""Backfills that are paused, killed and resumed while writers write: the property of them all.

Whatever happens to the pipeline, folding what a consumer got gives the table, and no read comes after
a newer change of its row.
"""

from __future__ import annotations

import random
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.streams.backfills import OPEN, Backfills
from penstock.streams.store import Store

from ..backfill_help import KINDS, fold, from_nats, from_stream, settle, writing
from ..pipeline import Penstock, penstock

ROWS = 4_000
KILLS = 2
CONFIG = """\
store: {store}
sources:
  shop:
    type: postgres
    url: {source}
    tables: ["public.*"]
sinks:
  out:
    type: nats
    source: shop
    url: {nats}
    subject: "{prefix}.{{table}}"
  events:
    type: stream
    source: shop
  latest:
    type: stream
    source: shop
    kind: rows
spark:
  master: local[2]
"""


@pytest.mark.timeout(600)  # on a machine that has other work, too
@pytest.mark.parametrize("seed", [1])
def test_killed_paused_and_resumed(
    postgres: EmbeddedPostgres, nats_server: EmbeddedNats, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    prefix = f"k{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        enter = stack.enter_context
        source, database = (
            Database(name, postgres.create_database(name))
            for name in (f"{prefix}_source", f"{prefix}_store")
        )
        for each in (source, database):
            stack.callback(each.drop, postgres.url)
        for kind in KINDS:
            kind.create(source.url, ROWS)
        streams = enter(JetStream(nats_server.url))
        streams.add_stream(prefix, f"{prefix}.>")
        (tmp_path / "penstock.yaml").write_text(
            CONFIG.format(
                store=database.url, source=source.url, nats=nats_server.url, prefix=prefix
            )
        )
        pipeline = enter(Penstock(tmp_path)).start().wait_ready()
        store = enter(Store.open(database.url))
        backfills = Backfills(store)
        with writing(source.url, KINDS, pause=0.02):
            for sink in ("out", "events", "latest"):
                started = penstock("backfill", "start", "--sink", sink, cwd=tmp_path)
                assert started.returncode == 0, started.stderr
            rows = len(KINDS) * 3 * ROWS
            for number in range(1, KILLS + 1):
                # Somewhere between the last end and this part of the way, and in any state.
                _wait_rows(pipeline, backfills, rng.randint(0, rows * number // (KILLS + 2)))
                open_now = [b.id for b in backfills.find(states=("waiting", "running"))]
                paused = rng.sample(open_now, min(2, len(open_now)))
                for id_ in paused:
                    backfills.command(id_, "pause")
                time.sleep(rng.random())
                pipeline.kill_tree()
                pipeline.start()
                for id_ in paused:
                    backfills.command(id_, "resume")
                pipeline.wait_ready()
            pipeline.wait_for(lambda: not backfills.find(states=OPEN), 120, "done with all")
        assert {b.state for b in backfills.find()} == {"done"}
        settle(pipeline, source)
        for sink in ("out", "events", "latest"):
            messages = (
                from_nats(streams, prefix) if sink == "out" else from_stream(database.url, sink)
            )
            for kind in KINDS:
                folded = fold(kind, messages, whole=sink != "latest")
                assert folded.faults == [], sink
                expected = kind.rows(source.url)
                missing = expected.keys() - folded.rows.keys()
                assert not missing, f"{sink}: {len(missing)} rows of {kind.name} were skipped"
                assert folded.rows == expected, sink
        assert pipeline.stop() == 0


def _wait_rows(pipeline: Penstock, backfills: Backfills, rows: int) -> None:
    """Wait until so many rows are delivered in all, or nothing is left to do."""

    def there() -> bool:
        found = backfills.find()
        done = sum(b.rows_done for b in found)
        return done >= rows or not any(b.is_open for b in found)

    pipeline.wait_for(there, 90, f"at {rows} rows")
