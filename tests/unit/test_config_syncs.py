"""Syncs, credentials and providers in the file: what they come to, and what is refused, by its line."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.config.document import read_document
from penstock.config.file import load, load_store
from penstock.config.providers import AirbyteProvider, RestProvider
from penstock.config.secret_values import masked, secrets
from penstock.config.settings import Config
from penstock.config.syncs import CONTINUOUS, collection_id
from penstock.core.errors import ConfigError
from penstock.desired.configured import validated
from penstock.runtime.reconcile import changes

CRM = """\
  crm:
    type: rest
    base_url: https://crm.example.com/v1
    auth: {type: bearer, token: "{api_key}"}
    paginator: {type: json_link}
    collections:
      contacts:
        path: contacts
        json: {sort: id}
        incremental: {cursor_path: updated_at}
        deletes: {type: flag, path: archived}
"""
FILE = f"""\
store: postgresql://db/store
records: {{retention: 14d, store: "postgresql://db/records"}}
providers:
{CRM}
credentials:
  live: {{provider: stripe, properties: {{api_key: "${{KEY}}", account: 12}}}}
  crm: {{provider: crm, properties: {{api_key: never-shown}}, metadata: {{team: sales}}}}
syncs:
  customers:
    provider: stripe
    collections: [customers, "stripe:invoices"]
    credential: live
  crm:
    provider: crm
    collections: [contacts]
    credential: crm
    frequency: continuous
    sweep_interval: 6h
    rate_limit: {{allowed_requests: 25, interval: 10s, max_concurrent_requests: 2}}
    max_age_days: 90
    status: disabled
    max_deleted_share: 0.5
    external_id: tenant-7
    metadata: {{plan: {{name: gold}}}}
