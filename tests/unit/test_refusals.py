"""What is noted of a source that can't be run: for the entity at fault, whatever the texts hold."""

from __future__ import annotations

import pickle

import pytest

from penstock.core.errors import (
    Concern,
    ConfigError,
    Mistake,
    PenstockError,
    SetupError,
    StoreError,
)
from penstock.core.health import Failure
from penstock.runtime.refusals import Refusals


class Feed:
    """A feed that notes what it is given."""

    def __init__(self) -> None:
        self.unusable: dict[tuple[str, str], str] = {}
        self.notes: list[tuple[str, ...]] = []

    def wait(self, seconds: float) -> None: ...

    def wake(self) -> None: ...

    def refused(self, kind: str, name: str, reason: str) -> None:
        self.notes.append((kind, name, reason))

    def accepted(self, kind: str, name: str) -> None:
        self.notes.append((kind, name))


SINK, CONSUMER = Concern("sink", "orders", "filter"), Concern("consumer", "mail")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (SetupError("x", "No such column.", concerns=SINK), ("sink", "orders")),
        (StoreError("x", "Consumer 'mail' publishes 'orders'.", concerns=CONSUMER),
         ("consumer", "mail")),
        (Failure("x", "sink orders: wrong.", concerns=CONSUMER).error(), ("consumer", "mail")),
        (SetupError("x", "The publication 'orders' is gone."), ("source", "shop")),
        (SetupError("x", "There is no table sinks.orders.filter."), ("source", "shop")),
    ],
)  # fmt: skip
def test_a_refusal_is_noted_for_the_entity_at_fault(
    error: PenstockError, named: tuple[str, str]
) -> None:
    feed = Feed()
    refusals = Refusals(feed)
    refusals.refuse("shop", error)
    assert refusals.waiting
    refusals.accept("shop")
    refusals.pass_on()
    assert feed.notes == [(*named, str(error)), named]


def test_an_error_keeps_what_it_concerns() -> None:
    for error in (
        SetupError("x", "No.", concerns=SINK, is_gap=True),
        StoreError("x", "No."),
        ConfigError(["a line", Mistake(SINK, "wrong")]),
    ):
        same = pickle.loads(pickle.dumps(error))
        assert (str(same), vars(same)) == (str(error), vars(error))
    assert Failure.by(SetupError("x", "No.", concerns=SINK)).error().concerns == SINK
    assert ConfigError([Mistake(SINK, "a"), Mistake(CONSUMER, "b")]).problems == [
        "sink orders: filter: a", "consumer mail: b"
    ]  # fmt: skip
