"""Where Penstock keeps what it can make again."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def folder() -> Path:
    """Return the folder of Penstock's caches: below `XDG_CACHE_HOME`, or else the user's own."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "penstock"
    name = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path("~").expanduser() / name / "penstock"
