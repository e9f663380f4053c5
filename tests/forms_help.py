"""What an outbox's publishers may publish, and what a subscriber has to read of it, in each form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from hypothesis import strategies as st

from penstock.config.nats import Format

FORMATS: Final = ("plain", "envelope", "cloudevents", "debezium")
# As jsonb has it: any text but NUL and half of a surrogate pair, numbers with all their digits.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
line = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"), max_size=12)
numbers = (
    st.decimals(-(10**30), 10**30, allow_nan=False, allow_infinity=False).map(str)
    | st.integers().map(str)
    | st.sampled_from(["1.10", "0.0", "-0", "1e300", "123456789012345678901234567890.0123456789"])
)


def objects(of: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.dictionaries(texts.map(json.dumps), of, max_size=4)
    return members.map(lambda found: f"{{{', '.join(f'{n}: {v}' for n, v in found.items())}}}")


payloads = st.recursive(
    st.sampled_from(["null", "true", '""', "{}"]) | numbers | texts.map(json.dumps),
    lambda inner: st.lists(inner, max_size=4).map(lambda v: f"[{', '.join(v)}]") | objects(inner),
    max_leaves=12,
) | st.integers(1, 2_000).map(lambda levels: "[" * levels + "]" * levels)
"""JSON texts, as Postgres may print them."""

names = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"),
    min_size=1,
    max_size=8,
).filter(lambda name: name != "op" and not name.lower().startswith("nats-"))
headers_given = st.dictionaries(
    names,
    line | st.none() | st.integers() | st.booleans() | st.lists(line | st.none(), max_size=3),
    max_size=4,
)
keys = st.none() | st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=12
)


def pairs_of(of: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the headers that a publisher's object stands for."""
    found: list[tuple[str, str]] = []
    for name, value in of.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                found.append((name, item if isinstance(item, str) else json.dumps(item)))
    return found


def check(
    form: Format,
    payload: str,
    of: Mapping[str, Any],
    key: str,
    sent: list[tuple[str, str]],
    body: bytes,
    created: str,
    pipeline: str,
) -> None:
    """Compare what was published with the headers and the body that were read."""
    assert [v for n, v in sent if n == "Nats-Msg-Id"] == [key]
    published = pairs_of(of)
    mine = [pair for pair in sent if pair[0] != "Nats-Msg-Id"]
    assert mine.pop(0) == ("Penstock-Pipeline", pipeline)
    text = payload.encode()
    if form == "cloudevents":
        published = [
            (n, v) for n, v in published
            if n.lower() != "content-type" and not n.lower().startswith("ce-")
        ]  # fmt: skip
        published.append(("Content-Type", "application/cloudevents+json"))
        assert mine == published
        assert body.endswith(b',"data":%b}' % text)
        head = json.loads(body.removesuffix(b',"data":%b}' % text) + b"}")
        assert (head["specversion"], head["id"], head["time"]) == ("1.0", key, created)
        return
    if form == "debezium":
        published = [pair for pair in published if pair[0] != "op"]
    assert mine[: len(published)] == published
    added = dict(mine[len(published) :])
    if form == "debezium":
        assert added.keys() <= {"id", "aggregateType", "op", "aggregateId", "eventType"}
        assert added.pop("op") == "c"
        assert not {name.lower() for name in added} & {name.lower() for name in of}
        assert added.get("id", key) == key
    else:
        assert added == {}
    if form == "envelope":
        assert body.startswith(b'{"record":{')
        assert b'"payload":%b,"headers":' % text in body
    else:
        assert body == text
