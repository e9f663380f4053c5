"""Which deletes a sweep may make: the guard against mass deletes. Pure, no I/O."""

from __future__ import annotations

from typing import Final

_ALWAYS: Final = 1
"""So many records may vanish from any collection, however small."""


def allowed(known: int, max_share: float, confirmed: int = 0) -> int:
    """Return how many of `known` records a sweep may delete without a question.

    `confirmed` is how many an operator has agreed to: what vanished meanwhile may come on top.
    """
    return confirmed + max(_ALWAYS, int(known * max_share))


def asks(known: int, missing: int, max_share: float, confirmed: int = 0) -> bool:
    """Return whether a sweep that misses so many of `known` records must ask first."""
    return missing > allowed(known, max_share, confirmed)


def question(known: int, missing: int, max_share: float) -> str:
    """Return what is asked, in a sentence."""
    return (
        f"A complete sweep misses {missing} of {known} records ({missing / max(known, 1):.0%}), more"
        f" than the share that may be deleted at once ({max_share:.0%}). Nothing was deleted."
    )
