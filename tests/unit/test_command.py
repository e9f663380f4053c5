"""How the process of a command ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import __version__

COMMAND = [sys.executable, "-m", "penstock"]
PRINTS = """
import atexit
import sys
import penstock.cli.main
from penstock.__main__ import main

def app():
    atexit.register(print, "at the end")
    print("its output")
    sys.exit(0)

penstock.cli.main.app = app
main()
"""


@pytest.mark.parametrize(("word", "code"), [("--version", 0), ("nonsense", 2)])
def test_it_ends_with_the_commands_exit_code(word: str, code: int) -> None:
    done = subprocess.run([*COMMAND, word], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout == (f"penstock {__version__}\n" if code == 0 else "")


def test_what_it_registered_is_done_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "its output\nat the end\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_output_that_is_lost_is_a_failure() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS], stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""}, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "penstock: the output can't be written: No space left on device\n"


def test_without_standard_files() -> None:
    shell = f'"{sys.executable}" -m penstock --version >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell], check=False).returncode == 0
