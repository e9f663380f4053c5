"""Pipelines by SQL: what their configs may hold, how they change, what their status shows."""

from __future__ import annotations

import itertools
import json
from typing import Any

import psycopg
import pytest
from tests.integration.outbox_sql import (
    CONFIG,
    SOURCE,
    delivered,
    pipeline,
    raises,
    value,
)

from penstock.core.errors import PipelineError
from penstock.core.subject import SubjectTemplate
from penstock.embedded.handles import Database
from penstock.expressions import parse_condition
from penstock.expressions.catalog import load_columns
from penstock.expressions.errors import ExpressionError
from penstock.expressions.typing import typed
from penstock.outbox.config_keys import Direction, keys
from penstock.outbox.inbox.settings import read_settings
from penstock.outbox.settings import RelayPipeline, read

SECRET = "hunter6"
PEM = f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----\n"
SET = "SELECT tide.relay_set_outbox('p', 'o', 'g', %s)"
SET_INBOX = "SELECT tide.relay_set_inbox('in', 'i', 'g', %s)"
RULE = {"when": "record.payload.a = 1", "to": "x.{payload.a}"}


@pytest.fixture
def tide(database: Database) -> Database:
    database.execute("SELECT tide.outbox_create('o'), tide.inbox_create('i')")
    return database


