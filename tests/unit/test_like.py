"""LIKE patterns as regular expressions: the same texts match, and none takes long."""

from __future__ import annotations

import re
import time
from functools import cache

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.expressions.spark.like import like_regex

LETTERS = "ab%_\\.*\n(é𝄞"


def is_like(text: str, pattern: str) -> bool:
    """What LIKE means, by trying everything."""

    @cache
    def matches(at: int, p: int) -> bool:
        if p == len(pattern):
            return at == len(text)
        if pattern[p] == "%":
            return any(matches(rest, p + 1) for rest in range(at, len(text) + 1))
        if at == len(text):
            return False
        if pattern[p] == "_":
            return matches(at + 1, p + 1)
        if pattern[p] == "\\":
            p += 1
        return text[at] == pattern[p] and matches(at + 1, p + 1)

    return matches(0, 0)


PATTERNS = st.lists(st.sampled_from(["%", "%", "_", *"ab.*\n(é𝄞", "\\%", "\\_", "\\\\"])).map(
    "".join
)


@given(st.text(LETTERS, max_size=10), PATTERNS)
@example("aab", "%ab")
@example("abab", "%ab")
@example("", "")
@example("a\n", "a")
@example("ab", "a%b%")
def test_the_same_texts(text: str, pattern: str) -> None:
    found = re.search(like_regex(pattern), text) is not None
    assert found == is_like(text, pattern)


def test_no_pattern_takes_long() -> None:
    started = time.process_time()
    assert not re.search(like_regex("%a" * 1_000 + "%b"), "a" * 20_000)
    assert not re.search(like_regex("%" * 2_000 + "b"), "a" * 20_000)
    assert not re.search(like_regex("%_a" * 100 + "b%_"), "a" * 5_000)
    assert time.process_time() - started < 5
