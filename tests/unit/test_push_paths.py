"""The path that a route adds to a webhook's URL: never out of it, whatever the route holds."""

from __future__ import annotations

import posixpath
import re
from urllib.parse import unquote

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.push.paths import path_of


def of(route: object) -> str:
    return path_of(orjson.dumps({"record": {"route": "no"}, "metadata": {"route": route}}))


@pytest.mark.parametrize(
    ("route", "path"),
    [
        ("orders/big/17", "/orders/big/17"),
        ("/orders//big/", "/orders/big"),
        ("", ""),
        ("/", ""),
        ("//evil.example/x", "/evil.example/x"),
        ("http://evil.example/x", "/http:/evil.example/x"),
        ("a?b=c#d", "/a%3Fb=c%23d"),
        ("a b/ü/\r\nX: y", "/a%20b/%C3%BC/%0D%0AX:%20y"),
        ("a%20b%2Fc%", "/a%20b%2Fc%25"),  # what the sink escaped stays so
        ("50%/%zz", "/50%25/%25zz"),
        ("a.b/..c/...", "/a.b/..c/..."),
        ("..", "/%252E%252E"),
        ("./x", "/%252E/x"),
        ("a/../../b", "/a/%252E%252E/%252E%252E/b"),
        ("%2E%2e/x", "/%252E%252E/x"),
        ("..%2F..", "/%252E%252E%252F%252E%252E"),
        ("..\\\\x", "/%252E%252E%255C%255Cx"),
        ("..;v=1/x", "/%252E%252E%253Bv%253D1/x"),
        ("..%00", "/%252E%252E%2500"),
        ("me@host:80", "/me@host:80"),
        (None, ""),
        (7, ""),
        (["a"], ""),
    ],
)
def test_paths(route: object, path: str) -> None:
    assert of(route) == path


def test_a_message_without_a_route() -> None:
    assert path_of(b'{"record":{"route":"x"},"metadata":{}}') == ""


def test_half_a_surrogate_pair() -> None:
    """As JSON may hold it, though no text does."""
    assert path_of(rb'{"record":{"j":"\ud800"},"metadata":{"route":"a"}}') == "/a"
    assert path_of(rb'{"record":{},"metadata":{"route":"a\ud800"}}') == "/a%5Cud800"


def test_a_record_that_no_parser_takes() -> None:
    deep = b"[" * 5000 + b"]" * 5000
    assert path_of(b'{"record":{"j":%b},"metadata":{"route":"a"}}' % deep) == "/a"


pieces = st.sampled_from(["..", ".", "%2e", "%2F", "/", "\\", ";", "%", "%25", " ", "?", "#", "a"])


@given(st.text() | st.lists(pieces, max_size=9).map("".join))
@example("%2e%2e%5c..")
@example("\ud7ff%2e/..")
def test_no_route_leads_out(route: str) -> None:
    path = of(route)
    assert re.fullmatch(r"(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})+)*", path)
    # As a server may read it that decodes first, and takes all of these for the ends of segments.
    read = re.sub(r"[\\;]", "/", unquote(path))
    assert posixpath.normpath("/hook" + read).startswith("/hook")
    assert ".." not in read.split("/")
