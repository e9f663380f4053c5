"""What a start does not load: each takes a part of it, and few need them."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import penstock.api.app, penstock.cli.service, penstock.push.pusher, penstock.runtime.run
print([name for name in ("asyncssh", "dlt", "pandas") if name in sys.modules])
"""


def test_a_run_and_an_api_load_nothing_for_bastions_and_syncs_alone() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout == "[]\n"
