"""What those that write to sinks report to their run, as `penstock.core.monitor` sends it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from penstock.core.delivery import Written
from penstock.core.errors import PenstockError, SinkError
from penstock.core.monitor import Report


def outcome(sink: str, written: Written, **marks: bool) -> Report:
    """Return the report of what became of a sink's messages.

    Marks: `counted=False` where the counts come with the whole part, `kept=True` where the dead letters
    are in the store already.
    """
    return {
        "sink": sink, "delivered": written.delivered, "duplicates": written.duplicates,
        "bytes": written.bytes, "dead": [asdict(letter) for letter in written.dead], **marks,
    }  # fmt: skip


def retry(sink: str, error: SinkError, seconds: float) -> Report:
    """Return the report of a sink that took nothing, and is tried again after `seconds`."""
    return {**_failure(sink, error), "retry_in": seconds}


def behind(sink: str, error: SinkError) -> Report:
    """Return the report of a sink whose messages go to its backlog from now on."""
    return {**_failure(sink, error), "behind": True}


def store_failure(error: PenstockError) -> Report:
    """Return the report of a store that does not take what is written."""
    return {"store": str(error), "code": error.code, "remedy": error.remedy}


STORE_WORKS: Final[Report] = {"store": None}


def _failure(sink: str, error: SinkError) -> Report:
    return {"sink": sink, "error": str(error), "code": error.code, "remedy": error.remedy}
