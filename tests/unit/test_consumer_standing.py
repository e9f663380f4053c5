"""Where one message stands with a consumer, by the steps that its log has."""

from __future__ import annotations

from penstock.streams.consumers.entry import DeliveryFailure, Entry
from penstock.streams.consumers.standing import Standing, standing_of
from penstock.streams.consumers.state import State

AT = (10, 1)
GROUP = 7
NOW = 1_000


def standing(*entries: Entry, taken: bool = True, at: tuple[int, int] = AT) -> Standing:
    state = State((5, 0))
    for entry in entries:
        state.apply(entry)
    return standing_of(state, at, GROUP, NOW, taken=taken)


OUT = Entry(cursor=AT, passed=1, new=[(*AT, GROUP, None)], until=NOW + 1)


def test_from_its_first_delivery_to_its_ack() -> None:
    assert standing() == Standing("waiting")
    assert standing(taken=False) == Standing("filtered")
    assert standing(OUT) == Standing("in_flight", 1, NOW + 1)
    # What was handed out stays so, whatever the filter is by now.
    assert standing(OUT, taken=False) == Standing("in_flight", 1, NOW + 1)
    assert standing(OUT, Entry(done=[(1, 1)])) == Standing("done")


def test_what_failed_waits_for_its_retry_with_its_cause() -> None:
    failure = DeliveryFailure(900, 503, "down")
    nacked = Entry(moved=[(NOW + 50, [1])], failures=[(failure, [1])])
    assert standing(OUT, nacked) == Standing("retry", 1, NOW + 50, failure)
    late = Entry(cursor=AT, passed=1, new=[(*AT, GROUP, None)], until=NOW - 1)
    assert standing(late) == Standing("retry", 1)


def test_what_its_group_holds_up_waits_though_the_cursor_has_passed_it() -> None:
    parked = Entry(cursor=(20, 0), passed=2, parked=[(GROUP, (2, 9, 0, 12, 0))])
    assert standing(parked) == Standing("waiting")
    assert standing(parked, at=(13, 0)) == Standing("done")


def test_a_dead_letter_that_is_put_back_waits_for_its_replay() -> None:
    assert standing(Entry(cursor=(20, 0)), Entry(replays=[(*AT, GROUP, None)])).stage == "replay"