@pytest.mark.parametrize(
    "more",
    [
        {"subject": "a.{stream_table}.{op}.{outbox_id}.{payload.x y}.{header.T}", "stream": "S_1-x"},
        {"subject": "${env:PREFIX}.{op}", "batch_size": 1, "format": "plain", "start": "beginning"},
        {"url": "nats://a:4222,tls://b, c:4223", "batch_size": 1000, "format": "envelope"},
        {"url": "nats://user:p%40ss@[::1]:4222/", "format": "cloudevents", "start": "end"},
        {"url": "${env:NATS_URL}", "batch_size": "${env:SIZE}", "tls_enabled": "${env:TLS}"},
        {"url": "nats://${env:HOST}:4222", "format": "debezium", "tls_enabled": True},
        {"username": "u", "password": "odd${x}\"';--"},
        {"token": "${file:/run/secrets/token}"},
        {"nkey_seed": "${env:SEED}", "group_by": "payload.customer.id"},
        {"credentials_file": "/etc/nats.creds", "group_by": "header.Tenant"},
        {"tls_ca_cert": "/a", "tls_cert": "/b", "tls_key": "/c", "group_by": "none"},
        {"route": [RULE, {"to": "rest"}]},
        {"route": [RULE]},
    ],
)  # fmt: skip
def test_what_a_config_may_hold(tide: Database, more: dict[str, Any]) -> None:
    tide.execute(SET, [json.dumps(CONFIG | more)])
    assert value(tide, "SELECT config FROM tide.relays") == CONFIG | more


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"sink_typ": "nats"}, ("'sink_typ'", "The keys are: sink_type, url, ")),
        ({"batchsize": 5}, ("'batchsize'", ", batch_size, ")),
        ({"%s'; drop table x": 5}, ("%s''; drop table x", "The keys are: sink_type")),
        ({"sink_type": "kafka"}, ('"kafka"', '"nats"')),
        ({"sink_type": 1}, ("1", '"nats"')),
        ({"sink_type": None}, ("sink_type is missing", '"nats"')),
        ({"user": "u"}, ("'user'", ", username, ")),
        ({"xyzzy_plugh": None}, ("'xyzzy_plugh'", "The keys are: sink_type")),
        ({"key_scope": "all"}, ('"all"', '"outbox" or "stream"')),
        ({"url": ""}, ("url", "nats://host:port")),
        ({"url": f"http://u:{SECRET}@h"}, ("***", "nats://host:port")),
        ({"url": ["nats://a"]}, ("a list", "nats://host:port")),
        ({"subject": "a..b"}, ("a..b", "{stream_table}")),
        ({"subject": "a.*"}, ("a.*", "{stream_table}")),
        ({"subject": "a.>"}, ("a.>", "{stream_table}")),
        ({"subject": "$JS.a"}, ("$JS.a", "{stream_table}")),
        ({"subject": "a b"}, ('"a b", position 1: a blank', "{stream_table}")),
        ({"subject": "a.{op|dots}"}, ("position 2: {op} is one token", "{op}")),
        ({"subject": "a.{payload.|dots}"}, ("unknown variable", "{op}")),
        ({"subject": "a\n"}, ("subject", "{stream_table}")),
        ({"subject": "a.{opp}"}, ("{opp}", "{op}")),
        ({"subject": "a.{op"}, ("{op", "{op}")),
        ({"subject": "a.${env:}"}, ("${env:}", "${env:NAME}")),
        ({"subject": "a.${vault:x}"}, ("${vault:x}", "${env:NAME}")),
        ({"password": "${vault:" + SECRET + "}", "username": "u"}, ("password", "${file:path}")),
        ({"stream": "A.B"}, ("A.B", "no blanks")),
        ({"stream": ""}, ("stream", "no blanks")),
        ({"batch_size": 0}, ("0", "1 to 1000")),
        ({"batch_size": 1001}, ("1001", "1 to 1000")),
        ({"batch_size": 1.5}, ("1.5", "1 to 1000")),
        ({"batch_size": 10**30}, ("batch_size", "1 to 1000")),
        ({"batch_size": "5"}, ('"5"', "1 to 1000")),
        ({"tls_enabled": "yes"}, ('"yes"', "true or false")),
        ({"tls_enabled": False, "tls_ca_cert": "/a"}, ("tls_ca_cert", "Remove one")),
        ({"tls_cert": "/a"}, ("tls_key is missing", "go together")),
        ({"username": "u"}, ("password is missing", "go together")),
        ({"password": 5}, ("***", "a string")),
        ({"token": SECRET, "nkey_seed": "SU"}, ("token, nkey_seed: use one way", "Keep one")),
        ({"format": "avro"}, ('"avro"', '"cloudevents"')),
        ({"start": "now"}, ('"now"', '"beginning"')),
        ({"start": "${env:START}"}, ("${env:START}", '"beginning"')),
        ({"tls_key": PEM, "tls_cert": "/b"}, ("***", "the path of a PEM file")),
        ({"tls_ca_cert": PEM.replace("\n", " ")}, ("***", "the path of a PEM file")),
        ({"tls_cert": f"/b\n{SECRET}", "tls_key": "/c"}, ("***", "the path of a PEM file")),
        ({"credentials_file": PEM}, ("***", "the path of a file")),
        ({"group_by": "id"}, ('"id"', "payload.<field>")),
        ({"route": []}, ("route", "a list of rules")),
        ({"route": "x"}, ("route", "a list of rules")),
        ({"route": ["x"]}, ("route[0]", '"when"')),
        ({"route": [{"to": "a"}, RULE]}, ("route[0]", "last")),
        ({"route": [RULE, {"when": "x"}]}, ('route[1] has no "to"', "subject")),
        ({"route": [{"too": "a"}]}, ("'too'", '"to"')),
        ({"route": [RULE | {"to": "a b"}]}, ('route[0].to is "a b", position 1: a blank', "{op}")),
        ({"route": [RULE, {"to": None}]}, ('route[1] has no "to"', "subject")),
        (
            {"route": [RULE | {"when": "record.payload.a ="}]},
            ("route[0].when: syntax", "condition"),
        ),
        (
            {"route": [RULE | {"when": "record.typ = 1"}]},
            ("unknown column record.typ", "condition"),
        ),
        ({"route": [RULE | {"when": 5}]}, ("route[0].when", "condition")),
    ],
)
def test_what_it_may_not_hold(
    tide: Database, more: dict[str, Any], expected: tuple[str, str]
) -> None:
    raised = raises(tide, SET, json.dumps(CONFIG | more))
    assert raised.state == "TD006"
    assert expected[0] in raised.message
    assert expected[1] in raised.hint
    assert SECRET not in str(raised)
    assert tide.execute("SELECT FROM tide.relays") == []


