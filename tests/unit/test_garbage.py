"""Whole collections of a process that serves are few, however much its requests make for a moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHURN = """
import gc, sys
from penstock.core import garbage
kept = [{"n": [n]} for n in range(100_000)]
if sys.argv[1] == "seldom":
    garbage.collect_seldom()
whole = 0
def note(phase, info):
    global whole
    whole += phase == "start" and info["generation"] == 2
gc.callbacks.append(note)
for _ in range(40):
    rows = [{"n": [n]} for n in range(50_000)]
print(whole)
"""


@pytest.mark.parametrize(("how", "least", "most"), [("seldom", 0, 1), ("as it is", 5, 1000)])
def test_how_often_all_is_looked_at(how: str, least: int, most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHURN, how], capture_output=True, text=True, check=True
    )
    assert least <= int(done.stdout) <= most
