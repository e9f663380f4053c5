"""No setting takes another type's value, but for texts that stand for one; one rule of names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.api.schemas import NEW_CONSUMER, NewPull, NewWebhook, PositionBody, Rewind
from penstock.config.consumers import PullConsumer, WebhookConsumer
from penstock.config.file import load
from penstock.config.settings import Config, SparkSettings, StoreSettings
from penstock.config.sinks import NatsSinkSettings, StreamSinkSettings
from penstock.config.sources import OutboxSource, PostgresSource
from penstock.config.strict import Untyped, is_name
from penstock.config.transforms import TransformSettings
from penstock.core.errors import ConfigError

MODELS: list[type[BaseModel]] = [
    NewPull, NewWebhook, PositionBody, Rewind, PullConsumer, WebhookConsumer, PostgresSource,
    OutboxSource, NatsSinkSettings, StreamSinkSettings, StoreSettings, SparkSettings, Config,
    TransformSettings,
]  # fmt: skip
WRONG = {
    int: [True, False, "1", "3000", 1.5, None, [], float("inf")],
    float: [True, False, "1", "1.5", None, []],
    bool: [0, 1, "true", "false", "yes", 1.0, [], "on"],
}


def fields() -> Iterator[tuple[type[BaseModel], str, type]]:
    """Yield each field that is a number or a boolean, perhaps an optional one."""
    for model in MODELS:
        for name, field in model.model_fields.items():
            for kind in {field.annotation, *get_args(field.annotation)} & set(WRONG):
                assert kind is not None
                yield model, name, kind


@pytest.mark.parametrize(("model", "name", "kind"), list(fields()))
def test_a_field_takes_its_own_type_alone(model: type[BaseModel], name: str, kind: type) -> None:
    field = model.model_fields[name]
    annotated: Any = Annotated[field.annotation, *field.metadata]
    adapter: TypeAdapter[Any] = TypeAdapter(annotated)
    for value in WRONG[kind]:
        if value is not None or field.annotation is kind:
            with pytest.raises(ValidationError):
                adapter.validate_python(value)
    whole = "true" if kind is bool else "1"
    assert adapter.validate_python(Untyped(whole)) == 1
    assert adapter.validate_python(kind(1)) == 1


def test_a_whole_number_of_json_may_have_a_point() -> None:
    body = {"name": "a", "stream": "b", "ack_wait_ms": 3000.0}
    made = NEW_CONSUMER.validate_python(body)
    assert repr(made.ack_wait_ms) == "3000"


@pytest.mark.parametrize("name", ["a", "A-1", "0_", "a" * 63, "a__b-"])
def test_names(name: str) -> None:
    assert is_name(name)
    assert NEW_CONSUMER.validate_python({"name": name, "stream": "s"}).name == name


@pytest.mark.parametrize(
    "name", ["", "a" * 64, "a.b", "-a", "_a", "a b", "a\n", "é", "a/b", "a" * 200, "٣"]
)
def test_no_names(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ValidationError, match="is not a name: expected letters, digits"):
        NEW_CONSUMER.validate_python({"name": name, "stream": "s"})


FILE = """\
sources: {{shop: {{type: postgres, url: "postgres://db/shop"}}}}
sinks:
  orders: {{type: stream, source: shop}}
  out: {{type: nats, source: shop, {sink}}}
consumers:
  c: {{stream: orders, {consumer}}}
"""


def read(tmp_path: Path, sink: str = "", consumer: str = "", **environ: str) -> Config:
    file = tmp_path / "penstock.yaml"
    file.write_text(FILE.format(sink=sink, consumer=consumer))
    return load(file, environ)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("ack_wait_ms", "true", "expected a whole number, got True (a boolean)"),
        ("ack_wait_ms", "1.5", "expected a whole number, got 1.5 (a number)"),
        ("ack_wait_ms", '"3000"', "expected a whole number, got '3000': remove its quotes"),
        ("max_deliver", "'-1'", "expected a whole number, got '-1': remove its quotes"),
        ("batch_size", "yes", "expected a whole number, got True (a boolean)"),
        ("ack_timeout", "'5'", "expected a number, got '5': remove its quotes"),
        ("ack_timeout", "'2.5'", "expected a number, got '2.5': remove its quotes"),
        ("ack_timeout", "${S:-soon}", "expected a number, got '${S:-soon}'"),
        ("tls", "1", "expected true or false, got 1 (a number)"),
        ("tls", "'on'", "expected true or false, got 'on': remove its quotes"),
        ("tls", "${T:-maybe}", "expected true or false, got '${T:-maybe}'"),
    ],
)
def test_the_file(tmp_path: Path, key: str, value: str, problem: str) -> None:
    parts = {"sinks.out": "", "consumers.c": ""}
    part = "consumers.c" if key in PullConsumer.model_fields else "sinks.out"
    parts[part] = f'{key}: "{value}"' if "$" in value else f"{key}: {value}"
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, *parts.values())
    assert str(caught.value).endswith(f" {part}.{key}: {problem}")


def test_a_variable_of_the_environment_stands_for_any_type(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        'batch_size: "${SIZE}", tls: "${TLS}", ack_timeout: "${NONE:-2.5}",'
        ' user: "${SIZE}", password: x',
        'ack_wait_ms: "${WAIT}"',
        SIZE="10",
        TLS="true",
        WAIT="3000",
    )
    out, consumer = config.sinks["out"], config.consumers["c"]
    assert isinstance(out, NatsSinkSettings)
    assert (out.batch_size, out.tls, out.ack_timeout, out.user) == (10, True, 2.5, "10")
    assert consumer.ack_wait_ms == 3000
    assert {type(out.batch_size), type(consumer.ack_wait_ms)} == {int}
    assert type(out.user) is str
    with pytest.raises(ConfigError, match=r"ack_wait_ms: expected .* got '\${WAIT}'"):
        read(tmp_path, "", 'ack_wait_ms: "${WAIT}"', WAIT="soon")
