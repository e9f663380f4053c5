"""What a regular expression of Postgres is to Java, and how long a text it is fit for."""

from __future__ import annotations

import pytest

from penstock.expressions.patterns import regular, similar


@pytest.mark.parametrize(
    ("pattern", "longest"),
    [
        # In the time of one pass.
        ("foo", 0), ("^foo.*$", 0), ("^[a-z]+$", 0), (".*foo.*", 0), ("(error|warn)", 0),
        ("^[^@]+@[a-z]+$", 0), (r"^\d{3}-\d{4}$", 0), ("", 0), (r"\d+", 0), ("^a*b?$", 0),
        ("^[a-z]*a$", 0),
        # A repetition may give back what it took, or is tried from every place.
        ("foo.*bar", 20_000), (r"\d+x", 20_000), ("^.*a.*b", 20_000), (r"^\w+\s+\w+x", 20_000),
        ("^[a-z]*[a-b]*b$", 20_000), (r"^[^@]+@[^@]+\.com$", 20_000),
        ("a.*b.*c", 1_000),
    ],
)  # fmt: skip
def test_how_long_a_text_may_be(pattern: str, longest: int) -> None:
    assert regular(pattern).longest == longest


def test_a_repetition_keeps_what_it_took_only_where_that_is_the_same() -> None:
    assert regular("^a*b").java == r"(?s)(?:\Aa*+b)"
    assert regular("^a*[ab]").java == r"(?s)(?:\Aa*[a-b])"
    assert regular("^a*(b|a)").java == r"(?s)(?:\Aa*(?:b|a))"
    assert regular("^(a*|b)a").java == r"(?s)(?:\A(?:a*|b)a)"
    assert regular("^(a*|b)c?$").java == r"(?s)(?:\A(?:a*+|b)c{0,1}+(?!.))"
    assert regular(r"^\w*é").java == r"(?s)(?:\A[\p{IsAlphabetic}0-9_]*\x{e9})"
    assert regular(r"^[^\w]*é").java == r"(?s)(?:\A[^[\p{IsAlphabetic}0-9_]]*\x{e9})"


def test_similar_matches_the_whole_text() -> None:
    assert similar("a|b", None).java == r"(?s)(?:\Aa(?!.)|\Ab(?!.))"
    assert similar("%a_", None).java == r"(?s)(?:a.(?!.))"
    assert similar("a!%%", "!") == (r"(?s)(?:\Aa\x{25})", 0)
    assert similar("a\\.", "").java == r"(?s)(?:\Aa\x{5c}\x{2e}(?!.))"


@pytest.mark.parametrize(
    "pattern",
    [
        "(a", "a)", "[a", "a**", "*a", "^*", "a{2,1}", "a{300}", "(a|b)*", "(a*)+", "(?=a)", "(?i)a",
        r"\1", r"\y", r"[[:alpha:]]", "[b-a]", "***=a", "a\\", "a.*b.*c.*d", "(a|a){15}", "^(a?){20}b",
        "(" * 20 + ")" * 20, "(a{20}){20}{2}", "a" * 1000, "x{1",
    ],
)  # fmt: skip
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        regular(pattern)


def test_what_similar_refuses() -> None:
    for pattern in ("%?", r"\d", "a**", "[[:alpha:]]", "(a|b)+", "a{"):
        with pytest.raises(ValueError, match=r"\w"):
            similar(pattern, None)
    with pytest.raises(ValueError, match="one character"):
        similar("a", "ab")
