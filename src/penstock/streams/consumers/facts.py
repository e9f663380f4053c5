"""How a consumer is: what waits, what fails and why. For the API, `/status`, `/metrics` and health."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from penstock.core.health import Failure
from penstock.core.message import Position
from penstock.streams.consumers.entry import DeliveryFailure
from penstock.streams.consumers.state import State
from penstock.streams.consumers.types import ConsumerInfo

FAILING: Final = 5
"""From so many failures on, of one message or of all with none acked between them, it is a problem."""


@dataclass(frozen=True, slots=True)
class ConsumerFacts:
    """A consumer's numbers; times are seconds since 1970.

    Attributes:
        lag_messages: What is not acked: never handed out, in flight, or waiting for its retry.
        lag_seconds: The time since the oldest of these was committed; 0 where there is none.
        in_flight: Handed out, and neither acked nor nacked.
        waiting_for_retry: Handed out before, and to be handed out again.
        redeliveries: Deliveries that were not their message's first, since the consumer was made.
        failures: Deliveries that were nacked or not acked in time, likewise.
        dead_letters: Those that were not replayed.
        most_failed: How often that message was delivered which has failed most often, and waits.
        failing_since: When deliveries began to fail with none acked since; None where one was.
        failed_in_a_row: How many have failed since.
    """

    lag_messages: int
    lag_seconds: float
    in_flight: int
    waiting_for_retry: int
    redeliveries: int
    failures: int
    dead_letters: int
    most_failed: int
    last_failure: DeliveryFailure | None
    failing_since: float | None
    failed_in_a_row: int


def oldest_position(state: State) -> Position | None:
    """Return where the oldest message stands that was passed and is not done, None without one."""
    held = [message[:2] for message in state.held.values()]
    parked = [waiting[1:3] for waiting in state.parked.values()]
    return Position(*min([*held, *parked])) if held or parked else None


def facts_of(
    state: State, now: int, *, waiting: int, oldest: datetime | None, dead: int
) -> ConsumerFacts:
    """Return the facts at `now`, in µs.

    `waiting` messages were never handed out; of all that are not acked, the first was committed at
    `oldest`.
    """
    out = sum(
        message[5] > now and number not in state.returned for number, message in state.held.items()
    )
    since, count = state.failing or (None, 0)
    found = ConsumerFacts(
        lag_messages=len(state.held),
        lag_seconds=0.0,
        in_flight=out,
        waiting_for_retry=len(state.held) - out,
        redeliveries=state.redeliveries,
        failures=state.failures,
        dead_letters=dead,
        most_failed=max((state.held[number][4] for number in state.failed), default=0),
        last_failure=state.last_failure,
        failing_since=None if since is None else since / 1e6,
        failed_in_a_row=count,
    )
    return with_lag(found, waiting, oldest, now)


def with_lag(
    facts: ConsumerFacts, waiting: int, oldest: datetime | None, now: int
) -> ConsumerFacts:
    """Return facts with so many messages more that wait; the first of all was committed at `oldest`."""
    lag = facts.lag_messages + waiting
    age = 0.0 if oldest is None or not lag else max(now / 1e6 - oldest.timestamp(), 0.0)
    return replace(facts, lag_messages=lag, lag_seconds=round(age, 3))


def failure_of(info: ConsumerInfo, facts: ConsumerFacts) -> Failure | None:
    """Return what is wrong with a consumer, None where nothing is."""
    webhook = info.type == "webhook"
    remedy = "Repair the endpoint" if webhook else "Look at the log of the workers"
    why = "" if facts.last_failure is None else f" The last failure: {facts.last_failure.reason}."
    if info.disabled is not None:
        waiting = f"Messages that wait: {facts.lag_messages:,}."
        at = None if info.disabled_at is None else info.disabled_at.timestamp()
        if info.paused:
            go_on = f"Let it go on: penstock consumer resume {info.name}"
            return Failure("paused", f"It is paused: {info.disabled}. {waiting}", go_on, at)
        cause = f"It is disabled: {info.disabled}. {waiting}"
        remedy = f"{remedy}, then POST /v1/http-consumers/{info.name}/resume."
        return Failure("disabled", cause, remedy, at)
    if facts.failed_in_a_row >= FAILING:
        cause = f"{facts.failed_in_a_row:,} deliveries failed, and none was acked since.{why}"
        remedy = f"{remedy}: Penstock delivers the messages again."
        return Failure("deliveries_fail", cause, remedy, facts.failing_since)
    if facts.most_failed >= FAILING:
        cause = (
            f"A message was delivered {facts.most_failed:,} times and never acked; it holds back its"
            f" group.{why}"
        )
        remedy = (
            f"{remedy}, or set max_deliver: then it becomes a dead letter and its group goes on."
        )
        return Failure("message_fails", cause, remedy, None)
    return None


def facts_body(info: ConsumerInfo, facts: ConsumerFacts) -> dict[str, Any]:
    """Return the facts' JSON form."""
    failure = facts.last_failure
    error = None
    if failure is not None:
        error = {"at": _time(failure.at / 1e6), "status": failure.status, "reason": failure.reason}
    found = failure_of(info, facts)
    return {
        "state": "ok" if found is None else found.code,
        "lag_messages": facts.lag_messages,
        "lag_seconds": facts.lag_seconds,
        "in_flight": facts.in_flight,
        "waiting_for_retry": facts.waiting_for_retry,
        "redeliveries": facts.redeliveries,
        "failures": facts.failures,
        "dead_letters": facts.dead_letters,
        "last_error": error,
        "failing_since": _time(facts.failing_since),
        "disabled_since": _time(None if info.disabled_at is None else info.disabled_at.timestamp()),
    }


def _time(at: float | None) -> str | None:
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
