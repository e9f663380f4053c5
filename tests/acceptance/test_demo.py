"""`penstock demo --console`, with the real pipeline; `test_install.py` has a demo to its own end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from ..waits import await_true

CONSOLE = re.compile(r"its console: (http://\S+)/console, with the token (pst_\S+)")


@pytest.fixture
def temp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def start_demo(temp: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "demo", *options],
        env={**os.environ, "TMPDIR": str(temp)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_over(temp: Path) -> list[str]:
    """The demo's folder, or any process that was started with it."""
    found = [str(path) for path in temp.glob("penstock-demo-*")]
    for process in psutil.process_iter(["cmdline", "status"]):
        if any(str(temp) in part for part in process.info["cmdline"] or []):
            found.append(" ".join(process.info["cmdline"]))
    return found


def source_row(client: httpx.Client) -> list[str]:
    """Return the words that the console's overview has of the demo's source."""
    page = client.get("/console/overview").raise_for_status().text
    row = next(each for each in page.split("<tr>") if "/console/sources/shop" in each)
    return re.sub(r"<[^>]*>", " ", row.partition("</tr>")[0]).split()


def test_its_console_shows_traffic_and_ctrl_c_ends_it_with_its_summary(temp: Path) -> None:
    """SIGTERM does, too: `tests/integration/test_demo_session.py`."""
    demo = start_demo(temp, "--console", "--rate", "100")
    assert demo.stdout is not None
    console = None
    for line in demo.stdout:
        console = console or CONSOLE.search(line)
        if "writing: committed" in line and " delivered 1," not in line:
            break
    assert console is not None
    with httpx.Client(base_url=console[1], trust_env=False, timeout=60) as client:
        login = client.get("/console/login").text
        csrf = re.search(r'name="csrf" value="(\w+)"', login)
        assert csrf is not None
        form = {"csrf": csrf[1], "token": console[2]}
        assert client.post("/console/login", data=form).headers["location"] == "/console"

        def captured() -> int:
            return int(source_row(client)[3].replace(",", ""))

        await_true(lambda: captured() > 100, what="the overview has what the demo writes")
        assert source_row(client)[:3] == ["shop", "ready", "postgres"]
        before = captured()
        await_true(lambda: captured() > before, what="its figures grow")
    family = psutil.Process(demo.pid).children(recursive=True)
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=90)
    assert demo.returncode == 0, out + err
    assert "out of order" in out
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert left_over(temp) == []
