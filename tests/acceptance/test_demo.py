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
MESSAGE = re.compile(r"(?<=/messages/).*")


@pytest.fixture
def temp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def demo(temp: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo with its console; ended with the test, whatever that finds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "demo", "--console", "--rate", "100"],
        env={**os.environ, "TMPDIR": str(temp)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=90)


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


def broken_links(client: httpx.Client) -> dict[str, int]:
    """Follow the links of the console's pages; return those that lead nowhere, with their status."""
    left, seen, broken = ["/console/overview"], {"/console/overview"}, {}
    while left:
        page = client.get(left.pop())
        if page.status_code >= 300:
            broken[page.request.url.path] = page.status_code
        for link in re.findall(r'href="(/console/[^"?#]*)', page.text):
            kind = MESSAGE.sub("", link)  # of the messages of a stream one is enough
            if kind not in seen and "/static/" not in link:
                seen.add(kind)
                left.append(link)
    assert len(seen) > 30
    return broken


def check_console(url: str, token: str) -> None:
    """Log in at the console; check that it shows traffic, and that all of its links lead somewhere."""
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        csrf = re.search(r'name="csrf" value="(\w+)"', client.get("/console/login").text)
        assert csrf is not None
        login = client.post("/console/login", data={"csrf": csrf[1], "token": token})
        assert login.headers["location"] == "/console"

        def captured() -> int:
            return int(source_row(client)[3].replace(",", ""))

        await_true(lambda: captured() > 100, what="the overview has what the demo writes")
        assert source_row(client)[:3] == ["shop", "ready", "postgres"]
        before = captured()
        await_true(lambda: captured() > before, what="its figures grow")
        assert broken_links(client) == {}


def test_its_console_shows_traffic_and_ctrl_c_ends_it_with_its_summary(
    temp: Path, demo: subprocess.Popen[str]
) -> None:
    """SIGTERM does, too: `tests/integration/test_demo_session.py`."""
    assert demo.stdout is not None
    console = None
    for line in demo.stdout:
        console = console or CONSOLE.search(line)
        if "writing: committed" in line and " delivered 1," not in line:
            break
    assert console is not None
    check_console(console[1], console[2])
    family = psutil.Process(demo.pid).children(recursive=True)
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=90)
    assert demo.returncode == 0, out + err
    assert "out of order" in out
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert left_over(temp) == []