"""


def read(folder: Path, text: str) -> Config:
    file = folder / "penstock.yaml"
    file.write_text(text)
    return load(file, {"KEY": "never-shown"})


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(folder, text)
    assert "never-shown" not in str(error.value)
    return [each.partition("penstock.yaml:")[2] for each in error.value.problems]


def test_what_the_file_has(tmp_path: Path) -> None:
    config = read(tmp_path, FILE)
    customers, crm = config.syncs["customers"], config.syncs["crm"]
    assert customers.collection_ids == ("stripe:customers", "stripe:invoices")
    assert customers.collection_names == ("customers", "invoices")
    assert (customers.frequency, customers.is_continuous) == (timedelta(minutes=1), False)
    assert (crm.frequency, crm.is_continuous) == (CONTINUOUS, True)
    assert crm.rate_limit is not None
    assert crm.rate_limit.interval == timedelta(seconds=10)
    assert (crm.status, crm.max_age_days, crm.external_id) == ("disabled", 90, "tenant-7")
    live = config.credentials["live"]
    texts = {name: text.get_secret_value() for name, text in live.properties.items()}
    assert texts == {"api_key": "never-shown", "account": "12"}
    assert "never-shown" not in repr(config)
    provider = config.providers["crm"]
    assert isinstance(provider, RestProvider)
    assert provider.collections["contacts"].json_body == {"sort": "id"}
    assert config.records.retention == timedelta(days=14)
    assert config.records.records_subject == (
        "sequin-records.default.{sync_id}.{provider}.{collection_id}.{upstream_id}"
    )
    assert config.records.events_subject == (
        "sequin-events.default.{sync_id}.{provider}.{collection_id}.{upstream_id}.{event_type}"
    )
    assert collection_id("stripe", "stripe:prices") == collection_id("stripe", "prices")


def test_the_query_of_all_syncs_takes_its_part_of_sparks_slots(tmp_path: Path) -> None:
    config = read(tmp_path, FILE)
    assert config.sharing == len(config.running_sources) + 1
    disabled = FILE.replace("credential: live", "credential: live\n    status: disabled")
    assert read(tmp_path, disabled).sharing == max(1, len(config.running_sources))


def test_the_store_of_records_is_read_with_the_store(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(FILE)
    records = load_store(file, {}).records.store  # KEY is not set
    assert records is not None
    assert records.get_secret_value() == "postgresql://db/records"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "provider: stripe\n",
            "provider: strip\n",
            "21: syncs.customers.provider: there is no provider 'strip': expected one of crm, stripe, "
            "salesforce, servicenow, hubspot, github; did you mean stripe?",
        ),
        (
            "[customers, ",
            "[custmers, ",
            "22: syncs.customers.collections[0]: stripe has no collection 'custmers': expected one of "
            "charges, customers, invoices, prices, products, subscriptions; did you mean customers?",
        ),
        (
            '"stripe:invoices"',
            '"stripe:customers"',
            "22: syncs.customers.collections[1]: stripe:customers is there twice: remove one",
        ),
        (
            '"stripe:invoices"',
            '"crm:contacts"',
            "22: syncs.customers.collections[1]: crm:contacts is not of stripe, which the sync reads",
        ),
        (
            "credential: live",
            "credential: crm",
            "23: syncs.customers.credential: 'crm' is for crm, and the sync reads stripe",
        ),
        (
            "credential: live",
            "credential: life",
            "23: syncs.customers.credential: there is no credential 'life': expected one of live, crm; "
            "did you mean live?",
        ),
        (
            "[contacts]",
            "[]",
            "26: syncs.crm.collections: expected at least one collection",
        ),
        (
            "frequency: continuous",
            "frequency: contiuous",
            "28: syncs.crm.frequency: expected a number and its unit, as in 90s, 30m, 12h or 7d; or "
            "continuous (got 'contiuous')",
        ),
        (
            "max_age_days: 90",
            "max_age_dais: 90",
            "31: syncs.crm.max_age_dais: unknown key; did you mean max_age_days?; expected one of: "
            "provider, collections, credential, frequency, sweep_interval, rate_limit, max_age_days, "
            "status, max_deleted_share, external_id, metadata",
        ),
        (
            "type: bearer, token",
            "type: bearer, tokn",
            "7: providers.crm.auth.tokn: unknown key; did you mean token?; expected one of: type, token",
        ),
        (
            "type: json_link",
            "type: jsonlink",
            "8: providers.crm.paginator: the type is 'jsonlink': expected one of single_page, "
            "json_link, header_link, header_cursor, cursor, offset, page_number, "
            "keyset; did you mean json_link?",
        ),
        (
            "type: flag, path: archived",
            "type: flag, pat: archived",
            "14: providers.crm.collections.contacts.deletes.pat: unknown key; did you mean path?; "
            "expected one of: type, path, value",
        ),
        (
            "api_key: never-shown}",
            "api_key: [never-shown]}",
            "18: credentials.crm.properties.api_key: expected string, got a list",
        ),
        (
            "api_key: never-shown}",
            'never-shown-either: ""}',
            "18: credentials.crm.properties: 'never-shown-either' is no property's name: expected "
            "letters, digits and `_`",
        ),
    ],
)
def test_mistakes_have_their_line_and_what_is_expected(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert FILE.count(old) == 1
    text = FILE.replace(old, new)
    if "never-shown-either" in new:
        with pytest.raises(ConfigError) as error:
            read(tmp_path, text)
        found = [each.partition("penstock.yaml:")[2] for each in error.value.problems]
    else:
        found = problems(tmp_path, text)
    assert expected in found, found


def test_a_ready_provider_is_not_made_again(tmp_path: Path) -> None:
    found = problems(
        tmp_path, FILE.replace("  crm:\n    type: rest", "  github:\n    type: rest", 1)
    )
    assert (
        "4: providers.github: github is a provider that Penstock has already: choose another name"
        in found
    )


def test_all_of_a_credential_is_secret() -> None:
    spec: dict[str, Any] = {
        "provider": "crm",
        "properties": {"user": "u", "port": 5, "of": "${VAR}", "many": ["a"]},
        "metadata": {"team": "sales"},
    }
    shown = masked("credential", spec)
    assert shown == {
        "provider": "crm",
        "properties": {"user": "***", "port": "***", "of": "${VAR}", "many": ["***"]},
        "metadata": {"team": "sales"},
    }
    assert [path for path, _ in secrets("credential", spec)] == [
        ("properties", "user"), ("properties", "port"), ("properties", "many", 0),
    ]  # fmt: skip


def test_a_provider_shows_placeholders_and_no_secret() -> None:
    spec: dict[str, Any] = {
        "type": "rest",
        "base_url": "https://u:pw@crm.example.com/{instance}",
        "headers": {"X-Key": "hush", "X-Other": "{key}", "X-Third": "Key {key}"},
        "auth": {
            "type": "oauth2_client_credentials",
            "access_token_url": "https://login.example.com/token",
            "client_id": "{client_id}",
            "client_secret": "hush",
            "default_token_expiration": 60,
        },
        "collections": {
            "a": {
                "path": "a",
                "params": {"access_token": "hush", "properties": "a,b"},
                "deletes": {
                    "type": "events",
                    "path": "e",
                    "key_path": "id",
                    "headers": {"X": "hush"},
                },
            }
        },
    }
    shown = masked("provider", spec)
    assert "hush" not in str(shown)
    assert shown["base_url"] == "https://u:***@crm.example.com/{instance}"
    assert shown["headers"] == {"X-Key": "***", "X-Other": "{key}", "X-Third": "***"}
    assert shown["auth"] == {**spec["auth"], "client_secret": "***"}
    assert shown["collections"]["a"]["params"] == {"access_token": "***", "properties": "a,b"}
    for key, auth in (("hush", "***"), ("Key hush-{key}", "***"), ("{key}", "{key}")):
        shown = masked("provider", {**spec, "auth": {"type": "api_key", "api_key": key}})
        assert shown["auth"]["api_key"] == auth


def test_a_manifest_of_airbyte(tmp_path: Path) -> None:
    manifest = "streams: [{name: '${not_a_variable}'}]"
    (tmp_path / "poke.manifest").write_text(manifest)
    text = "providers: {poke: {type: airbyte, manifest: {file: poke.manifest}}}"
    provider = read(tmp_path, text).providers["poke"]
    assert isinstance(provider, AirbyteProvider)
    assert provider.manifest.code == manifest
    # The store has the text, as other machines lack the file.
    document = read_document(tmp_path / "penstock.yaml", {})
    spec = document.entities["provider", "poke"]
    assert spec["manifest"]["file"] == "poke.manifest"
    again = validated({("provider", "poke"): spec}, {})[0].providers["poke"]
    assert again == provider


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ("{file: none.yaml}", r"none\.yaml: cannot be read: No such file"),
        ("'a: [b'", "the manifest is not YAML"),
        ("'streams: []'", "it is no manifest of Airbyte: expected the keys"),
        ("7", "expected a manifest, or {file: path}"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, manifest: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"providers\.poke\.manifest: {reason}"):
        read(tmp_path, f"providers: {{poke: {{type: airbyte, manifest: {manifest}}}}}")


def test_a_rotated_credential_touches_no_source(tmp_path: Path) -> None:
    shop = """\
sources: {shop: {type: postgres, url: "postgresql://db/shop"}}
sinks: {orders: {type: stream, source: shop}}
"""
    old = read(tmp_path, FILE + shop)
    new = read(tmp_path, FILE.replace("api_key: never-shown", "api_key: other") + shop)
    assert old.credentials["crm"] != new.credentials["crm"]
    assert not changes(old, new)
    of_shop = new.only("shop")
    assert (of_shop.providers, of_shop.credentials, of_shop.syncs) == ({}, {}, {})
