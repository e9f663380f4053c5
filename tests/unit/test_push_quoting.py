"""What a webhook was sent stands in no quoted answer, however the endpoint writes it."""

from __future__ import annotations

import json

import pytest

from penstock.config.consumers import WebhookSettings
from penstock.push.quoting import Quoting


def quoted(answer: str, url: str = "https://x.example/hook", **headers: str) -> str:
    settings = WebhookSettings.model_validate({"url": url, "headers": headers})
    return Quoting(settings).quote(answer.encode())


@pytest.mark.parametrize("echo", ["ab%2Fcd%2Bef", "ab/cd+ef", "ab/cd ef", r"ab\/cd+ef"])
def test_a_value_of_the_query(echo: str) -> None:
    url = "https://x.example/hook?a=1&sig=ab%2Fcd%2Bef&b=ab/cd+ef"
    assert quoted(f"no {echo} here", url) == "no *** here"


def test_a_query_without_a_value() -> None:
    assert quoted("no such key: s3cret", "https://x.example/hook?s3cret") == "no such key: ***"
    assert quoted("no such key: s3cret", "https://x.example/hook?s3cret=") == "no such key: ***"


@pytest.mark.parametrize(
    "echo",
    ["us%40er", "us@er", "p%C3%A9ss", "péss", r"p\u00e9ss", "us@er:péss", "dXNAZXI6cMOpc3M="],
)
def test_credentials_of_the_url(echo: str) -> None:
    url = "https://us%40er:p%C3%A9ss@x.example/hook"
    assert quoted(f"refused: {echo} (see the log)", url) == "refused: *** (see the log)"


@pytest.mark.parametrize("value", ['a"bcdef', r"a\bcdef", "Bearer s3cret/more", "two  words"])
def test_a_header(value: str) -> None:
    assert quoted(f"[{value}]", authorization=value) == "[***]"
    assert quoted(json.dumps([value]), authorization=value) == '["***"]'


def test_schemes_and_short_values_stay() -> None:
    url = "https://x.example/hook?version=2"
    assert quoted("Bearer or Basic, version 2", url, a="Bearer s3cret") == (
        "Bearer or Basic, version 2"
    )


def test_without_credentials_and_query_all_stays() -> None:
    assert quoted("no such shop: a/b, c") == "no such shop: a/b, c"
