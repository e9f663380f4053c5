"""A publisher's transaction that stays open; `python -m tests.chaos --open 60` takes longer."""

from __future__ import annotations

from pathlib import Path

from penstock.embedded.handles import Database
from penstock.embedded.nats import EmbeddedNats

from ..chaos.open_transaction import keep_open

MESSAGES = 1000


def test_others_are_delivered_and_swept_meanwhile(
    database: Database, server_dir: Path, tmp_path: Path
) -> None:
    with EmbeddedNats(server_dir / "nats-open") as server:
        outcome = keep_open(tmp_path, database, server, messages=MESSAGES)
    assert len(outcome.meanwhile) >= MESSAGES
