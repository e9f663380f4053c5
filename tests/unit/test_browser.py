"""What the run reports of the console's tests where there is no browser."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.browser import MISSING, VARIABLE, chromium, report_missing


def reported(*skipped: str) -> list[str]:
    """Return the lines of a run that has skipped tests for these reasons."""
    lines: list[str] = []
    stats = {
        "skipped": [SimpleNamespace(longrepr=("test.py", 7, f"Skipped: {why}")) for why in skipped]
    }
    reporter: Any = SimpleNamespace(stats=stats if skipped else {}, write_line=lines.append)
    report_missing(cast(pytest.TerminalReporter, reporter))
    return lines


def test_a_run_without_a_browser_reports_how_many_tests_it_left_out_and_how_to_get_one() -> None:
    (line,) = reported(MISSING, "no such server", MISSING)
    assert line.startswith("2 tests of the console left out: no chromium was found; ")
    assert "apt-get install chromium-headless-shell" in line
    assert VARIABLE in line
    assert reported() == reported("no such server") == []


def test_a_browser_is_the_named_one_or_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert chromium() is None
    (tmp_path / "chromium").write_text("#!/bin/sh\n")
    (tmp_path / "chromium").chmod(0o755)
    assert chromium() == str(tmp_path / "chromium")
    monkeypatch.setenv(VARIABLE, "/other/chrome")
    assert chromium() == "/other/chrome"
