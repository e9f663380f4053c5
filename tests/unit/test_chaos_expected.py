"""What the fault test finds of sinks and consumers that are made in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.chaos.expected import Expected, Said, judge, said_by
from tests.chaos.verdict import Verdict


def body(lsn: int, id_: int = 1, table: str = "even", **more: Any) -> dict[str, Any]:
    metadata = {
        "commit_lsn": lsn, "commit_idx": 0, "table_name": table, "idempotency_key": f"k{lsn}"
    }  # fmt: skip
    record = {"id": id_, "version": lsn}
    return {"record": record, "changes": {}, "action": "update", "metadata": metadata, **more}


ALL = said_by([body(lsn, table=table) for lsn, table in enumerate(["even", "odd"] * 5, 1)])


def judged(expected: Expected, got: Sequence[tuple[str, Said]]) -> dict[str, int]:
    verdict = Verdict()
    judge("x", expected, dict(ALL), got, verdict)
    return dict(verdict.violations)


@pytest.fixture
def expected() -> Expected:
    """What a sink must have that counts from 3 on, and leaves out odd from 5 to 8, about."""
    of = Expected("x")
    of.mark(3, "must")
    for lsn, state in ((5, "may"), (6, "not"), (8, "may"), (9, "must")):
        of.mark(lsn, state, "odd")  # type: ignore[arg-type]  # wrong on purpose
    return of


WHOLE = [said for said in ALL if said[1].lsn not in (1, 2, 6, 8)]


def test_what_may_be_there_may_be_missing(expected: Expected) -> None:
    assert judged(expected, WHOLE) == {}
    assert judged(expected, [ALL[0], ALL[1], *WHOLE]) == {}


def test_each_mistake_is_blamed(expected: Expected) -> None:
    assert judged(expected, WHOLE[1:]) == {"lost": 1}
    assert judged(expected, [*WHOLE, WHOLE[-1]]) == {"duplicate": 1}
    assert judged(expected, [said for said in ALL if said[1].lsn not in (1, 2)]) == {
        "unexpected": 1
    }
    assert judged(expected, [WHOLE[2], WHOLE[0], *WHOLE[1:2], *WHOLE[3:]]) == {"out of order": 1}
    other = said_by([body(3, action="insert")])
    assert judged(expected, [*other, *WHOLE[1:]]) == {"unexpected": 1}
    foreign = said_by([body(99)])
    assert judged(expected, [*WHOLE, *foreign]) == {"unexpected": 1}


def test_a_message_of_two_keys_keeps_the_order_of_both(expected: Expected) -> None:
    moved = said_by([body(11, id_=2, changes={"id": 1}), body(12, id_=1)])
    everything = dict([*ALL, *moved])
    for got, found in ((moved, {}), (moved[::-1], {"out of order": 1})):
        verdict = Verdict()
        judge("x", expected, everything, [*WHOLE, *got], verdict)
        assert dict(verdict.violations) == found


def test_a_later_mark_takes_the_place_of_what_was_noted_behind_it(expected: Expected) -> None:
    expected.mark(4, "may")
    assert judged(expected, []) == {"lost": 1}
    assert Expected("y", expected.marks_of("even")).marks_of("odd") == [
        (0, "may"), (3, "must"), (4, "may"),
    ]  # fmt: skip
