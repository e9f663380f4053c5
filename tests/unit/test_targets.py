"""Targets and bastions in the file: what sinks and webhooks take from them, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from penstock.config.consumers import WebhookConsumer, WebhookSettings, settings_of
from penstock.config.file import load
from penstock.config.nats import NatsSinkConfig
from penstock.config.nats_login import NatsServer
from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.config.sources import servers_of
from penstock.config.targets import HttpTarget
from penstock.core.errors import ConfigError
from penstock.sinks.nats import announced

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\\nnever-shown\\n-----END OPENSSH PRIVATE KEY-----\\n"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGW0Oxh6bbRvH3rHXmZPd1WlJUVqYJPvOtMrBLVqjvHj"
FILE = f"""\
targets:
  far:
    type: nats
    url: tls://a:4222,tls://b:4222
    user: app
    password: never-shown
    bastion: {{host: gate, user: penstock, private_key: "{KEY}", host_key: "{HOST_KEY} comment"}}
  hooks:
    type: http
    url: https://hooks.internal/base/
    headers: {{Authorization: never-shown, X-A: a}}
    bastion: {{host: gate, port: 2222, user: penstock}}
sources:
  shop: {{type: postgres, url: "postgresql://db/shop", bastion: {{host: gate, user: penstock}}}}
sinks:
  out: {{type: nats, source: shop, target: far, subject: "x.{{table}}"}}
  orders: {{type: stream, source: shop}}
consumers:
  hook: {{type: webhook, stream: orders, target: hooks, path: /orders, headers: {{x-a: b}}}}
"""


def read(folder: Path, text: str) -> Config:
    file = folder / "penstock.yaml"
    file.write_text(text)
    return load(file, {})


def test_sinks_and_webhooks_have_what_their_targets_have(tmp_path: Path) -> None:
    config = read(tmp_path, FILE)
    sink, hook = config.sinks["out"], config.consumers["hook"]
    assert isinstance(sink, NatsSinkSettings)
    assert isinstance(hook, WebhookConsumer)
    assert (sink.safe_url, sink.user, sink.subject) == (
        "tls://a:4222,tls://b:4222", "app", "x.{table}",
    )  # fmt: skip
    travelled = pickle.loads(pickle.dumps(sink))  # to the executors
    assert travelled == sink
    assert travelled.reached is not None
    assert (travelled.reached.owner, travelled.reached.port) == ("far", 22)
    assert "never-shown" in (travelled.reached.private_key or "")
    assert travelled.reached.host_key == HOST_KEY
    assert "never-shown" not in f"{sink!r} {travelled.reached!r} {config!r}"
    stored = settings_of("webhook", hook.stored())
    assert stored.stored()["url"] == "https://hooks.internal/base/orders"
    assert stored.stored()["headers"] == {"Authorization": "never-shown", "x-a": "b"}
    assert stored.stored()["via"] == {
        "name": "hooks", "bastion": {"host": "gate", "port": 2222, "user": "penstock"},
    }  # fmt: skip
    assert "via" not in stored.shown()
    # What the store has completes what the file leaves out.
    found = config.bastions()
    assert list(found) == ["far", "hooks", "shop"]
    assert config.reached_by(found).sources["shop"].address.bastion == found["shop"]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("target: far", "target: fra", "sinks.out.target: there is no target 'fra': expected one"),
        ("target: far", "target: hooks", "target 'hooks' is of type http, and a NATS sink needs"),
        ("target: far", "target: far, token: u", "target and token: the target has them all"),
        ("target: far", "target: far, url: nats://x", "target and url: the target has them all"),
        (
            "target: hooks, path",
            "path",
            "url is missing: give the webhook's `url`, or the `target`",
        ),
        ("target: hooks", "target: hooks, url: 'https://x'", "target and url: use one of them"),
        ("target: hooks, path", "url: 'https://x', path", "path goes with a `target`"),
        ("path: /orders", "path: orders", "'orders' is not a path"),
        ("    url: tls://a:4222,tls://b:4222\n", "", "targets.far.url: missing"),
        (HOST_KEY, "ssh-ed25519 AAAA", "not a public key"),
        ("-----BEGIN", "never-shown BEGIN", "not a private key"),
        ("private_key: ", "private_key_file: nowhere, private_key: ", "use one of them"),
        ("postgresql://db/shop", "postgresql:///shop", "behind a bastion the url needs the server"),
        ("  far:\n", "  shop:\n", "source 'shop' has a bastion under that name too: rename"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, FILE.replace(old, new))
    assert problem in str(caught.value)
    assert "never-shown" not in str(caught.value)


def test_the_servers_of_a_url() -> None:
    assert servers_of("postgresql://a:1,b:2/x") == [("a", 1), ("b", 2)]
    assert servers_of("host=a,b dbname=x") == [("a", 5432), ("b", 5432)]


def test_announced_addresses_are_verified_for_the_known_name() -> None:
    config = NatsSinkConfig(url="tls://seed:4222,tls://other:4222")
    seed = NatsServer("seed", 4222, True, user="app", password="p")
    announced.note(config, seed, {"connect_urls": ["10.0.0.1:4223", "other:4222", "c:4222", ""]})
    first, second, third, fourth = announced.servers_of(config)
    assert (first.host, second.host) == ("seed", "other")
    assert (third.host, third.port, third.tls_name, third.user) == ("10.0.0.1", 4223, "seed", "app")
    assert (fourth.host, fourth.tls, fourth.tls_name) == ("c", True, None)


@pytest.mark.parametrize("model", [WebhookSettings, HttpTarget])
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"headers": {"no name": "x"}}, "is not a header's name"),
        ({"headers": {"webhook-id": "x"}}, "is set by Penstock"),
        ({"headers": {"x-a": "a\nb"}}, "characters that no header may have"),
        ({"secrets": ["whsec_c2hvcnQ="]}, "not a Standard Webhooks secret"),
        ({"secrets": ["a", "b", "c"]}, "at most 2 items"),
    ],
)
def test_headers_and_secrets_that_no_request_may_have(
    model: type[BaseModel], given: dict[str, Any], why: str
) -> None:
    kind = {"type": "http"} if model is HttpTarget else {}
    with pytest.raises(ValidationError, match=why):
        model.model_validate({"url": "https://crm.example", **kind, **given})
