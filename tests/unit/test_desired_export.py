"""What `penstock export` writes plans as empty, whatever the state; and no secret is in it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.document import read_document
from penstock.config.models import SECTIONS
from penstock.config.secret_values import masked
from penstock.config.strict import is_name
from penstock.desired.entities import Entity, Snapshot
from penstock.desired.export import exported
from penstock.desired.from_file import document_for
from penstock.desired.plan import Plan, plan_of
from penstock.desired.variables import stored_variables

SECRET = "zQx7"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8Fq4dvbLwhCGTfTBrbTyUnPEAqK8fV2hxTqqVLmVTP"
ENVIRON = {"NAMED": "value", "SHOP": "postgres://app:pw@db/shop"}
names = st.one_of(
    st.sampled_from(["shop", "Shop", "a-b", "a_b", "on", "1", "1e3", "0x1", "null", "yes"]),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,8}", fullmatch=True),
).filter(is_name)
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12),
    st.sampled_from(
        ["true", "1.0", "2024-01-01", " x ", "a: b", "#", "${NAMED}", "$${x}", "~", "é\tü"]
    ),
).map(lambda text: text if "${NAMED}" in text or "$${x}" in text else text.replace("${", "$"))
secret_texts = st.one_of(
    st.just("${NAMED}"),
    st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=6)
    .map(lambda text: SECRET + text.replace("$", "")),
)  # fmt: skip
urls = st.sampled_from(
    [
        "postgres://db/shop",
        f"postgres://app:{SECRET}@db/shop",
        "postgres://app:${NAMED}@db/x",
        "${SHOP}",
    ]
)
sources = st.fixed_dictionaries(
    {"type": st.just("postgres"), "url": urls},
    optional={
        "tables": st.lists(st.sampled_from(["public.*", "a.b"]), min_size=1, max_size=2),
        "publication": texts.filter(lambda text: len(text.encode()) < 63),
    },
)
lua = "function transform(m)\n  -- ${x} costs $$ and a trailing space \n\treturn m\nend\n"
nats: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"type": st.just("nats")},
    optional={
        "url": st.sampled_from(["nats://n:4222", f"nats://{SECRET}@n,nats://{SECRET}@m"]),
        "token": secret_texts,
        "group_by": st.lists(texts, min_size=1, max_size=3, unique=True),
        "ack_timeout": st.one_of(
            st.integers(1, 300), st.floats(0.001, 300), st.just("${TIMEOUT:-5}")
        ),
        "filter": st.sampled_from(["record.a > 1", "record.name = 'it''s: # ${NAMED}'"]),
        "transform": st.sampled_from([{"lua": lua.replace("${", "$${")}, {"sql": "record.a AS b"}]),
        "route": st.just([{"when": "action = 'insert'", "to": "a.b"}, {"to": "c"}]),
    },
)
streams = st.fixed_dictionaries(
    {"type": st.just("stream")},
    optional={"retention": st.sampled_from(["90s", "7d"]), "initial_backfill": st.booleans()},
)
headers = st.dictionaries(
    st.sampled_from(["authorization", "x-a", "X-B"]), secret_texts, max_size=2
)
consumers = st.one_of(
    st.fixed_dictionaries({}, optional={"type": st.just("pull"), "max_deliver": st.integers(1, 9)}),
    st.fixed_dictionaries(
        {
            "type": st.just("webhook"),
            "url": st.sampled_from(
                ["https://h/x", f"https://h/x?k={SECRET}", "https://${NAMED}/x"]
            ),
        },
        optional={
            "headers": headers,
            "filters": st.just({"table": "orders", "action": ["insert"]}),
        },
    ),
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Return the root of a valid file, its entities referring to each other."""
    named = draw(st.lists(names, min_size=3, max_size=9, unique=True))
    count = draw(st.integers(1, max(1, len(named) // 3)))
    found_sources = {n: draw(sources) for n in named[:count]}
    for name, source in found_sources.items():
        source.setdefault("slot", "s" + name.lower().replace("-", "__"))
    for number, source in enumerate(found_sources.values()):
        source["slot"] = f"{source['slot']}_{number}"
    found_sinks = {}
    for name in named[count : 2 * count + 1]:
        sink = draw(st.one_of(nats, streams))
        found_sinks[name] = {**sink, "source": draw(st.sampled_from(named[:count]))}
    made = [name for name, sink in found_sinks.items() if sink["type"] == "stream"]
    rest = named[2 * count + 1 :] if made else []
    found = {n: {**draw(consumers), "stream": draw(st.sampled_from(made))} for n in rest}
    root = {"sources": found_sources, "sinks": found_sinks, "consumers": found}
    return {key: part for key, part in root.items() if part} | {"store": "${STORE:-postgres://s/s}"}


def snapshot_of(document: Any) -> Snapshot:
    """Return a state with a document's entities, after a trip through JSON as `jsonb` takes it."""
    entities = {}
    for number, (key, spec) in enumerate(document.entities.items()):
        stored = json.loads(json.dumps(spec, sort_keys=True))
        at = datetime(2026, 1, 1, tzinfo=UTC)
        entities[key] = Entity(key[0], key[1], UUID(int=number), stored, 1, "file", at)
    return Snapshot(1, entities)


@settings(max_examples=60)
@given(root=documents())
def test_an_export_plans_as_empty(tmp_path_factory: pytest.TempPathFactory, root: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    file = folder / "written.yaml"
    file.write_text(yaml.safe_dump(root, allow_unicode=True), encoding="utf-8")
    snapshot = snapshot_of(read_document(file, ENVIRON))
    text = exported(snapshot, root)
    assert SECRET not in text
    file.write_text(text, encoding="utf-8")
    document = document_for(snapshot, file, ENVIRON)
    plan = plan_of(document, snapshot, environ=ENVIRON, prune=True)
    assert plan.changes == ()
    # And a plan of all of it shows no secret, but for the form that is saved.
    whole = plan_of(
        document, Snapshot(0, {}), environ={**ENVIRON, **stored_variables(snapshot, ENVIRON)}
    )
    assert SECRET not in json.dumps(whole.shown())
    assert Plan.from_json(json.loads(json.dumps(whole.as_json()))) == whole
    for entity in snapshot.entities.values():
        assert SECRET not in json.dumps(masked(entity.kind, entity.spec))


ALL_KINDS = f"""\
store: postgres://s/s
sources:
  shop:
    type: postgres
    url: postgres://app:{SECRET}@db/shop
    bastion: {{host: ssh.example.com, user: tunnel, private_key_file: <key>, host_key: {HOST_KEY}}}
sinks:
  orders: {{type: stream, source: shop}}
  out:
    type: nats
    source: shop
    target: cluster
    subject: "o.{{table}}"
    stream_config: {{name: OUT, storage: file, max_age: 7d, duplicate_window: 2m}}
consumers:
  published:
    type: nats
    stream: orders
    target: cluster
    subject: "p.{{table}}"
    create_stream: true
    stream_config: {{name: PUBLISHED, max_msgs: 1000}}
    start_at: 2026-01-31T12:00:00Z
    filters: {{table: public.orders, sql: "record.a <> '${{NAMED}}'"}}
  hook:
    type: webhook
    stream: orders
    target: partner
    path: /in
    headers: {{x-tenant: "7"}}
targets:
  cluster:
    type: nats
    url: nats://n:4222,nats://m:4222
    user: app
    password: {SECRET}
    bastion:
      host: ssh.example.com
      port: 2222
      user: tunnel
      private_key: |
        -----BEGIN OPENSSH PRIVATE KEY-----
        {SECRET}
        -----END OPENSSH PRIVATE KEY-----
  partner:
    type: http
    url: https://partner.example
    headers: {{authorization: Bearer {SECRET}}}
    secrets: [whsec_{SECRET}{SECRET}{SECRET}{SECRET}{SECRET}{SECRET}{SECRET}{SECRET}]
providers:
  crm:
    type: rest
    base_url: https://crm.example/v1
    auth: {{type: bearer, token: "{{api_key}}"}}
    paginator: {{type: offset, limit: 20}}
    collections:
      contacts: {{path: contacts, data_selector: data, deletes: {{type: sweep}}}}
credentials:
  crm: {{provider: crm, properties: {{api_key: {SECRET}}}, metadata: {{team: sales}}}}
  live: {{provider: stripe, properties: {{api_key: "${{NAMED}}"}}}}
syncs:
  contacts:
    provider: crm
    collections: [contacts]
    credential: crm
    sweep_interval: 6h
    max_deleted_share: 0.5
    rate_limit: {{allowed_requests: 25, interval: 10s}}
    metadata: {{plan: {{name: gold}}}}
  customers: {{provider: stripe, collections: [customers], credential: live, frequency: continuous}}
"""


def test_targets_bastions_and_syncs_are_exported(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    key = tmp_path / "key"
    key.write_text(SECRET)
    written = ALL_KINDS.replace("<key>", str(key))
    file.write_text(written)
    snapshot = snapshot_of(read_document(file, ENVIRON))
    kinds = {kind for kind, _ in snapshot.entities}
    assert kinds == {*SECTIONS}
    text = exported(snapshot, yaml.safe_load(written))
    assert SECRET not in text
    file.write_text(text)
    document = document_for(snapshot, file, ENVIRON)
    assert plan_of(document, snapshot, environ=ENVIRON, prune=True).changes == ()
    # As a file of one's own, with the variables that it names, it is as good.
    environ = {**ENVIRON, **stored_variables(snapshot, ENVIRON)}
    assert set(environ) > set(ENVIRON)
    assert len(
        plan_of(read_document(file, environ), Snapshot(0, {}), environ=environ).changes
    ) == len(snapshot.entities)


def test_the_comments_list_what_names_each_variable(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(
        f"sources: {{shop: {{type: postgres, url: 'postgres://app:{SECRET}@db/x', slot: '${{S}}'}}}}\n"
        "sinks:\n"
        + "".join(f"  o{n}: {{type: nats, source: shop, url: '${{U}}'}}\n" for n in range(5))
        + "  last: {type: nats, source: shop, url: '${S}', subject: '${SOURCE_SHOP_URL}'}\n"
    )
    environ = {"U": "nats://n", "S": "nats", "SOURCE_SHOP_URL": "x"}
    text = exported(snapshot_of(read_document(file, environ)), {"store": "${S}"})
    assert text.endswith(
        "# Variables to set:\n"
        "#   SOURCE_SHOP_URL  source shop: url, sink last\n"
        "#   S                sink last, source shop, store\n"
        "#   U                sink o0, sink o1, sink o2 and 2 more\n"
    )


def test_a_program_of_a_file_is_in_the_document(tmp_path: Path) -> None:
    (tmp_path / "t.lua").write_text(lua)
    file = tmp_path / "penstock.yaml"
    file.write_text(
        "sources: {s: {type: postgres, url: 'postgres://db/x'}}\n"
        "sinks: {out: {type: nats, source: s, transform: {lua: {file: t.lua}}}}\n"
    )
    document = read_document(file, {})
    assert document.entities["sink", "out"]["transform"] == {
        "lua": {"file": "t.lua", "code": lua.replace("${", "$${")}
    }
    snapshot = snapshot_of(document)
    text = exported(snapshot, {})
    file.write_text(text)
    assert plan_of(read_document(file, {}), snapshot, environ={}).is_empty
