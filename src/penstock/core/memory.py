"""Memory that is used no more goes back to the system, in this process and those that it starts.

Spark's processes are many, and each has its peak at another time. What an allocator keeps for the next
peak is counted in each of them.
"""

from __future__ import annotations

import os
from typing import Final

import pyarrow as pa

ENVIRONMENT: Final = {
    # Arrow's own choice, mimalloc, keeps what the largest batch has taken.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    # glibc has eight arenas a core, and what is free in one serves no thread of another.
    "MALLOC_ARENA_MAX": "2",
    # It would raise both with each large buffer, up to 32 and 64 MiB, and keep so much.
    "MALLOC_MMAP_THRESHOLD_": str(256 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}


def give_back() -> None:
    """Set it up; what the user's environment says counts."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["ARROW_DEFAULT_MEMORY_POOL"] == "system":  # it is loaded already
        pa.set_memory_pool(pa.system_memory_pool())
