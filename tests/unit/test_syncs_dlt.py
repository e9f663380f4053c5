"""dlt's REST client: its import brings no file and no thread, and its paginators read what they need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from penstock.config.paginators import CursorPages
from penstock.syncs.connectors.paginators import paginator

CODE = """
import sys, threading
import penstock.syncs.connectors.ready.stripe, penstock.syncs.session, penstock.syncs.credentials
assert "dlt" not in sys.modules
from penstock.config.providers import RestProvider
from penstock.syncs.connectors.paginators import client, paginator
from penstock.syncs.connectors.make import ready_settings, connector_of, session_of
from penstock.syncs.local_budget import LocalBudget
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


@pytest.mark.parametrize(
    ("path", "body", "following"),
    [
        ("next", {"data": [{"id": 1}], "next": "b"}, "b"),
        ("meta.next", {"data": [], "meta": {"next": 12345678901234567890}}, "12345678901234567890"),
        # It leads into the list.
        ("data[0].next", {"data": [{"id": 1, "next": "c"}]}, "c"),
        ("$.data", {"data": "d"}, "d"),
        ("*.next", {"data": {"next": "e"}}, "e"),
    ],
)  # fmt: skip
def test_a_paginator_reads_an_answer_without_its_objects(
    path: str, body: dict[str, object], following: str
) -> None:
    settings = CursorPages(type="cursor", cursor_path=path, cursor_param="from")
    response = requests.Response()
    response._content = json.dumps(body).encode()
    made = paginator(settings, None, "data")
    made.update_state(response, [1])
    request = requests.Request("GET", "http://api.example", params={})
    made.update_request(request)
    assert str(request.params["from"]) == following
