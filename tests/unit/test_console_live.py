"""The live parts that are found in a page."""

from __future__ import annotations

import html

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.console.live import Part, parts_of


def test_parts_are_found_with_all_that_is_in_them() -> None:
    page = """<main><div id="state" data-live="2">
      <div class="a">1<div>2</div></div></div><p>no part of it</p>
      <p id="waiting" role="status" data-live="1.5" data-reloads>Soon <b>there</b><pre>x</pre></p>
      <section data-live="5" class="b" id="read"></section><div>after</div></main>"""
    assert parts_of(page) == [
        Part("state", '\n      <div class="a">1<div>2</div></div>', 2, waits=False),
        Part("waiting", "Soon <b>there</b><pre>x</pre>", 1.5, waits=True),
        Part("read", "", 5, waits=False),
    ]


@given(st.text())
def test_what_others_wrote_ends_no_part(text: str) -> None:
    inner = f'<div title="{html.escape(text)}">{html.escape(text)}</div>'
    page = f'<div>{inner}<div id="list" data-live="1">{inner}</div></div>{inner}'
    assert parts_of(page) == [Part("list", inner, 1, waits=False)]


@pytest.mark.parametrize("text", ['<div id="a" data-live="2">', ' id="a" data-live="2"'])
def test_what_looks_like_a_part_is_none(text: str) -> None:
    assert parts_of(f'<div title="{html.escape(text)}">{html.escape(text)}</div>') == []
