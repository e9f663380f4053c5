"""What the import of dlt's REST client brings: no file, no thread, and only where pages need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys, threading
import penstock.syncs.connectors.ready.stripe, penstock.syncs.session, penstock.syncs.credentials
assert "dlt" not in sys.modules
from penstock.config.providers import RestProvider
from penstock.syncs.connectors.paginators import client, paginator
from penstock.syncs.connectors.make import ready_settings, connector_of, session_of
from penstock.syncs.session import LocalBudget
of = connector_of("github", None, {"token": "t", "repository": "o/r"})
client(session_of(of.access, LocalBudget()), "https://api.github.com", {})
paginator(ready_settings("github").paginator, None)
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
"""


def test_what_the_import_brings(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-B", "-c", CODE], check=True, cwd=tmp_path, timeout=60,
        env={"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)},
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
