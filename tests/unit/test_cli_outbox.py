"""What `penstock outbox` prints for a URL that is none, before anything is asked."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app


@pytest.mark.parametrize("command", ["install", "status"])
@pytest.mark.parametrize(
    ("url", "output"),
    [
        ("", "--url: empty"),
        ("psql://app:hunter6@db/shop", "--url: not a Postgres URL"),
        ("postgresql://app:pass@hunter6@db/shop", "write @ as %40"),
    ],
)
def test_a_url_that_is_none_is_refused_and_not_shown(command: str, url: str, output: str) -> None:
    result = CliRunner().invoke(app, ["outbox", command, "--url", url])
    assert (result.exit_code, result.stdout) == (2, "")
    assert output in result.stderr
    assert "hunter6" not in result.stderr
