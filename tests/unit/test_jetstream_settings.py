"""What a sink wants of its JetStream stream: the settings, and how a stream differs from them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config.durations import shown
from penstock.config.jetstream import JetStreamSettings
from penstock.config.sinks import NatsSinkSettings
from penstock.sinks.nats.errors import stream_add
from penstock.sinks.nats.stream_settings import differences, wanted_config

EVERYTHING: dict[str, Any] = {
    "name": "ROWS", "subjects": ["shop.>"], "retention": "interest", "storage": "memory",
    "max_msgs_per_subject": 1, "max_age": "7d", "max_bytes": 1_000_000, "max_msgs": -1,
    "discard": "new", "duplicate_window": "5m", "replicas": 3,
}  # fmt: skip


def sink(**settings: Any) -> NatsSinkSettings:
    return NatsSinkSettings.model_validate({"type": "nats", "source": "shop", **settings})


def test_what_a_stream_is_made_of() -> None:
    assert wanted_config(sink(stream_config=EVERYTHING), "orders") == {
        "name": "ROWS", "subjects": ["shop.>"], "retention": "interest", "storage": "memory",
        "max_msgs_per_subject": 1, "max_age": 604_800 * 10**9, "max_bytes": 1_000_000,
        "max_msgs": -1, "discard": "new", "duplicate_window": 300 * 10**9, "num_replicas": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "name", "subjects"),
    [
        ({}, "MY-ORDERS_2", ["shop.*.*.*"]),
        ({"kind": "rows"}, "MY-ORDERS_2", ["shop.*.*"]),
        ({"subject": "x.pre-{key}.{record.a|dots}"}, "MY-ORDERS_2", ["x.*.>"]),
        ({"stream": "S"}, "S", ["shop.*.*.*"]),
        ({"route": [{"when": "record.a = 1", "to": "a.{key}"}, {"to": "a.b"}]},
         "MY-ORDERS_2", ["a.*"]),
        ({"route": [{"when": "record.a = 1", "to": "x.{table}"}, {"when": "true", "to": "x.{key}"}]},
         "MY-ORDERS_2", ["x.*", "shop.*.*.*"]),
    ],
)  # fmt: skip
def test_defaults_of_name_and_subjects(
    settings: dict[str, Any], name: str, subjects: list[str]
) -> None:
    wanted = wanted_config(sink(**settings), "my-orders_2")
    assert wanted == {"name": name, "subjects": subjects, "storage": "file"}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"stream_config": {"name": "a.b"}}, "'a.b' cannot name a stream"),
        ({"stream_config": {"name": "A"}, "stream": "B"}, "remove one of them"),
        ({"stream_config": {"subjects": ["audit.>"]}}, "take nothing of what is published"),
        ({"stream_config": {"subjects": ["shop.>", "shop.a"]}}, "take the same subjects"),
        ({"stream_config": {"subjects": ["shop..a"]}}, "is no subject of a stream"),
        ({"stream_config": {"subjects": ["$JS.>"]}}, "is no subject of a stream"),
        ({"stream_config": {"subjects": []}}, "at least 1 item"),
        ({"stream_config": {"max_age": "1h", "duplicate_window": "2h"}}, "longer than max_age (1h)"),
        ({"stream_config": {"max_age": 3}}, "expected a number and its unit"),
        ({"stream_config": {"max_msgs": 0}}, "-1 for no limit"),
        ({"stream_config": {"max_msgs_per_subject": -2}}, "greater than or equal to -1"),
        ({"stream_config": {"replicas": 6}}, "less than or equal to 5"),
        ({"stream_config": {"retention": "queue"}}, "'limits', 'interest' or 'workqueue'"),
        ({"stream_config": {"max_messages": 1}}, "Extra inputs"),
    ],
)  # fmt: skip
def test_contradictions(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError) as caught:
        sink(**settings)
    assert what in str(caught.value)


def test_an_expression_may_route_anywhere() -> None:
    routed = sink(route="'audit.' || record.a", stream_config={"subjects": ["audit.>"]})
    assert wanted_config(routed, "a")["subjects"] == ["audit.>"]


def test_no_difference() -> None:
    wanted = sink(stream_config=EVERYTHING)
    assert list(differences(wanted, wanted_config(wanted, "orders"))) == []
    assert list(differences(sink(), {"name": "S"})) == []


def test_each_difference_has_both_values_and_the_command() -> None:
    there = {
        "name": "S", "subjects": ["shop.a", "shop.b"], "retention": "limits", "storage": "file",
        "max_msgs_per_subject": -1, "max_age": 0, "max_bytes": -1, "max_msgs": 10, "discard": "old",
        "duplicate_window": 500_000_000, "num_replicas": 1,
    }  # fmt: skip
    found = [tuple(each) for each in differences(sink(stream_config=EVERYTHING), there)]
    edit = "nats stream edit S --"
    assert found == [
        ("subjects", "shop.>", "shop.a, shop.b", f'{edit}subjects "shop.>"'),
        ("retention", "interest", "limits", "make a new stream with --retention interest"),
        ("storage", "memory", "file", "make a new stream with --storage memory"),
        ("max_msgs_per_subject", "1", "unlimited", f"{edit}max-msgs-per-subject 1"),
        ("max_age", "7d", "unlimited", f"{edit}max-age 7d"),
        ("max_bytes", "1000000", "unlimited", f"{edit}max-bytes 1000000"),
        ("max_msgs", "unlimited", "10", f"{edit}max-msgs=-1"),
        ("discard", "new", "old", f"{edit}discard new"),
        ("duplicate_window", "5m", "0.5s", f"{edit}dupe-window 5m"),
        ("replicas", "3", "1", f"{edit}replicas 3"),
    ]


def test_the_order_of_subjects_is_no_difference() -> None:
    wanted = sink(stream_config={"subjects": ["shop.b.>", "shop.a.>"]})
    assert list(differences(wanted, {"name": "S", "subjects": ["shop.a.>", "shop.b.>"]})) == []


def test_the_command_that_makes_it() -> None:
    usual = stream_add(sink(), "shop")
    assert usual == (
        'nats stream add SHOP --subjects "shop.*.*.*" --storage file --dupe-window 2m --defaults'
    )
    wanted = {"name": "R", "subjects": ["shop.>"], "max_msgs_per_subject": 1, "storage": "memory"}
    assert stream_add(sink(stream_config=wanted), "shop", "a.b") == (
        'nats stream add R --subjects "shop.>,a.b" --storage memory --dupe-window 2m'
        " --max-msgs-per-subject 1 --defaults"
    )


def test_durations() -> None:
    shortest = [shown(timedelta(seconds=s)) for s in (90, 120, 7200, 86_400 * 7, 0.25)]
    assert shortest == ["90s", "2m", "2h", "7d", "0.25s"]
    settings = JetStreamSettings.model_validate({"max_age": "90s"})
    assert settings.given() == {"max_age": timedelta(seconds=90)}
