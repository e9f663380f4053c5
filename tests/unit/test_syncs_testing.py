"""The how-to "Write a connector", as it is printed; and ready connectors in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.testing import ApiAnswer, ApiRequest, InMemorySync

HOW_TO = Path(__file__).parents[2] / "docs/how-to/write-a-connector.md"


def test_the_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HOW_TO.read_text()
    settings = re.findall(r"```yaml\n(.*?)```", text, re.S)
    code = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "penstock.yaml").write_text(settings[0])
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code[0], "how-to", "exec"), names)
    names["test_contacts"]()
    names["test_a_limit_is_honoured"]()
    (tmp_path / "connectors").mkdir()
    (tmp_path / "connectors/legacy.py").write_text(code[1])
    orders = [{"number": 1, "changed": "2026-05-01"}]
    legacy = yaml.safe_load(settings[1])["providers"]["legacy"]
    sync = InMemorySync(legacy, "orders", lambda _: {"orders": orders})
    sync.backfill()
    sync.poll()
    assert sync.requests[1].params == {"since": "2026-04-30T23:59:00Z"}
    orders.clear()
    sync.sweep()
    assert (sync.records, sync.deleted) == ({}, {"1"})


def test_a_ready_connector() -> None:
    def api(request: ApiRequest) -> Any:
        assert request.path == "/repos/o/r"
        return ApiAnswer({"message": "Bad credentials"}, status=401)

    sync = InMemorySync("github", "issues", api, {"token": "t", "repository": "o/r"})
    with pytest.raises(Exception, match="Bad credentials"):
        sync.check()


def test_an_unknown_type() -> None:
    with pytest.raises(ValueError, match="rest, python"):
        InMemorySync({"type": "soap"}, "x", lambda _: None)
