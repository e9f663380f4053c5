"""The demo around a pipeline that may misbehave: what it reports, and that it leaves nothing.

The pipeline here is a stand-in; the real one is in `tests/acceptance/test_demo.py`.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.demo import run

FAKE = Path(__file__).with_name("fake_pipeline.py")

DEMO = """
import sys
from penstock.demo import run
def fake(config, listen):
    return [sys.executable, sys.argv[1], str(config), listen, "none"]
sys.exit(run(float("inf"), 200, True, pipeline=fake))
"""


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the demo makes its folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(path)
    monkeypatch.setattr(tempfile, "tempdir", None)


def demo(fault: str, capfd: pytest.CaptureFixture[str], quiet: float = 5) -> tuple[int, Any]:
    def fake(config: Path, listen: str) -> list[str]:
        return [sys.executable, str(FAKE), str(config), listen, fault]

    code = run(2, 200, True, pipeline=fake, quiet=quiet)
    out = capfd.readouterr().out.splitlines()
    return code, json.loads(out[-1]) if out else None


@pytest.mark.parametrize(
    ("fault", "code", "found"),
    [
        ("none", 0, set()),
        ("lose", 1, {"lost"}),
        ("swap", 1, {"out_of_order"}),
        ("repeat", 0, {"duplicates"}),
        ("invent", 1, {"unexpected", "duplicates"}),
    ],
)
def test_the_demo_reports_what_the_pipeline_did(
    temp: Path, capfd: pytest.CaptureFixture[str], fault: str, code: int, found: set[str]
) -> None:
    # What is lost is waited for; all else comes, on a busy machine too.
    exit_code, result = demo(fault, capfd, quiet=1.5 if fault == "lose" else 15)
    faults = {name for name in ("lost", "duplicates", "out_of_order", "unexpected") if result[name]}
    assert (exit_code, faults) == (code, found), result
    assert result["committed"] > 100  # a busy machine does not reach the rate
    assert result["committed"] - result["delivered"] == result["lost"]
    assert result["latency_ms"]["p50"] > 0
    for way in ("events", "records"):
        of = result[way]
        assert (of["lost"] > 0) == (fault == "lose")
        assert of["committed"] - of["delivered"] == of["lost"]
        assert (of["out_of_order"], of["unexpected"], of["duplicates"]) == (0, 0, 0)
        assert of["committed"] >= 40
    assert list(temp.iterdir()) == []


def test_a_pipeline_that_does_not_start_is_quoted(
    temp: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def crash(config: Path, listen: str) -> list[str]:
        return [sys.executable, str(FAKE), str(config), listen, "crash"]

    assert run(2, 200, False, pipeline=crash) == 1
    assert "the fake pipeline crashes" in capfd.readouterr().out
    assert list(temp.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_the_summary_and_nothing_left(temp: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", DEMO, str(FAKE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    steps = ""
    for line in process.stderr:
        steps += line
        if "writing: committed" in line and " delivered 0" not in line:
            break
    assert re.search(r"its console: http://127\.0\.0\.1:\d+/console, with the token \S+\n", steps)
    assert "writing 200 rows/s until Ctrl-C" in steps
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["delivered"] == result["committed"] > 0
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert list(temp.iterdir()) == []


def writing() -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start a demo; return it, and its processes, once it writes."""
    process = subprocess.Popen(
        [sys.executable, "-c", DEMO, str(FAKE)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "writing: committed" in line:
            break
    return process, psutil.Process(process.pid).children(recursive=True)


def test_a_server_that_ends_is_named(temp: Path) -> None:
    """The demo counts what a pipeline loses: it does not go on without the servers around it."""
    process, family = writing()
    (nats,) = [child for child in family if child.name() == "nats-server"]
    nats.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "nats-server ended unexpectedly; its log ends with:" in err
    assert psutil.wait_procs(family, timeout=60)[1] == []


def test_a_killed_demo_leaves_no_process(temp: Path) -> None:
    process, family = writing()
    assert len(family) > 6
    process.kill()
    process.communicate(timeout=60)
    assert psutil.wait_procs(family, timeout=60)[1] == []
