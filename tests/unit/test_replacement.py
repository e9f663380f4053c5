"""What follows a run is prepared once that run has removed what the one before has left."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.runtime.replacement import Replacement

SECONDS = 30


def test_nothing_is_prepared_before_the_run_before_is_taken_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: queue.SimpleQueue[object] = queue.SimpleQueue()
    monkeypatch.setattr(Replacement, "_try", lambda _, desired: tried.put(desired))
    settled = threading.Event()
    replacement = Replacement(
        "shop",
        cast("Any", SimpleNamespace(stopping=False)),
        settled,
        None,
        cast("Any", SimpleNamespace(next=lambda: "newest", runs=lambda _: False)),
        cast("Any", None),
        lambda *_: True,
    )
    replacement.start()
    try:
        replacement.note_change()
        with pytest.raises(queue.Empty):
            tried.get(timeout=0.3)
        settled.set()
        assert tried.get(timeout=SECONDS) == "newest"
    finally:
        settled.set()
        replacement.close()
