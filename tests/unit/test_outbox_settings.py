"""A relay pipeline's config: its keys, what its errors show, references, the sink that it makes."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from penstock.config.nats import OutboxForm
from penstock.config.settings import Config
from penstock.config.sources import PostgresSource
from penstock.core.errors import PipelineError
from penstock.outbox.settings import OutboxSinkSettings, RelayPipeline, paused_sink, read

EXAMPLE: dict[str, Any] = {
    "sink_type": "nats",
    "url": "${env:NATS_URL}",
    "subject": "notifications.{op}",
    "stream": "NOTIFICATIONS",
}
ENVIRONMENT = {"NATS_URL": "nats://one:4222,nats://two:4333", "START": "end"}
SECRET = "hunter2-very-secret"
SEED = "SUAIO3FHUX5PNV2LQIIP7TZ3N4L7TX3W53MQGEIVYFIGA635OZCKEYHFLM"


def wrong(**keys: Any) -> str:
    """Return the error of a config that differs from a right one by `keys`."""
    config = {"sink_type": "nats", "url": "nats://one:4222", **keys}
    with pytest.raises(PipelineError) as caught:
        read({key: value for key, value in config.items() if value is not ...}, ENVIRONMENT)
    assert caught.value.code == "invalid_config"
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_the_example_of_the_issue_makes_a_sink() -> None:
    pipeline = read(EXAMPLE, ENVIRONMENT)
    assert (pipeline.batch_size, pipeline.format, pipeline.start) == (100, "plain", "beginning")
    sink = pipeline.sink(source="nats-group", outbox="notifications")
    assert [str(server) for server in sink.servers] == ["nats://one:4222", "nats://two:4333"]
    assert sink.tables == ("tide.outbox_notifications",)
    assert sink.actions == ("insert",)
    assert sink.stream == "NOTIFICATIONS"
    assert sink.batch_size == 100
    assert sink.form == OutboxForm("notifications")
    assert sink.template.wildcard() == "notifications.*"
    assert pickle.loads(pickle.dumps(sink)) == sink


def test_a_configuration_keeps_the_sink_as_it_is() -> None:
    source = PostgresSource(
        type="postgres", url=SecretStr("postgresql://localhost/shop"), tables=("tide.*",)
    )
    sink = read(EXAMPLE, ENVIRONMENT).sink(source="g", outbox="Odd Name")
    config = Config(sources={"g": source}, sinks={"notify": sink})
    kept = config.sinks["notify"]
    assert isinstance(kept, OutboxSinkSettings)
    assert kept.form == OutboxForm("Odd Name")
    assert kept.tables == ('tide."outbox_Odd Name"',)


def test_every_key_reaches_the_sink() -> None:
    keys = {
        "subject": "s.{stream_table}.{payload.kind}",
        "username": "me",
        "password": SECRET,
        "tls_enabled": True,
        "tls_ca_cert": "/ca.pem",
        "tls_cert": "/c.pem",
        "tls_key": "/c.key",
        "batch_size": 7,
        "format": "cloudevents",
        "start": "end",
        "route": [
            {"when": "record.payload.kind = 'eu'", "to": "eu.{header.region}"},
            {"to": "rest.{outbox_id}"},
        ],
        "group_by": "payload.customer",
        "key_scope": "stream",
    }
    pipeline = read(EXAMPLE | keys, ENVIRONMENT)
    assert pipeline.start == "end"
    sink = pipeline.sink(source="g", outbox="o", tag="0a1b2c3d")
    assert (sink.user, sink.tls, sink.tls_ca_cert) == ("me", True, Path("/ca.pem"))
    assert sink.password is not None
    assert sink.password.get_secret_value() == SECRET
    assert (sink.tls_cert, sink.tls_key, sink.batch_size) == (Path("/c.pem"), Path("/c.key"), 7)
    assert sink.form == OutboxForm("o", "cloudevents", "payload.customer", "0a1b2c3d", "stream")
    assert sink.template.wildcard() == "s.o.*"
    assert sink.route is not None
    assert [rule.to for rule in sink.route if not isinstance(rule, str)] == [
        "eu.{header.region}", "rest.{outbox_id}",
    ]  # fmt: skip
    for shown in (repr(sink), str(sink), repr(pipeline)):
        assert SECRET not in shown


def test_a_null_is_as_if_it_was_not_given() -> None:
    nulls = dict.fromkeys(RelayPipeline.model_fields.keys() - EXAMPLE.keys())
    rules = [{"when": "record.id = 1", "to": "a"}, {"when": None, "to": "b"}]
    assert read(EXAMPLE | nulls, ENVIRONMENT) == read(EXAMPLE, ENVIRONMENT)
    assert read(EXAMPLE | {"route": rules}, ENVIRONMENT).route is not None
    assert "sink_type: missing" in wrong(sink_type=None)
    assert "route[0].to: missing" in wrong(route=[{"to": None}])


def test_a_hint_names_a_near_key_or_none() -> None:
    assert "user: unknown key; did you mean username?" in wrong(user="me")
    assert "URL: unknown key; did you mean url?" in wrong(URL="nats://one")
    assert "unknown key; expected one of:" in wrong(xyzzy=1)


def test_references_are_resolved_anywhere(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{SECRET}\n")
    config = {
        "sink_type": "nats",
        "url": "nats://${env:HOST}:${env:PORT}",
        "token": f"${{file:{tmp_path}/token}}",
        "batch_size": "${env:SIZE}",
        "tls_enabled": "${env:TLS}",
        "route": [{"to": "${env:HOST}.x"}],
    }
    environ = {"HOST": "${env:PORT}", "PORT": "4222", "SIZE": "5", "TLS": "False"}
    with pytest.raises(PipelineError):  # what a reference gives is no reference
        read(config, environ)
    pipeline = read(config, environ | {"HOST": "here"})
    assert pipeline.url == "nats://here:4222"
    assert pipeline.token is not None
    assert pipeline.token.get_secret_value() == SECRET
    assert (pipeline.batch_size, pipeline.tls_enabled) == (5, False)
    assert pipeline.route is not None
    assert SECRET not in repr(pipeline)


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("${env:NOT_THERE}", "no such variable"),
        ("${file:/no/such/file}", "No such file"),
        ("${file:/}", "directory"),
        ("${file:\0}", "no path"),
        ("${vault:nats}", r"expected ${env:NAME} or ${file:path}"),
    ],
)
def test_an_unresolved_reference_is_named(reference: str, why: str) -> None:
    config = EXAMPLE | {"route": [{"to": f"a.{reference}"}], "token": "${env:SECRET}"}
    with pytest.raises(PipelineError) as caught:
        read(config, ENVIRONMENT | {"SECRET": SECRET})
    error = caught.value
    assert error.code == "unresolved_reference"
    assert reference in error.message
    assert why in error.message
    assert error.message.startswith("route[0].to: ")
    assert SECRET not in error.message + error.remedy


def test_a_reference_to_no_regular_file_does_not_wait(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def write() -> None:  # for who would wait for it
        with contextlib.suppress(OSError):  # nobody reads, or its folder is gone
            fifo.write_bytes(b"x")

    threading.Thread(target=write, daemon=True).start()
    for path in (fifo, Path(os.devnull)):
        with pytest.raises(PipelineError, match="no regular file"):
            read(EXAMPLE | {"token": f"${{file:{path}}}"}, ENVIRONMENT)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"sink_type": "kafka"}, ('sink_type: expected "nats", got "kafka"',)),
        ({"sink_type": ...}, ('sink_type: missing; expected "nats"',)),
        ({"url": ...}, ("url: missing; expected nats://",)),
        ({"url": "http://one"}, ("url: ", "http")),
        ({"url": f"nats://me:{SECRET}@one:x"}, ("url: ", "not a list of servers")),
        ({"url": 5}, ("url: expected nats://host:port", "got 5")),
        ({"urls": "nats://one"}, ("urls: unknown key; did you mean url?", "credentials_file")),
        ({"subject": "a.{payload}"}, ("subject: ", "position 2", "{payload.<field>}")),
        ({"subject": "a..b"}, ("subject: ", "position 2")),
        ({"subject": "a.{table}"}, ("unknown variable {table}",)),
        ({"stream": "a.b"}, ("stream: 'a.b' cannot name a stream",)),
        ({"batch_size": 0}, ("batch_size: expected a whole number from 1 to 1000, got 0",)),
        ({"batch_size": 1001}, ("got 1001",)),
        ({"batch_size": "100"}, ('batch_size: expected a whole number from 1 to 1000, got "100"',)),
        ({"batch_size": True}, ("batch_size: ", "got true")),
        ({"batch_size": "${env:NATS_URL}"}, ('"${env:NATS_URL}" gives what can\'t be used',)),
        ({"tls_enabled": "yes"}, ("tls_enabled: expected true or false",)),
        ({"format": "cloudevent"}, ("format: expected ", "did you mean cloudevents?")),
        ({"start": "${env:START}"}, ('start: "${env:START}"', 'expected "beginning" or "end"')),
        ({"group_by": "customer"}, ('group_by: expected "payload.<field>"', "customer")),
        ({"group_by": "payload."}, ("group_by: ",)),
        ({"route": "'a.' || payload"}, ("route: expected a list of rules",)),
        ({"route": [{"when": "record.payload ="}]}, ("route[0].when: ", "route[0].to: missing")),
        ({"route": [{"to": "a", "if": "b"}]}, ("route[0].if: unknown key", "when, to")),
        ({"route": [{"to": "a.{table}"}]}, ("route: rule 1", "{table}")),
        ({"username": "me"}, ("password is missing",)),
        ({"password": SECRET}, ("username is missing",)),
        ({"token": SECRET, "nkey_seed": SEED}, ("use one way to log in, not 2",)),
        ({"token": [SECRET]}, ("token: expected a string, got a list",)),
        ({"password": {"a": SECRET}}, ("password: expected a string, got an object",)),
        ({"nkey_seed": ""}, ("nkey_seed: it is empty",)),
        ({"tls_key": "/k"}, ("tls_cert is missing",)),
        ({"tls_enabled": False, "tls_ca_cert": "/ca"}, ("tls_enabled is false",)),
        ({"tls_cert": SECRET + "\n", "tls_key": 3}, ("tls_key: ", "got 3")),
    ],
)
def test_an_error_names_key_value_and_what_is_expected(
    keys: dict[str, Any], parts: tuple[str, ...]
) -> None:
    error = wrong(**keys)
    for part in parts:
        assert part in error


def test_an_error_has_all_mistakes() -> None:
    with pytest.raises(PipelineError) as caught:
        read({"sink_type": "nats", "batch_size": 0, "format": "xml"}, {})
    assert len(caught.value.problems) == 3


def test_what_a_reference_gave_is_not_shown() -> None:
    config = {"sink_type": "nats", "url": "${env:URL}", "stream": "${env:STREAM}"}
    with pytest.raises(PipelineError) as caught:
        read(config, {"URL": f"{SECRET}://x", "STREAM": f"a.{SECRET}"})
    assert SECRET not in str(caught.value)
    assert '"${env:URL}" gives what can\'t be used: expected nats://' in str(caught.value)


def test_a_sink_that_only_keeps_messages_routes_them() -> None:
    route = [{"when": "record.payload.kind = 'eu'", "to": "eu.{payload.x}"}]
    sink = paused_sink(
        EXAMPLE | {"url": "${env:NOT_THERE}", "route": route}, {}, source="g", outbox="o"
    )
    assert sink is not None
    assert sink.route is not None
    assert len(sink.route) == 1
    assert paused_sink({"route": 5, "url": 7}, {}, source="g", outbox="o") is None


def test_it_routes_by_what_references_give() -> None:
    route = [{"when": "record.payload.kind = 'eu'", "to": "${env:WHERE}"}]
    given = EXAMPLE | {"url": "${env:NOT_THERE}", "route": route}
    sink = paused_sink(given, {"WHERE": "eu.x"}, source="g", outbox="o")
    assert sink is not None
    assert sink.route is not None
    assert "to='eu.x'" in repr(sink.route)
    assert paused_sink(given, {}, source="g", outbox="o") is None


@pytest.mark.parametrize("key", ["tls_key", "tls_cert", "tls_ca_cert", "credentials_file"])
@pytest.mark.parametrize(
    "given",
    ["${env:PEM}", "-----BEGIN PRIVATE KEY-----\nMIGHAg\n", "-----BEGIN PRIVATE KEY----- MIGHAg"],
)
def test_a_files_content_is_no_path_and_is_not_shown(key: str, given: str) -> None:
    config = {"sink_type": "nats", "url": "nats://h", key: given}
    with pytest.raises(PipelineError) as caught:
        read(config, {"PEM": "-----BEGIN PRIVATE KEY-----\nMIGHAg\n"})
    assert caught.value.code == "invalid_config"
    assert "path of a" in caught.value.message
    assert "MIGHAg" not in f"{caught.value} {caught.value!r}"
