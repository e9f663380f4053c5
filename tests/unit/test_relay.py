"""The desired state of groups, made of the rows of `tide.relays`; and sources of type outbox."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from penstock.config.file import load
from penstock.config.settings import Config, SparkSettings
from penstock.config.sources import OutboxSource
from penstock.core.errors import CaptureError, ConfigError
from penstock.core.health import Failure
from penstock.outbox.pipelines import StoredPipeline, slot_of, source_name
from penstock.outbox.relay import lease, relay
from penstock.outbox.relay.desired_state import GroupPlanner, capture_url
from penstock.outbox.relay.lease import GroupLease, Leases
from penstock.outbox.relay.relay import Relay
from penstock.outbox.settings import OutboxSinkSettings
from penstock.spark.options import SourceOptions
from penstock.spark.pipeline import Pipeline, _groupings
from penstock.spark.store_writer import StoreTarget

URL = "postgresql://app@db/shop"
NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
PLAIN = {"sink_type": "nats", "url": "nats://n", "subject": "s"}


def pipeline(
    name: str, *, checkpointed: bool = True, enabled: bool = True, **config: Any
) -> StoredPipeline:
    given = {**PLAIN, **config}
    return StoredPipeline(name, "box", "g", given, enabled, checkpointed, None, 0, NOON)


def planner() -> GroupPlanner:
    return GroupPlanner(URL, "shop", URL, SparkSettings(), source_name)


def test_one_that_can_not_run_stops_alone() -> None:
    """Once it has begun its messages wait; before that, the outbox itself keeps them."""
    rows = [
        pipeline("good"),
        pipeline("lacking", password="${env:NOWHERE}", username="u"),
        pipeline("off", enabled=False),
        pipeline("never", checkpointed=False, token="${env:NOWHERE}"),
        pipeline("never-on", checkpointed=False, enabled=False),
    ]
    (desired,) = planner().plan(rows, {}).values()
    assert set(desired.sinks) == {"good", "lacking", "off"}
    paused = {name: failure.code for name, failure in desired.paused.items()}
    assert paused == {"lacking": "unresolved_reference", "off": "disabled"}
    left_out = {name: failure.code for name, failure in desired.left_out.items()}
    assert left_out == {"never": "unresolved_reference", "never-on": "disabled"}
    (source,) = desired.config.sources.values()
    assert source.publication == "tide"
    assert source.tables == ("tide.outbox_box",)


def test_one_whose_messages_cannot_be_routed_is_left_out() -> None:
    """They would wait with the wrong subject; the outbox keeps them."""
    route = [{"when": "record.payload.a = 1", "to": "${env:NOWHERE}"}]
    rows = [
        pipeline("good"), pipeline("lacking", route=route),
        pipeline("off", enabled=False, route=route),
    ]  # fmt: skip
    (desired,) = planner().plan(rows, {}).values()
    assert set(desired.sinks) == {"good"}
    left_out = {name: failure.code for name, failure in desired.left_out.items()}
    assert left_out == {"lacking": "unresolved_reference", "off": "disabled"}


def test_what_is_as_it_was_does_not_begin_anew() -> None:
    row = pipeline("p", password="${env:SECRET}", username="u")
    plan = planner().plan
    first = plan([row], {"SECRET": "a"})["g"]
    moved = dataclasses.replace(row, delivered=7, snapshot="10:10:")
    assert plan([moved], {"SECRET": "a"})["g"].runs_as(first)
    assert not plan([row], {"SECRET": "b"})["g"].runs_as(first)
    assert not plan([dataclasses.replace(row, enabled=False)], {"SECRET": "a"})["g"].runs_as(first)
    assert not plan([row], {})["g"].runs_as(first)
    unused = plan([row, pipeline("never-on", checkpointed=False, enabled=False)], {"SECRET": "a"})[
        "g"
    ]
    assert unused.runs_as(first)
    later = dataclasses.replace(row, created_at=NOON + timedelta(microseconds=1))
    assert not plan([later], {"SECRET": "a"})["g"].runs_as(first)
    assert not first.runs_as(None)


def test_groups_are_apart() -> None:
    other = dataclasses.replace(pipeline("q"), relay_group="h")
    planned = planner().plan([pipeline("p"), other], {})
    assert {group: set(desired.sinks) for group, desired in planned.items()} == {
        "g": {"p"}, "h": {"q"}
    }  # fmt: skip
    slots = {desired.config.sources[desired.source].slot for desired in planned.values()}
    assert len(slots) == 2


NAMES = st.text("abcABC01_-.", min_size=1, max_size=63)


@given(NAMES, NAMES, NAMES)
def test_slots_differ(group: str, other: str, database: str) -> None:
    slot = slot_of(group, database)
    assert re.fullmatch(r"[a-z0-9_]{1,63}", slot)
    assert re.search(r"^tide_.*_[0-9a-f]{8}$", slot)  # as `idle_slots` finds them
    assert (slot == slot_of(other, database)) == (group == other)


def test_the_captures_sessions_notice_a_dead_client_soon() -> None:
    options = conninfo_to_dict(capture_url(f"{URL}?options=-c%20work_mem%3D1MB"))["options"]
    assert options == "-c work_mem=1MB -c wal_sender_timeout=5s"
    assert conninfo_to_dict(capture_url(URL))["options"] == "-c wal_sender_timeout=5s"


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([None], ([], None)),
        (["none"], (None, None)),
        (["payload.a"], (None, [])),
        ([None, "none"], (None, [])),
        ([None, None], ([], None)),
        (["payload.a", "header.b"], (None, [])),
    ],
)
def test_order_is_kept_in_one_split(orders: list[str | None], expected: Any) -> None:
    """All of an outbox, or the rows of a value: they must not go to two tasks."""
    rows = [
        dataclasses.replace(pipeline(f"p{n}"), config={**PLAIN, "group_by": order})
        if order is not None
        else pipeline(f"p{n}")
        for n, order in enumerate(orders)
    ]
    (desired,) = planner().plan(rows, {}).values()
    groupings = [
        {"tables": ["tide.outbox_box"], "group_by": columns}
        for sink in desired.sinks.values()
        for columns in _groupings(sink)
    ]
    options = SourceOptions.model_validate({"url": URL, "groupings": groupings})
    assert options.grouping("tide", "outbox_box") == expected
    assert all(isinstance(sink, OutboxSinkSettings) for sink in desired.sinks.values())


@pytest.mark.parametrize(
    ("orders", "expected"),
    [(["none"], 4), ([None], 1), (["payload.a"], 1), (["none", "header.b"], 1)],
)
def test_ordered_rows_are_read_by_one_task(orders: list[str | None], expected: int) -> None:
    """Two ranges of a backfill may have rows of one value."""
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=4))
    rows = [
        dataclasses.replace(
            pipeline(f"p{n}"), config=PLAIN | ({"group_by": order} if order else {})
        )
        for n, order in enumerate(orders)
    ]
    (desired,) = planner().plan(rows, {}).values()
    target = StoreTarget(URL, 1, 0)
    config = desired.config
    config = config.model_copy(
        update={"spark": config.spark.model_copy(update={"master": "spark://h:7077"})}
    )
    query = Pipeline(spark, config, desired.source, [], target, "")
    assert query._splits(desired.sinks.values()) == expected


class Notices:
    """A session that is notified at `times`, by a clock that goes on only while it listens."""

    def __init__(self, times: list[float]) -> None:
        self.now = 0.0
        self._times = times

    def notifies(self, *, timeout: float, stop_after: int) -> Iterator[object]:
        notified = self._times and self._times[0] <= self.now + timeout
        self.now = max(self._times.pop(0), self.now) if notified else self.now + timeout
        return iter([object()] if notified else [])


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], [0, 5, 10]),
        ([1.0], [0, 1.5, 6.5, 11.5]),
        ([1 + n / 10 for n in range(10)], [0, 2.4, 7.4]),  # ten changes in a row are one
        ([1 + n / 10 for n in range(50)], [0, 3, 5.1, 6.4, 11.4]),  # for two seconds at most
    ],
)
def test_changes_in_a_row_are_read_as_one(
    times: list[float], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = Notices(times)
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: session.now))
    source = OutboxSource.model_validate({"type": "outbox", "url": URL})
    wakeups = Relay("box", source, Config(sources={}, sinks={}))._wakeups(session)
    assert [session.now for _ in itertools.islice(wakeups, len(expected))] == pytest.approx(
        expected
    )


def own_relay() -> Relay:
    source = OutboxSource.model_validate({"type": "outbox", "url": URL})
    return Relay("box", source, Config(sources={}, sinks={}))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CaptureError("unreadable", "It can't be read."), "unreadable"),
        (ValueError("password"), "internal"),
    ],
)
def test_a_relay_that_cannot_read_its_pipelines_reports_it(
    error: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = own_relay()
    outcomes: list[Exception | None] = [error, None]
    found: list[Failure | None] = []

    def refresh(_: object) -> None:
        if (wrong := outcomes.pop(0)) is not None:
            raise wrong
        found.append(of._failure)

    def swept(_: object) -> None:
        of.stop()

    session = SimpleNamespace(execute=lambda _: None, close=lambda: None)
    monkeypatch.setattr(relay, "connect", lambda _: session)
    monkeypatch.setattr(relay, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(of, "_refresh", refresh)
    monkeypatch.setattr(of, "_sweeper", SimpleNamespace(sweep=swept, busy=False))
    of._watch()
    (failure,) = found
    assert failure is not None
    assert failure.code == code
    assert "password" not in failure.text
    assert of._failure is None


def test_a_slot_that_may_not_be_dropped_keeps_nothing_from_running() -> None:
    """As by a relay of inboxes alone, which needs no REPLICATION."""

    tried = 0

    def execute(*_: object) -> None:
        nonlocal tried
        tried += 1
        raise psycopg.errors.InsufficientPrivilege

    of, session = own_relay(), SimpleNamespace(execute=execute)
    of._planner = planner()
    of._drop_slots(cast("Any", session), ["tide_g_00000000"], [])
    assert tried == 1


def test_leases_go_on_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[dict[str, Any]] = []
    asked = 0

    def ask() -> list[GroupLease]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError
        return [GroupLease("g", "running", warm=True, code="c", error="a\0b", remedy="\0")]

    def execute(_: object, values: object = None) -> None:
        if isinstance(values, dict):
            beats.append(values)
            leases._stopping.set()

    session = SimpleNamespace(execute=execute, close=lambda: None)
    monkeypatch.setattr(lease, "connect", lambda _: session)
    monkeypatch.setattr(lease, "_BEAT_SECONDS", 0.0)
    leases = Leases(URL, ask)
    leases._main()
    assert [(b["errors"], b["remedies"]) for b in beats] == [(["ab"], [""])]


def configured(folder: Path, text: str) -> Config:
    path = folder / "penstock.yaml"
    path.write_text(text)
    return load(path, {})


def test_a_source_of_type_outbox(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        f"sources:\n  box: {{type: outbox, url: '{URL}', relay_group: g}}\n",
    )
    assert config.outboxes["box"].relay_group == "g"
    assert not config.sources
    assert not config.sinks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"sources:\n  box: {{type: outbox, url: '{URL}'}}\n"
            "sinks:\n  s: {type: nats, source: box}\n",
            "sinks.s.source: 'box' is an outbox, whose pipelines are set in its database",
        ),
        (
            f"sources:\n  box: {{type: outbox, url: '{URL}', group: g}}\n",
            "sources.box.group: unknown key",
        ),
        ("sources:\n  box: {type: outbox}\n", "sources.box.url: missing"),
    ],
)
def test_what_is_wrong_with_one(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, text)
    assert message in str(refused.value)
