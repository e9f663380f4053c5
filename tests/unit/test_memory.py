"""What gives memory back is set for a process and those that it starts; the user may say otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.core.memory import ENVIRONMENT

SHOW = """
import pyarrow, penstock.core.memory as memory
memory.give_back()
import os, subprocess, sys
print(pyarrow.default_memory_pool().backend_name)
child = '''
import os, pyarrow
print(pyarrow.default_memory_pool().backend_name, os.environ["MALLOC_ARENA_MAX"])
'''
print(subprocess.check_output([sys.executable, "-c", child], text=True))
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ["system", "system", "2"]),
        ({"MALLOC_ARENA_MAX": "7"}, ["system", "system", "7"]),
        ({"ARROW_DEFAULT_MEMORY_POOL": "mimalloc"}, ["mimalloc", "mimalloc", "2"]),
    ],
)
def test_it_holds_for_this_process_and_what_it_starts(
    given: dict[str, str], found: list[str]
) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT} | given
    done = subprocess.check_output([sys.executable, "-c", SHOW], env=environment, text=True)
    assert done.split() == found
