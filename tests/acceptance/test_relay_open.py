"""A publisher's transaction that stays open; `python -m tests.chaos --open 60` takes longer."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from penstock.embedded.handles import Database
from penstock.embedded.nats import EmbeddedNats

from ..chaos.open_transaction import OTHERS, RATE, keep_open, p99

SECONDS = 8


def test_others_are_delivered_at_once_meanwhile(
    database: Database, server_dir: Path, tmp_path: Path
) -> None:
    with EmbeddedNats(server_dir / "nats-open") as server:
        outcome = keep_open(tmp_path, database, server, seconds=SECONDS)
    count = len(outcome.meanwhile)
    assert count > SECONDS * RATE * OTHERS / 4
    assert outcome.swept_meanwhile > count / 4, outcome.line()
    # A machine that is busy with something else was so before, too.
    assert median(outcome.meanwhile) < max(1, 2 * median(outcome.before)), outcome.line()
    assert p99(outcome.meanwhile) < max(1, 2 * p99(outcome.before)), outcome.line()
