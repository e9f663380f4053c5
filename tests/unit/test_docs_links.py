"""What README and docs/ link to is there: pages, pictures, and files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"!?\[(?P<text>[^\]]*)\]\((?P<to>[^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.finditer(text):
        to = link["to"].partition("#")[0]
        if to and "://" not in to:
            assert (page.parent / to).exists(), f"{link[0]}: there is no {to}"
        if link[0].startswith("!"):
            assert link["text"], f"{to} needs a text for those who can't see it"


def test_each_picture_is_shown_by_a_page() -> None:
    shown = {
        (page.parent / link["to"]).resolve()
        for page in PAGES
        for link in LINK.finditer(page.read_text(encoding="utf-8"))
    }
    pictures = set((ROOT / "docs" / "images").iterdir())
    assert pictures
    assert pictures <= shown
    assert all(picture.stat().st_size < 150_000 for picture in pictures)