def test_a_null_is_as_if_it_was_not_given(tide: Database) -> None:
    for set_, given, direction in ((SET, CONFIG, "out"), (SET_INBOX, SOURCE, "in")):
        known = [
            row[0] for row in tide.execute(f"SELECT key FROM tide._config_keys('{direction}')")
        ]
        tide.execute(set_, [json.dumps(dict.fromkeys(known) | given)])
        stored = tide.execute("SELECT config FROM tide.relays WHERE direction = %s", [direction])
        assert stored == [(given,)]
    rules = [RULE, {"when": None, "to": "rest"}]
    pipeline(tide, "q", "o", route=rules)
    stored = value(tide, "SELECT config -> 'route' FROM tide.relays WHERE pipeline = 'q'")
    assert stored == [RULE, {"to": "rest"}]


def test_the_hint_lists_the_keys(tide: Database) -> None:
    hint = raises(tide, SET, json.dumps(CONFIG | {"xyzzy_plugh": 1})).hint
    assert hint.startswith("The keys are: sink_type, url, subject")


SUBJECTS = [
    "a", "a.{op}", "{stream_table}.{payload.type|dots}.{header.x y|dots}", "a.{payload.a.b}.$x",
    "", "a b", "a\tb", "a\n", "a.\x01", "a.*", "a.>", "{op}>", ".a", "a.", "a..b", "a.{op", "a.op}",
    "$JS.a", "a.{}", "a.{opp}", "a.{table}", "a.{payload}", "a.{payload.}", "a.{op|dots}",
    "a.{payload.|dots}", "{op}.{nope} b", "ä.{payload.ö} ü",
]  # fmt: skip


def test_sql_checks_a_subject_as_the_relay_does(tide: Database) -> None:
    for subject in SUBJECTS[:4] + SUBJECTS[5:]:
        try:
            SubjectTemplate.parse(subject, outbox="o")
            expected = None
        except ValueError as error:
            expected = str(error).removeprefix(f"subject template {subject!r}, ")
        assert value(tide, "SELECT tide._subject_error(%s)", subject) == expected


