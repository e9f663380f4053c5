"""Dead letters of the sink `jetstream`: `<folder>/<sink>.jsonl`, one JSON object a line, synced."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson


class DeadLetterFiles:
    """Appends to the files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()

    def append(self, sink: str, letters: Iterable[Mapping[str, Any]]) -> None:
        """Make letters durable; raises `OSError` where the disk won't take them."""
        at = datetime.now(UTC).isoformat()
        data = b"".join(orjson.dumps({"at": at, **letter}) + b"\n" for letter in letters)
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(
                self.folder / f"{sink}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
            )
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
