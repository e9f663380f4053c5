"""`penstock demo` with the real pipeline, ended by Ctrl-C; `test_install.py` has one to its own end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


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


def test_ctrl_c_ends_the_demo_with_its_summary(temp: Path) -> None:
    """SIGTERM does, too: `tests/integration/test_demo_session.py`."""
    demo = start_demo(temp, "--duration", "600", "--rate", "100")
    assert demo.stdout is not None
    for line in demo.stdout:
        if "writing: committed" in line and " delivered 1," not in line:
            break
    family = psutil.Process(demo.pid).children(recursive=True)
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=90)
    assert demo.returncode == 0, out + err
    assert "out of order" in out
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert left_over(temp) == []