CONDITIONS = [
    "record.payload.type = 'order.shipped'",
    "record.payload.total > 100 and record.headers.region in ('eu', 'us') or not record.payload.ok",
    "record.payload.ok",
    "record.payload.a is not true and record.payload.b is distinct from record.payload.c",
    "lower(record.payload.x) like 'a%' and record.payload.y not ilike 'a!%' escape '!'",
    "abs(record.payload.x::numeric(10, 2)) > 3 and length(record.payload.x) between 1 and 5",
    "date_trunc('day', record.created_at) > now() - interval '1 day'",
    "record.payload.at::timestamp with time zone > timestamptz '2024-01-31 10:00:00+02'",
    "record.id % 2 = 0 and record.dedup_key = 'it''s' and record.xid = '5'",
    "record . payload . \"Odd Name\"[0] . x = 'a\\b'",
    "RECORD.Payload.größe || 'x' = 'yx' and Action = 'insert' and metadata.commit_lsn > 5",
    "case when record.payload.a = 1 then true else false end",
    "case record.payload.a when 1 then true else false end",
    "cast(record.payload.a as double precision) / 2 > -.5e3",
    "coalesce(changes.payload.a, record.payload.b, 'x') = 'y'",
    "record.payload is not null and record.payload::text <> '{}'",
    "record.payload.a ~ '^x' and record.dedup_key !~* 'y' or record.payload.a||'x' ~ 'y'",
    "record.payload->>'a' = 'x' and record.payload -> 'b' #>> '{c,0}' in ('y')",
    "record.payload @> '{\"a\": 1}' or record.payload.tags ? 'vip'",
    "jsonb_array_length(record.payload -> 'items') > 3 and concat_ws('-', record.id, 'x') <> ''",
    "left(split_part(record.payload.mail, '@', 2), 3) = 'abc' and greatest(record.id, 5) = 7",
    "substring(record.dedup_key from 2) = 'x' and position('a' in record.dedup_key) > 0",
    "record.payload.a = any('{1}') or record.dedup_key <> ALL (array['a', 'b c'])",
    "record.id = some(array[1, 2]) and not record.payload.a = any(array['x', null])",
    "'{\"a\": 1}' <@ record.payload",
    "",
    "record.payload = 'x'",
    "abs(record.payload.x) > 3",
    "record.payload.x like record.payload.y",
    "record.payload.a + record.payload.b > 3",
    "-record.payload.a > 3",
    "record.created_at > 'nope'",
    "record.payload.at::date = '2024-13-01'",
    "record.id = 'x'",
    "record.id like 'x'",
    "record.id.x = 1",
    "record.dedup_key = 5",
    "record.payloads.x = 1",
    "record = 1",
    "payload.x = 1",
    "metadata.nope = 1",
    "foo",
    "1",
    "'x'",
    "action",
    "true and",
    "(true",
    "true)",
    "true) or (true",
    "record.payload.a = 1 record.payload.b = 2",
    "record.payload.a == 1",
    "record.payload.a = 1 -- x",
    "record.payload.a = 1 /* x */",
    "record.payload.a = 1; drop table x",
    "record.payload.a = 'x",
    'record.payload.a = "x"',
    "record.payload.a = E'x'",
    "record.payload.a = $$x$$",
    "record.payload.a = 5x",
    "record.payload.a::foo > 5",
    "record.payload.a is unknown",
    "record.payload.a in ()",
    "record.payload.a in (select 1)",
    "record.payload.a = any('{1')",
    "record.payload.a = any(select 1)",
    "record.payload.a = any",
    "'x' = any(record.payload)",
    "'x' = any(record.payload.tags)",
    "'x' > any('{a}')",
    "any('{a}')",
    "record.payload.a = array['x']",
    "record.payload.a = any(array['x')",
    "record.payload.a = any(array('x'))",
    "record.payload.a in ('x']",
    "record.payload.a in ['x']",
    "record.payload @> array['x']",
    "record.payload && '{x}'",
    "record.dedup_key && array['x']",
    "cardinality(record.payload) = 1",
    "array_length(record.payload.a, 1) = 1",
    "(record.payload.a, record.payload.b) = (1, 2)",
    "exists (select 1)",
    "pg_sleep(100) is null",
    "now > record.created_at",
    "length(record.payload.a, 5) = 1",
    "coalesce() = 1",
    "lower(record.id) = '5'",
    "1 < 2 < 3",
    "record.payload.a ~ 'x'",
    "record.payload->>'a' = 'x'",
    "record.payload -> 'a' ->> 'b' = 'x'",
    "record.payload.a ->> 0 = 'x' and record.headers ? 'region'",
    "record.payload @> '{\"a\": 1}'",
    "record.payload.a similar to 'x'",
    "extract(year from record.created_at) > 2000",
    "position('x' in record.payload.a) > 0",
    "substring(record.payload.a from 2 for 3) = 'x'",
    "trim(both 'x' from record.payload.a) = 'y'",
    "nullif(record.payload.a, 'x') is null",
    "jsonb_array_length(record.payload.items) > 2",
    "nosuch(record.payload.a) = 'x'",
    "record.payload.a ~ record.payload.b",
    "record.payload->>'a' = 5",
    "record.payload @> '{a: 1}'",
    "record.dedup_key ->> 'a' = 'x'",
    "record.payload <@ '{}'",
]
"""The first are of the language, those before the empty one."""


