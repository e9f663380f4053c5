"""`penstock demo` as a user runs it: the real pipeline, everything delivered, nothing left."""

from __future__ import annotations

import json
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


def test_the_demo_delivers_everything_in_order(temp: Path) -> None:
    demo = start_demo(temp, "--duration", "8", "--rate", "300", "--json")
    out, err = demo.communicate(timeout=300)
    assert demo.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert (result["lost"], result["out_of_order"], result["unexpected"]) == (0, 0, 0)
    assert result["duplicates"] == 0  # nothing failed, so nothing had to be sent again
    # A busy machine may not reach the rate; what it does reach holds up to the end.
    assert result["delivered"] == result["committed"] >= 8 * result["rows_per_second"] * 0.8
    assert result["rows_per_second"] > 0
    assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99"]
    for way in ("stream", "events", "records"):
        of = result[way]
        assert (of["lost"], of["out_of_order"], of["unexpected"]) == (0, 0, 0), way
        assert of["delivered"] == of["committed"], way
    # The customers that were there before, and those that were made, changed and deleted meanwhile.
    assert result["events"]["committed"] == result["records"]["committed"] > 40
    assert left_over(temp) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_with_its_summary(temp: Path, number: int) -> None:
    demo = start_demo(temp, "--duration", "600", "--rate", "100")
    assert demo.stdout is not None
    for line in demo.stdout:
        if "writing: committed" in line and " delivered 1," not in line:
            break
    family = psutil.Process(demo.pid).children(recursive=True)
    demo.send_signal(number)
    out, err = demo.communicate(timeout=90)
    assert demo.returncode == 0, out + err
    assert "out of order" in out
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert left_over(temp) == []
