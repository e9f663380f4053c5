"""The budget of a credential: no stretch of the interval has too many requests, whatever the order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.syncs.budget import ApiLimits, CredentialBudget, Ticket
from penstock.syncs.sync import Limit

NONE = ApiLimits()


def asked(limit: Limit, firsts: int = 0, laters: int = 0) -> CredentialBudget:
    budget = CredentialBudget(limit)
    for n in range(firsts):
        budget.ask((0, n), first=True)
    for n in range(laters):
        budget.ask((1, n), first=False)
    return budget


@given(
    st.integers(1, 7),
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 3), st.booleans()), min_size=1, max_size=60),
)
def test_no_interval_has_too_many(
    requests: int, concurrency: int, steps: list[tuple[float, bool]]
) -> None:
    budget = asked(Limit(requests, 2.0, concurrency), firsts=40, laters=40)
    now, under_way = 0.0, list[Ticket]()
    times: list[float] = []
    for seconds, is_answered in steps:
        now += seconds
        if is_answered and under_way:
            budget.answered(under_way.pop(0), NONE, now)
        given = budget.grant(now)
        under_way += given
        times += [now] * len(given)
        assert len(under_way) <= concurrency
    for at in times:
        assert sum(at <= other < at + 2.0 for other in times) <= requests


@given(st.integers(1, 5), st.integers(1, 5))
def test_all_of_the_budget_is_used(requests: int, intervals: int) -> None:
    budget = asked(Limit(requests, 1.0, 1), laters=100)
    now, granted = 0.0, 0
    while now < intervals:
        while given := budget.grant(now):
            granted += len(given)
            for ticket in given:
                budget.answered(ticket, NONE, now)
        wake = budget.wake_at(now)
        assert wake is not None
        assert wake > now
        now = wake
    assert granted == requests * intervals


def test_a_429_holds_all_up_for_as_long_as_it_wants() -> None:
    budget = asked(Limit(100, 1.0, 2), firsts=5)
    first, second = budget.grant(0.0)
    budget.answered(first, ApiLimits(limited=True, retry_after=30.0), 1.0)
    budget.answered(second, NONE, 1.5)
    assert budget.grant(30.9) == []
    assert budget.wake_at(2.0) == 31.0
    assert len(budget.grant(31.0)) == 2
    assert budget.limited == 1


def test_a_429_without_a_time_holds_longer_each_time() -> None:
    budget = asked(Limit(100, 1.0, 1), firsts=9)
    now, waits = 0.0, []
    for _ in range(4):
        (ticket,) = budget.grant(now)
        budget.answered(ticket, ApiLimits(limited=True), now)
        wake = budget.wake_at(now)
        assert wake is not None
        waits.append(wake - now)
        now = wake
    assert waits == [1.0, 2.0, 4.0, 8.0]
    (ticket,) = budget.grant(now)
    budget.answered(ticket, NONE, now)
    assert budget.wake_at(now) == 0.0 or budget.grant(now)


def test_what_the_api_leaves_is_not_exceeded() -> None:
    budget = asked(Limit(100, 1.0, 4), firsts=20)
    given = budget.grant(0.0)
    assert len(given) == 4
    budget.answered(given[0], ApiLimits(remaining=5, reset=60.0), 0.1)  # three are under way
    more = budget.grant(0.2)
    for ticket in [*given[1:], *more]:
        budget.answered(ticket, NONE, 0.3)
    more += budget.grant(0.4)
    assert len(more) == 2
    for ticket in more[1:]:
        budget.answered(ticket, NONE, 0.5)
    assert budget.grant(60.0) == []
    assert budget.wake_at(1.0) == 60.1
    assert len(budget.grant(60.2)) == 4


def test_polls_come_first_and_a_backfill_gets_one_in_four() -> None:
    budget = asked(Limit(8, 100.0, 8), firsts=20, laters=20)
    given = budget.grant(0.0)
    assert [lane for lane, _ in given] == [0, 0, 0, 1, 0, 0, 0, 1]


def test_a_lost_lane_gives_its_requests_back() -> None:
    budget = asked(Limit(100, 1.0, 2), firsts=2, laters=1)
    budget.grant(0.0)
    budget.lose(0)
    assert budget.grant(0.1) == [(1, 0)]
    budget.lose(1)
    assert budget.is_idle
