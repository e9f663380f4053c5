"""`penstock sync` over a store: what is listed, shown and asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from psycopg.types.json import Jsonb
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.desired.from_file import apply_file
from penstock.embedded.handles import Database
from penstock.streams.store import Store
from penstock.syncs.controls import SyncControls

FILE = """\
store: "{url}"
credentials: {{live: {{provider: stripe, properties: {{api_key: never-shown}}}}}}
syncs:
  billing: {{provider: stripe, collections: [customers, invoices], credential: live}}
"""


def sync(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sync", *words])
    return result.exit_code, result.output


def test_a_list_of_nothing_reports_so(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_STORE_URL", database.url)
    Store.open(database.url).close()
    for kind in ("sync", "consumer", "token"):
        result = CliRunner().invoke(app, [kind, "list"])
        assert result.exit_code == 0, result.output
        assert result.output.startswith(f"There is no {kind}")
        assert json.loads(CliRunner().invoke(app, [kind, "list", "--json"]).output) == []


def test_syncs_are_listed_shown_and_asked(
    tmp_path: Path, database: Database, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_STORE_URL", database.url)
    (tmp_path / "file.yaml").write_text(FILE.format(url=database.url))
    with Store.open(database.url) as store:
        snapshot = apply_file(store, tmp_path / "file.yaml", {})
        id_ = snapshot.entities["sync", "billing"].id
        controls = SyncControls(store)
        code, text = sync("list", "--json")
        assert code == 0, text
        (listed,) = json.loads(text)
        assert (listed["name"], listed["id"], listed["status"]) == ("billing", str(id_), "active")
        assert sync("show", "billing")[1].count("waiting") == 2
        shown = {
            "phase": "backfill", "backfill": {"share": 0.25}, "deletes": "none",
            "health": {"code": "forbidden", "cause": "It may not.", "remedy": "Let it."},
        }  # fmt: skip
        database.execute(
            "INSERT INTO penstock.sync_collections (sync_id, collection_id, progress, shown)"
            " VALUES (%s, 'stripe:customers', '{}', %s)",
            [id_, Jsonb(shown)],
        )
        code, text = sync("show", str(id_))
        assert code == 0, text
        assert "backfill 25%" in text
        assert "stripe:customers: It may not. Let it." in text
        assert "stripe:customers: deletes: none. The API does not show them." in text
        assert "forbidden" in sync("list")[1]
        assert sync("run", "billing", "--collection", "invoices")[0] == 0
        assert sync("backfill", "billing")[0] == 0
        assert sync("pause", "billing")[0] == 0
        assert controls.paused() == {id_}
        assert json.loads(sync("list", "--json")[1])[0]["status"] == "paused"
        assert sync("resume", "billing")[0] == 0
        assert controls.paused() == set()
        assert [each[:3] for each in controls.asked()] == [
            (id_, "stripe:invoices", "run"), (id_, None, "backfill"), (id_, None, "resume"),
        ]  # fmt: skip
        for words, expected in (
            (("show", "biling"), "did you mean billing?"),
            (("run", "billing", "--collection", "custmers"), "did you mean stripe:customers?"),
        ):
            code, text = sync(*words)
            assert (code, expected in text) == (2, True), text
