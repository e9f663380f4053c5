"""What a user's permissions allow of the subjects that a template gives, against every subject."""

from __future__ import annotations

from itertools import product
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.subject import covers, overlaps
from penstock.sinks.nats.permissions import Permissions

TOKENS: Final = ("a", "b", "c")
SUBJECTS: Final = [".".join(t) for n in (1, 2, 3, 4) for t in product(TOKENS, repeat=n)]
"""Every subject of up to four tokens; patterns have up to three, so `>` may stand for two."""


@st.composite
def patterns(draw: st.DrawFn, last: tuple[str, ...] = ("a", "b", "*", ">")) -> str:
    tokens = draw(st.lists(st.sampled_from(("a", "b", "*")), max_size=2))
    return ".".join([*tokens, draw(st.sampled_from(last))])


templates = patterns(last=("a", "b", "*"))


def taken(pattern: str) -> set[str]:
    return {subject for subject in SUBJECTS if covers(pattern, subject)}


@given(patterns(), patterns())
def test_overlaps(a: str, b: str) -> None:
    assert overlaps(a, b) == bool(taken(a) & taken(b))
    assert overlaps(b, a) == overlaps(a, b)


@given(
    st.none() | st.lists(patterns(), max_size=3), st.lists(patterns(), max_size=2), templates
)  # fmt: skip
def test_permissions(allow: list[str] | None, deny: list[str], template: str) -> None:
    permissions = Permissions(None if allow is None else tuple(allow), tuple(deny))
    allowed = set(SUBJECTS) if allow is None else set().union(*map(taken, allow))
    allowed = allowed.difference(*map(taken, deny))
    given_subjects = taken(template)
    if permissions.allows_all(template):
        assert given_subjects <= allowed
    if permissions.allows_none(template):
        assert not given_subjects & allowed
    for subject in given_subjects:  # of one subject each verdict is exact
        assert permissions.allows_all(subject) == (subject in allowed)
        assert permissions.allows_none(subject) == (subject not in allowed)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({}, Permissions(None)),
        ({"publish": {}, "subscribe": {"allow": ["x"]}}, Permissions(None)),
        ({"publish": {"allow": ["a", "b"], "deny": ["c"]}}, Permissions(("a", "b"), ("c",))),
        ({"publish": {"deny": ["c"]}}, Permissions(None, ("c",))),
        ({"responses": {"max": 1}}, Permissions(())),
        ({"publish": {"allow": ["a"]}, "responses": {"max": 1}}, Permissions(("a",))),
    ],
)
def test_read(answer: dict[str, object], expected: Permissions) -> None:
    assert Permissions.read(answer) == expected
