"""Which sinks a block concerns is what each one's own mask comes to."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.streams_help import Change, wire

from penstock.config.consumers import Filters
from penstock.config.sinks import NatsSinkSettings
from penstock.core.message import ACTIONS
from penstock.sinks.selected import names, selected
from penstock.spark.audience import Audience, kinds_of
from penstock.spark.routes import Route

SINKS: dict[str, dict[str, Any]] = {
    "all": {},
    "a": {"tables": ["public.a"]},
    "schema": {"tables": ["other.*", "public.b"]},
    "inserts": {"tables": ["public.a", "public.b"], "actions": ["insert"]},
    "rows": {"kind": "rows", "subject": "x.{key}"},
}
ROUTES = {
    name: Route(name, NatsSinkSettings.model_validate({"type": "nats", "source": "shop", **keys}))
    for name, keys in SINKS.items()
}
FILTERS = {
    "all": Filters(),
    "a": Filters.model_validate({"table": ["a"]}),
    "deletes": Filters.model_validate({"action": ["delete"], "table": ["public.b"]}),
}
kinds = st.tuples(
    st.sampled_from(["public", "other"]), st.sampled_from("abc"), st.sampled_from(ACTIONS)
)


def changes(of: list[tuple[str, str, str]], times: int) -> list[Change]:
    return [
        Change(schema=schema, table=table, action=action) for schema, table, action in of * times
    ]


@given(st.lists(kinds, max_size=6), st.sampled_from([1, 40]))
def test_it_agrees_with_the_masks_of_the_routes(of: list[tuple[str, str, str]], times: int) -> None:
    """Of few messages as of many, for which kernels are used."""
    messages = wire(changes(of, times))
    audience = Audience({name: route.takes for name, route in ROUTES.items()})
    expected = set()
    for name, route in ROUTES.items():
        mask = route.mask(messages)
        if messages.num_rows and (mask is None or True in mask.to_pylist()):
            expected.add(name)
    assert audience(messages) == expected
    assert audience(messages) == expected  # what it has kept is the same
    assert kinds_of(messages) == set(of)


@given(st.lists(kinds, max_size=6))
def test_it_agrees_with_the_filters_of_consumers(of: list[tuple[str, str, str]]) -> None:
    messages = wire(changes(of, 1))

    audience = Audience({name: partial(names, filters) for name, filters in FILTERS.items()})
    assert audience(messages) == {
        name for name, filters in FILTERS.items() if selected(filters, messages).num_rows
    }
