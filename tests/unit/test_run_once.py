"""`penstock run --once` refuses what never comes to an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import service
from penstock.config.file import load
from penstock.core.errors import ConfigError

FILE = """\
store: postgresql://127.0.0.1:1/x
credentials:
  live: {provider: stripe, properties: {api_key: x}}
syncs:
  customers: {provider: stripe, collections: [customers], credential: live, status: STATUS}
"""


@pytest.mark.parametrize("status", ["active", "disabled"])
def test_syncs_are_refused_unless_they_are_disabled(tmp_path: Path, status: str) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(FILE.replace("STATUS", status))
    config = load(file, {})
    reason = "sync customers is read for as long" if status == "active" else "127.0.0.1"
    with pytest.raises(Exception, match=reason) as raised:
        service.run(config, once=True, listen="")
    assert isinstance(raised.value, ConfigError) == (status == "active")