def test_sql_checks_a_condition_as_the_relay_does(tide: Database) -> None:
    with tide.connect() as connection:
        columns = load_columns(connection, [("tide", "outbox_o")])
    check = "SELECT tide._check_condition('when', %s)"
    for at, condition in enumerate(CONDITIONS):
        try:
            typed(parse_condition(condition), columns)
        except ExpressionError:
            assert at >= CONDITIONS.index(""), condition
            assert raises(tide, check, condition).state == "TD006", condition
        else:
            tide.execute(check, [condition])


def test_what_a_reference_gives_in_a_condition_is_the_relays_to_check(tide: Database) -> None:
    for when in (
        "record.payload.region = '${env:REGION}'",
        "record.id = '${env:ID}'",
        "${env:WHEN}",
    ):
        pipeline(tide, "q", "o", route=[{"when": when, "to": "a"}])
    wrong = [{"when": "record.payloads.region = '${env:REGION}'", "to": "a"}]
    assert "record.payloads" in raises(tide, SET, json.dumps(CONFIG | {"route": wrong})).message


@pytest.mark.parametrize("config", [None, "null", "[]", "1", "{}", '{"sink_type": "nats"}'])
def test_a_config_must_be_there(tide: Database, config: str | None) -> None:
    assert raises(tide, SET, config).state == "TD006"


def test_sql_has_the_keys_of_python(tide: Database) -> None:
    for direction in ("out", "in"):
        query = "SELECT key, kind, expected, pattern, choices, required FROM tide._config_keys(%s)"
        found = {row[0]: row[1:] for row in tide.execute(query, [direction])}
        assert found == {
            name: (key.kind, key.expected, key.pattern, list(key.choices), key.required)
            for name, key in keys(direction).items()
        }
    assert list(keys("out")) == list(RelayPipeline.model_fields)


LOGINS: dict[str, Any] = {
    "username": "u", "password": "p", "token": "t", "credentials_file": "/c", "nkey_seed": "/s",
    "tls_enabled": False, "tls_ca_cert": "/a", "tls_cert": "/b", "tls_key": "/k",
}  # fmt: skip
TEXTS = [
    *(f"a{chr(code)}b" for code in range(1, 0x80)),
    "", " ", "none", "payload.", "payload.a", "header.x\ny", "none\n", "é", "a\u2003b",
    "-----BEGIN PRIVATE KEY-----", "/etc/x.pem", "x" * 300,
]  # fmt: skip


