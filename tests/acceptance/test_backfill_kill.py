"""Backfills that are paused, killed and resumed while writers write: the property of them all.

Whatever happens to the pipeline, folding what a consumer got gives the table, and no read comes after
a newer change of its row.
"""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.backfill.request import OPEN, BackfillRequest, Backfills
from penstock.core.errors import StoreError
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.streams.store import Store

from ..backfill_help import KINDS, await_steady, fold, from_nats, from_stream, writing
from ..pipeline import PATIENCE, Penstock

ROWS = 2_000
SINKS = {"out": KINDS[:2], "events": KINDS[2:]}
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
spark:
  master: local[2]
"""


@pytest.mark.timeout(900)
def test_killed_paused_and_resumed(
    postgres: EmbeddedPostgres, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    """A table of each kind of key: killed where it runs, and where it is paused."""
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
            backfills.create(
                [
                    BackfillRequest("shop", sink, "public", kind.name)
                    for sink, kinds in SINKS.items()
                    for kind in kinds
                ]
            )
            for rows, is_paused in ((ROWS // 4, False), (2 * ROWS, True)):
                _wait_rows(pipeline, backfills, rows)
                open_now = [b.id for b in backfills.find(states=("waiting", "running"))]
                assert open_now, "it would show nothing"
                paused = open_now[:1] if is_paused else []
                for number in paused:
                    backfills.command(number, "pause")
                pipeline.kill_tree()
                pipeline.start()
                for number in paused:
                    try:
                        backfills.command(number, "resume")
                    except StoreError:
                        # What was planned before the pause is delivered, which may be all.
                        assert [b.state for b in backfills.find(ids=[number])] == ["done"]
            pipeline.wait_for(lambda: not backfills.find(states=OPEN), PATIENCE, "done with all")
        assert {b.state for b in backfills.find()} == {"done"}
        pipeline.wait_ready()
        await_steady(pipeline, source)
        for sink, kinds in SINKS.items():
            messages = (
                from_nats(streams, prefix) if sink == "out" else from_stream(database.url, sink)
            )
            for kind in kinds:
                folded = fold(kind, messages)
                assert folded.faults == [], sink
                assert folded.reads, "it would show nothing"
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

    pipeline.wait_for(there, PATIENCE, f"at {rows} rows")
