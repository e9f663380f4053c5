"""The reference of entities is what `make docs` makes of the models, and has a meaning for each key."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_of_entities_is_not_stale() -> None:
    made = runpy.run_path(str(DOCS / "entities.py"))["page"]()
    page = (DOCS / "reference" / "entities.md").read_text(encoding="utf-8")
    assert page == made, "run `make docs`"
    assert "|  |" not in page, "say in docs/entities.py what the key means"