def accepted(tide: Database, direction: Direction, config: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether SQL accepts a config, and whether the relay does."""
    by_sql = True
    try:
        value(tide, "SELECT tide._check_config(%s, %s)", direction, json.dumps(config))
    except psycopg.Error as error:
        if error.sqlstate != "TD006":
            raise
        by_sql = False
    try:
        if direction == "out":
            read(config, {})
        else:
            read_settings(config, "d", {})
    except PipelineError:
        return by_sql, False
    return by_sql, True


def test_sql_and_the_relay_accept_the_same_logins(tide: Database) -> None:
    for count in range(3):
        for names in itertools.combinations(LOGINS, count):
            config = CONFIG | {name: LOGINS[name] for name in names}
            by_sql, by_relay = accepted(tide, "out", config)
            assert by_sql == by_relay, config


def test_sql_and_the_relay_have_one_sentence_for_a_login(tide: Database) -> None:
    check, seen = "SELECT tide._check_config('out', %s)", set[str]()
    for names in itertools.combinations(LOGINS, 2):
        config = CONFIG | {name: LOGINS[name] for name in names}
        try:
            read(config, {})
        except PipelineError as error:
            problem = error.problems[0]
        else:
            continue
        sentence = raises(tide, check, json.dumps(config)).message.removeprefix("config: ")
        assert problem.startswith(sentence), config
        seen.add(sentence)
    assert {"tls_key is missing", "token, nkey_seed: use one way to log in, not 2"} <= seen


@pytest.mark.parametrize("name", ["stream", "group_by", "tls_ca_cert", "format", "start"])
def test_sql_and_the_relay_accept_the_same_texts(tide: Database, name: str) -> None:
    for text in TEXTS:
        by_sql, by_relay = accepted(tide, "out", CONFIG | {name: text})
        assert by_sql == by_relay, text


@pytest.mark.parametrize("given", [0, 1, 1000, 1001, -1, 1.5, 10**12, True, "5", [], {}])
def test_sql_and_the_relay_accept_the_same_batch_sizes(tide: Database, given: Any) -> None:
    expected = given in (1, 1000) and given is not True
    assert accepted(tide, "out", CONFIG | {"batch_size": given}) == (expected, expected)
    assert accepted(tide, "in", SOURCE | {"batch_size": given}) == (expected, expected)


def test_a_name_that_is_unknown_is_answered_by_those_that_begin_alike(tide: Database) -> None:
    for name in [*(f"a{number:02}" for number in range(30)), "orders_eu", "orders_us"]:
        pipeline(tide, name, "o")
    hint = raises(tide, "SELECT tide.relay_enable('orders-eu')").hint
    assert hint.startswith("There are 32, among them: 'orders_eu', 'orders_us', 'a00', ")


@pytest.mark.parametrize(
    ("call", "code", "hint"),
    [
        ("relay_set_outbox('p q', 'o', 'g', '{}')", "TD001", "- and ."),
        ("relay_set_outbox('-p', 'o', 'g', '{}')", "TD001", "Start with a letter"),
        (f"relay_set_outbox('{'p' * 57}', 'o', 'g', '{{}}')", "TD001", "56"),
        ("relay_set_outbox('p', 'o', 'g h', '{}')", "TD006", "nats"),
        ("relay_set_outbox('p', 'oo', 'g', '{}')", "TD002", "'o'"),
        ("relay_set_outbox('p', 'o-o', 'g', '{}')", "TD001", "digits and _"),
        ("relay_set_outbox(null, 'o', 'g', '{}')", "TD001", "name"),
        ("relay_set_inbox('p', 'o', 'g', '{}')", "TD008", "'i'"),
        ("relay_enable('p')", "TD007", "relay_set_outbox"),
        ("relay_disable('p')", "TD007", "relay_set_outbox"),
        ("relay_delete('p')", "TD007", "relay_set_outbox"),
        ("relay_status('p')", "TD007", "relay_set_outbox"),
        ("relay_status('')", "TD001", "letter"),
    ],
)
def test_each_mistake_has_its_state_and_its_hint(
    tide: Database, call: str, code: str, hint: str
) -> None:
    raised = raises(tide, f"SELECT tide.{call}")
    assert raised.state == code, raised
    assert hint in raised.hint


def test_names_of_pipelines_and_groups_take_dots_and_hyphens(tide: Database) -> None:
    pipeline(tide, "orders-to.nats", "o", group="nats-group.1")
    bad = "SELECT tide.relay_set_outbox('p', 'o', 'g h', %s)"
    assert raises(tide, bad, json.dumps(CONFIG)).state == "TD001"
    near = raises(tide, "SELECT tide.relay_enable('orders-to-nats')")
    assert "'orders-to.nats'" in near.hint


def test_settings_change_and_the_checkpoint_stays(tide: Database) -> None:
    pipeline(tide, "p", "o")
    tide.execute("SELECT tide.relay_enable('p')")
    delivered(tide, "p")
    before = tide.execute("SELECT since::text, created_at, changed_at FROM tide.relays")[0]
    checkpoint = "SELECT delivered_snapshot::text, state FROM tide.checkpoints"
    kept = tide.execute(checkpoint)
    pipeline(tide, "p", "o", subject="other")
    after = tide.execute("SELECT since::text, created_at, changed_at FROM tide.relays")[0]
    assert (after[:2], after[2] > before[2]) == (before[:2], True)
    status = value(tide, "SELECT tide.relay_status('p')")
    assert (status["enabled"], status["config"]["subject"]) == (True, "other")
    assert tide.execute(checkpoint) == kept
    tide.execute("SELECT tide.relay_delete('p')")
    assert tide.execute(checkpoint) == []


def test_another_outbox_or_group_is_another_pipeline(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_create('q')")
    pipeline(tide, "p", "o")
    for outbox, group in (("q", "g"), ("o", "h")):
        query = "SELECT tide.relay_set_outbox('p', %s, %s, %s)"
        raised = raises(tide, query, outbox, group, json.dumps(CONFIG))
        assert raised.state == "TD003"
        assert "relay_delete('p')" in raised.hint
    query = "SELECT tide.relay_set_inbox('p', 'i', 'g', %s)"
    assert raises(tide, query, json.dumps(SOURCE)).state == "TD003"


def test_relays_are_notified_of_each_change_and_not_of_messages(tide: Database) -> None:
    with tide.connect(autocommit=True) as listener:
        listener.execute("LISTEN tide_relay")
        for call in (
            f"relay_set_outbox('p', 'o', 'g', '{json.dumps(CONFIG)}')",
            "relay_enable('p')",
            "relay_disable('p')",
            "relay_delete('p')",
            "outbox_create('q')",
            "outbox_drop('q')",
        ):
            tide.execute(f"SELECT tide.{call}")
            assert len(list(listener.notifies(timeout=60, stop_after=1))) == 1, call
        tide.execute("SELECT tide.outbox_publish('o', '{}')")
        tide.execute("NOTIFY tide_relay, 'end'")
        (notification,) = listener.notifies(timeout=60, stop_after=1)
        assert notification.payload == "end"


def test_statuses_show_references_and_no_secrets(tide: Database) -> None:
    url = f"nats://u:{SECRET}@a:4222, tls://{SECRET}@b"
    pipeline(tide, "p", "o", url=url, username="u", password=SECRET)
    pipeline(tide, "q", "o", token="${env:TOKEN}")
    shown = json.dumps(
        [
            value(tide, "SELECT tide.relay_status('p')"),
            value(tide, "SELECT tide.outbox_status('o')"),
            str(tide.execute("SELECT * FROM tide.relay_list()")),
        ]
    )
    assert SECRET not in shown
    assert "***@a:4222" in shown
    assert "${env:TOKEN}" in shown


def test_a_key_that_was_stored_in_the_place_of_its_path_is_not_shown(tide: Database) -> None:
    """Older functions took it."""
    keys = ("tls_ca_cert", "tls_cert", "tls_key", "credentials_file")
    pipeline(tide, "p", "o", tls_cert="/a", tls_key="/b")
    stored = json.dumps(dict.fromkeys(keys, PEM))
    tide.execute("UPDATE tide.relays SET config = config || %s::jsonb", [stored])
    for key in keys:
        shown = "SELECT tide.relay_status('p') -> 'config' ->> %s"
        assert value(tide, shown, key) == "***"
    assert SECRET not in str(tide.execute("SELECT * FROM tide.relay_list()"))


def test_sources_of_inboxes(tide: Database) -> None:
    login = {"username": "u", "password": "p"}
    for more in ({}, {"subject": "a.>", "durable": "d", "start": "end", "batch_size": 5} | login):
        tide.execute(SET_INBOX, [json.dumps(SOURCE | more)])
    assert value(tide, "SELECT inbox FROM tide.relay_list()") == "i"
    for wrong, hint in (
        ({"source_type": "kafka"}, '"nats"'),
        ({"format": "plain"}, "The keys are: source_type"),
        ({"durable": "a.b"}, "durable"),
        ({"credentials_file": PEM}, "path"),
    ):
        raised = raises(tide, SET_INBOX, json.dumps(SOURCE | wrong))
        assert raised.state == "TD006"
        assert hint in raised.hint
    bare = {"source_type": "nats", "url": "nats://a"}
    assert "stream is missing" in raises(tide, SET_INBOX, json.dumps(bare)).message
