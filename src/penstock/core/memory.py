"""Memory that is used no more goes back to the system, in this process and those that it starts.

Spark's processes are many, and each has its peak at another time. What an allocator keeps for the next
peak is counted in each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Final

_ARROW: Final = "ARROW_DEFAULT_MEMORY_POOL"
ENVIRONMENT: Final = {
    # Arrow's own choice, mimalloc, keeps what the largest batch has taken.
    _ARROW: "system",
    # glibc has eight arenas a core, and what is free in one serves no thread of another.
    "MALLOC_ARENA_MAX": "2",
    # It would raise both with each large buffer, up to 32 and 64 MiB, and keep so much.
    "MALLOC_MMAP_THRESHOLD_": str(256 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}
# glibc reads its variables as a process starts; this one has: mallopt(3), and malloc.h's numbers.
_MALLOPT: Final = {
    "MALLOC_ARENA_MAX": -8,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_TRIM_THRESHOLD_": -1,
}


def give_back() -> None:
    """Set it up; what the user's environment says counts.

    Before pyarrow is loaded: Arrow's own allocations are then made like those for Python.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):  # it is no glibc
        mallopt = ctypes.CDLL(None).mallopt
        for name, number in _MALLOPT.items():
            mallopt(number, int(os.environ[name]))
    if os.environ[_ARROW] == "system" and (arrow := sys.modules.get("pyarrow")) is not None:
        arrow.set_memory_pool(arrow.system_memory_pool())
