"""What gives memory back is set for a process and those that it starts; the user may say otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from penstock.core.memory import ENVIRONMENT

SHOW = """
if {loaded}:
    import pyarrow
import penstock.core.memory as memory
memory.give_back()
import pyarrow
import os, subprocess, sys
print(pyarrow.default_memory_pool().backend_name)
child = '''
import os, pyarrow
print(pyarrow.default_memory_pool().backend_name, os.environ["MALLOC_ARENA_MAX"])
'''
print(subprocess.check_output([sys.executable, "-c", child], text=True))
"""


ARENA = """
import ctypes, penstock.core.memory as memory
memory.give_back()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks h u f o d k".split()]
libc.mallinfo2.restype = Info
# Of its own it would take what it maps as a sign, and keep the next of that size in its arena.
libc.free(ctypes.c_void_p(libc.malloc(16 << 20)))
before = libc.mallinfo2().hblks
libc.malloc(1 << 20)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ["system", "system", "2"]),
        ({"MALLOC_ARENA_MAX": "7"}, ["system", "system", "7"]),
        ({"ARROW_DEFAULT_MEMORY_POOL": "mimalloc"}, ["mimalloc", "mimalloc", "2"]),
    ],
)
def test_it_holds_for_this_process_and_what_it_starts(
    given: dict[str, str], found: list[str], loaded: bool
) -> None:
    assert shown(SHOW.replace("{loaded}", str(loaded)), given) == found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc has other settings")
def test_a_large_buffer_is_mapped_each_time() -> None:
    assert shown(ARENA, {}) == ["1"]
    assert shown(ARENA, {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}) == ["0"]


def shown(code: str, given: dict[str, str]) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT} | given
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).split()
