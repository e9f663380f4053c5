"""How often Python looks for garbage in cycles: a whole look stops every thread of the process."""

from __future__ import annotations

import gc
from typing import Final

_THRESHOLDS: Final = (10_000, 10, 100)
"""New objects, looks at the new ones, looks at those that lasted; Python has 700, 10, 10."""


def collect_seldom() -> None:
    """Leave what is loaded by now out of collections, and look at all the rest more seldom.

    For processes that serve, once all is loaded. With 10,000 consumers a whole look takes 0.2 to 0.9 s
    and finds some hundred objects; by Python's own thresholds it comes with every few pages of a list.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
