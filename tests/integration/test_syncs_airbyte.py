"""Providers of type airbyte, with the real airbyte-cdk: what a manifest reads, and what goes wrong."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.airbyte_help import (
    MANIFEST,
    TOKEN,
    Api,
    OAuth,
    Read,
    airbyte_cdk,  # noqa: F401 - a fixture
    oauth_config,
    oauth_manifest,
    workers,
)
from tests.loopback_api import Answer, Asked, LoopbackApi
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.provider_file import read_provider
from penstock.config.providers import AirbyteProvider
from penstock.streams.connection import own_connection
from penstock.streams.store import Store
from penstock.syncs.airbyte import environment, process
from penstock.syncs.connectors.airbyte import loaded
from penstock.syncs.connectors.contract import Deletes, Kind
from penstock.syncs.connectors.make import connector_of
from penstock.syncs.credentials import SecretKey, StoredTokens
from penstock.syncs.errors import SyncError
from penstock.syncs.job import Yielded
from penstock.testing import ApiAnswer, InMemorySync


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def server(api: Api) -> Iterator[LoopbackApi]:
    with LoopbackApi(api) as found:
        yield found


def test_pages_and_a_cursor(api: Api, server: LoopbackApi) -> None:
    read = Read(server.url)
    pages = list(read.pages("contacts"))
    assert [[r.upstream_id for r in page.records] for page in pages] == [
        ["0", "1"], ["2", "3"], ["4", "5"], [],
    ]  # fmt: skip
    (first, *_) = pages[0].records
    assert first.updated_at is not None
    assert first.updated_at.isoformat() == "2026-05-01T10:00:00+00:00"
    assert b'"name":"n0"' in first.data
    # Three requests, each counted: nothing else has asked the API.
    assert read.budget.requests == len(server.asked) == 3

    # Equal times of the cursor, and what changed a little before it, come again.
    api.contacts.append({"id": 7, "updated_at": "2026-05-01T10:00:01Z"})
    ids, cursor = read.ids("contacts", Kind.POLL, pages[-1].cursor)
    assert ids == ["0", "1", "2", "3", "4", "5", "7"]
    assert server.asked[3].query["since"] == "2026-05-01T09:59:01Z"
    api.contacts.append({"id": 8, "updated_at": "2026-05-01T10:30:00Z"})
    _, cursor = read.ids("contacts", Kind.POLL, cursor)
    api.contacts.append({"id": 9, "updated_at": "2026-05-01T10:30:00Z"})
    ids, _ = read.ids("contacts", Kind.POLL, cursor)
    assert ids == ["8", "9"]


def test_an_object_of_next_year_hides_nothing(api: Api, server: LoopbackApi) -> None:
    api.contacts.append({"id": 7, "updated_at": "2099-01-01T00:00:00Z"})
    server.date = "Fri, 01 May 2026 12:00:00 GMT"
    read = Read(server.url)
    read.ids("contacts")  # the session knows the API's clock from here on
    _, cursor = read.ids("contacts")
    api.contacts.append({"id": 8, "updated_at": "2026-05-01T12:00:05Z"})
    ids, _ = read.ids("contacts", Kind.POLL, cursor)
    assert ids == ["7", "8"]


def test_a_collection_below_another(api: Api, server: LoopbackApi) -> None:
    api.notes = {"1": [{"id": "a", "updated_at": "2026-05-01T00:00:00Z"}],
                 "5": [{"id": "b", "updated_at": "2026-05-02T00:00:00Z"}]}  # fmt: skip
    read = Read(server.url)
    ids, cursor = read.ids("notes")
    assert ids == ["a", "b"]
    # A contact that is new since is asked for too: no cache of an earlier read is in the way.
    api.contacts.append({"id": 7, "updated_at": "2026-05-03T00:00:00Z"})
    api.notes["7"] = [{"id": "c", "updated_at": "2026-05-03T00:00:00Z"}]
    api.notes["1"].append({"id": "d", "updated_at": "2026-05-04T00:00:00Z"})
    ids, _ = read.ids("notes", Kind.POLL, cursor)
    assert sorted(ids) == ["b", "c", "d"]


DYNAMIC = """
dynamic_streams:
  - type: DynamicDeclarativeStream
    stream_template:
      type: DeclarativeStream
      name: ""
      primary_key: [id]
      retriever:
        type: SimpleRetriever
        requester: {$ref: "#/definitions/requester", path: ""}
        record_selector: {$ref: "#/definitions/selector"}
      schema_loader: {$ref: "#/definitions/schema"}
    components_resolver:
      type: HttpComponentsResolver
      retriever:
        type: SimpleRetriever
        requester: {$ref: "#/definitions/requester", path: lists}
        record_selector: {$ref: "#/definitions/selector"}
      components_mapping:
        - {type: ComponentMappingDefinition, field_path: [name], value: "{{ components_values.name }}"}
        - type: ComponentMappingDefinition
          field_path: [retriever, requester, path]
          value: "lists/{{ components_values.id }}"
"""


def test_streams_that_the_api_names(server: LoopbackApi) -> None:
    read = Read(server.url, manifest=MANIFEST.read_text() + DYNAMIC)
    assert not read.connector.collections()  # a session is needed for them
    assert read.ids("vip")[0] == ["0", "1"]
    assert [each.path for each in server.asked] == ["/lists", "/lists", "/lists/7"]
    del server.asked[:]
    assert len(read.ids("contacts")[0]) == 6
    assert {each.path for each in server.asked} == {"/contacts"}


def test_a_read_goes_on_where_it_was(api: Api, server: LoopbackApi) -> None:
    read = Read(server.url)

    def month(asked: Asked) -> str:
        return asked.query["since"]

    pages = read.pages("months")
    next(pages)
    resume = next(pages).resume
    pages.close()
    before = [month(asked) for asked in server.asked]
    assert before[0] == "2026-01-01T00:00:00Z"
    del server.asked[:]
    left = list(read.pages("months", resume=resume))
    assert "2026-01-01T00:00:00Z" not in [month(asked) for asked in server.asked]
    assert left[-1].is_last
    assert left[-1].cursor is not None
    # In the middle of a part it goes on nowhere.
    assert [page.resume for page in read.pages("contacts")] == [None] * 4


def test_a_process_serves_again_where_a_read_is_given_up(server: LoopbackApi) -> None:
    read = Read(server.url)
    pages = read.pages("contacts")
    next(pages)
    (before,) = workers()
    assert "PENSTOCK_SECRET_KEY" not in psutil.Process(before).environ()
    pages.close()

    def end(_: float) -> None:
        raise Yielded

    read.session.wait = end  # type: ignore[method-assign,assignment]  # for the test
    assert read.ids("contacts")[0] == ["0", "1", "2", "3", "4", "5"]
    assert workers() == [before]


def test_a_run_that_ends_interrupts_a_wait(api: Api, server: LoopbackApi) -> None:
    def end(_: float) -> None:
        raise Yielded

    read = Read(server.url)
    read.session._sleep = end  # type: ignore[misc]  # for the test
    api.failures = [Answer({}, 429, {"Retry-After": "20"})]
    with pytest.raises(Yielded):
        read.ids("contacts")


def test_a_limit_is_honoured(api: Api, server: LoopbackApi) -> None:
    read = Read(server.url)
    api.failures = [Answer({}, 429, {"Retry-After": "7"})]
    ids, _ = read.ids("contacts")
    assert ids == ["0", "1", "2", "3", "4", "5"]
    assert sum(read.waits) >= 7
    # Where the API wants more, the scheduler waits, and the process is free.
    api.failures = [Answer({}, 429, {"Retry-After": "300"})]
    with pytest.raises(SyncError) as error:
        read.ids("contacts")
    assert (error.value.code, error.value.retry_after) == ("rate_limited", 300)
    assert error.value.transient


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "unauthorized"), (403, "forbidden"), (404, "not_found"), (400, "refused")],
)
def test_a_refusal(api: Api, server: LoopbackApi, status: int, code: str) -> None:
    read = Read(server.url)
    api.failures = [Answer({"message": f"no, {TOKEN}"}, status)] * 9
    for do in (lambda: read.ids("contacts"), lambda: read.connector.check(read.session)):
        with pytest.raises(SyncError) as error:
            do()
        assert error.value.code == code, error.value
        assert f"answers {status}: no, ***" in str(error.value)
        assert error.value.remedy
        assert TOKEN not in repr(error.value.__dict__)


def test_errors_of_servers_are_tried_again(api: Api, server: LoopbackApi) -> None:
    read = Read(server.url)
    api.failures = [Answer({}, 500), Answer(b'{"items": [', 200)]
    assert len(read.ids("contacts")[0]) == 6
    api.failures = [Answer({}, 503)] * 9
    with pytest.raises(SyncError) as error:
        read.ids("contacts")
    assert (error.value.code, error.value.transient) == ("unavailable", True)


def test_a_check(server: LoopbackApi) -> None:
    read = Read(server.url)
    read.connector.check(read.session)
    assert 1 <= len(server.asked) <= 2


@pytest.mark.parametrize(
    ("contact", "expected"),
    [
        ({"id": 7}, "None of the 1 objects of a page has the cursor updated_at"),
        (
            {"id": 7, "updated_at": "yesterday"},
            "1 of 1 objects of a page can't be read: its cursor",
        ),
        ({"updated_at": "2026-05-01T10:00:00Z"}, "it lacks its key id"),
    ],
)
def test_a_cursor_that_can_not_be_read(
    api: Api, server: LoopbackApi, contact: Any, expected: str
) -> None:
    api.contacts = [contact]
    with pytest.raises(SyncError, match=expected):
        Read(server.url).ids("contacts")


def test_one_that_can_not_be_read_is_a_dead_letter(api: Api, server: LoopbackApi) -> None:
    api.contacts[1]["updated_at"] = "yesterday"
    pages = list(Read(server.url).pages("contacts"))
    assert [len(page.unreadable) for page in pages] == [1, 0, 0, 0]
    assert "yesterday" in pages[0].unreadable[0].text
    with pytest.raises(SyncError, match="can't be read"):
        list(Read(server.url).pages("contacts", Kind.SWEEP))


def test_deletes(api: Api, server: LoopbackApi) -> None:
    flag = {"contacts": {"deletes": {"type": "flag", "path": "gone"}}}
    api.contacts[2]["gone"] = True
    pages = list(Read(server.url, collections=flag).pages("contacts"))
    assert [r.upstream_id for page in pages for r in page.records if r.deleted] == ["2"]
    ids, cursor = Read(server.url).ids("contacts", Kind.SWEEP)
    assert (ids, cursor) == (["0", "1", "2", "3", "4", "5"], None)


def test_a_sweep_is_complete_or_fails(api: Api, server: LoopbackApi, tmp_path: Path) -> None:
    text = MANIFEST.read_text().replace(
        "    http_method: GET\n",
        "    http_method: GET\n    error_handler: {type: DefaultErrorHandler, response_filters:"
        " [{type: HttpResponseFilter, action: IGNORE, http_codes: [404]}]}\n",
    )
    read = Read(server.url, manifest=text)
    api.failures = [Answer({}, 404)]
    assert read.ids("contacts")[0] == []
    api.failures = [Answer({}, 404)]
    with pytest.raises(SyncError, match="The sweep deletes nothing"):
        read.ids("contacts", Kind.SWEEP)


def test_streams(server: LoopbackApi) -> None:
    read = Read(server.url, collections={"keyless": {"primary_key": ["a", "b"]}})
    known = read.connector.collections()
    assert sorted(known) == ["contacts", "keyless", "months", "notes"]
    assert known["keyless"].key == ("a", "b")
    assert known["keyless"].cursor_field is None
    with pytest.raises(SyncError, match="no primary key of keyless"):
        Read(server.url).ids("keyless")
    with pytest.raises(SyncError, match=r"has no stream 'deals'.*contacts"):
        read.connector.collection("deals")
    with pytest.raises(SyncError, match="has no stream 'contact'"):
        Read(server.url, collections={"contact": {}}).connector.collections()
    swept = Read(server.url, collections={"*": {"deletes": {"type": "sweep"}}})
    assert swept.connector.collection("notes").deletes is Deletes.SWEEP
    assert "licence Apache-2.0" in loaded(read.settings)
    assert not server.asked


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.replace("type: HttpRequester", "type: FtpRequester"), "can't be run: .*schema"),
        (lambda t: t.replace("field_path: [items]", "field_path: [[items]]"),
         r"run: streams\.\d\.retriever\.record_selector\.extractor\.field_path\.0: \['items'\] is not"),
        (lambda t: t.replace("config['api_url']", "config['api_url'"), "can't be run"),
        (lambda t: t.replace("type: SimpleRetriever", "type: CustomRetriever\n      class_name: "
         "subprocess.Popen", 1), "its component subprocess.Popen is Python of its own"),
    ],
    ids=["component", "key", "template", "code"],
)  # fmt: skip
def test_a_bad_manifest(server: LoopbackApi, change: Callable[[str], str], expected: str) -> None:
    text = change(MANIFEST.read_text())
    assert text != MANIFEST.read_text()
    read = Read(server.url, manifest=text)
    with pytest.raises(SyncError, match=expected):
        read.ids("contacts")
    assert TOKEN not in str(read.connector)


def test_a_refresh_token_that_is_replaced_is_kept(api: Api, store: Store) -> None:
    oauth = OAuth(api)

    def read(secret: str = "refresh-0") -> Read:
        """Return a connector of a process that knows what the store keeps, and no more."""
        own = partial(own_connection, store.url)
        keeper = StoredTokens(store.connection, own, SecretKey(["k" * 32]), "crm", secret)
        config = oauth_config(crm.url)
        return Read(crm.url, manifest=oauth_manifest(), config=config, secret=secret, keeper=keeper)

    def asked() -> list[str]:
        return [each.path for each in crm.asked]

    with LoopbackApi(oauth) as crm:
        assert read().connector.access.rotates
        _, cursor = read().ids("contacts")
        process.PROCESSES.close()
        read().connector.check(read().session)
        assert len(read().ids("contacts", Kind.POLL, cursor)[0]) == 6
        assert (oauth.issued, asked().count("/token")) == (1, 1)

        # The API ends a token in the middle of a read: it goes on with another, and counts both.
        one = read()
        pages = one.pages("contacts")
        next(pages)
        oauth.issued += 1
        del crm.asked[:]
        assert [len(page.records) for page in pages] == [2, 2, 0]
        assert asked() == ["/contacts", "/token", "/contacts", "/contacts"]
        assert one.budget.requests == 1 + len(asked())

        # What was there before is never asked with again, and what ends soon is replaced at once.
        oauth.seconds = 30
        oauth.issued += 1
        assert len(read().ids("contacts")[0]) == 6
        assert len(read().ids("contacts")[0]) == 6
        assert oauth.refresh == f"refresh-{oauth.issued}" == "refresh-6"

        # A run may end, or the server fail, while a token is asked for; the process serves again.
        oauth.is_down = True
        with pytest.raises(SyncError) as error:
            read().ids("contacts")
        assert (error.value.code, error.value.transient) == ("unavailable", True)
        oauth.is_down = False
        assert len(read().ids("contacts")[0]) == 6

        # One that the server refuses is an error that names no secret. A login of the user is taken.
        oauth.refresh = "refresh-of-the-user"
        with pytest.raises(SyncError, match="The server gives no token") as error:
            read().ids("contacts")
        assert error.value.code == "unauthorized"
        assert "refresh-7" not in str(error.value)
        assert len(workers()) == 1
        assert len(read("refresh-of-the-user").ids("contacts")[0]) == 6


def test_a_token_serves_more_than_one_read(api: Api) -> None:
    oauth = OAuth(api)
    oauth.is_rotating = False
    with LoopbackApi(oauth) as server:
        given: dict[str, Any] = {"manifest": oauth_manifest(""), "config": oauth_config(server.url)}
        process.PROCESSES.close()
        for _ in range(2):
            assert len(Read(server.url, secret="refresh-0", **given).ids("contacts")[0]) == 6
        assert oauth.issued == 1
        oauth.issued += 1
        assert len(Read(server.url, secret="refresh-0", **given).ids("contacts")[0]) == 6
        assert oauth.issued == 3


def test_a_refresh_token_that_can_not_be_kept(server: LoopbackApi) -> None:
    config = oauth_config(server.url)
    text = oauth_manifest()
    plain = {**config, "credentials": {**config["credentials"], "refresh_token": "in the file"}}
    with pytest.raises(SyncError, match="stands in config, and Penstock keeps") as error:
        Read(server.url, manifest=text, config=plain).ids("contacts")
    assert "in the file" not in str(error.value)
    another = "refresh_token_updater: {refresh_token_config_path: [other]}, "
    two = f"{text}\nother: {{{another}}}\n"
    with pytest.raises(SyncError, match="Two logins of the manifest"):
        Read(server.url, manifest=two, config={**config, "other": "x"}).ids("contacts")
    bearer = {**config, "credentials": {"client_id": "me", "client_secret": "hush"}}
    assert not Read(server.url, manifest=text, config=bearer).connector.access.rotates
    assert not server.asked


def test_a_configuration_that_lacks_something(server: LoopbackApi) -> None:
    settings = {"type": "airbyte", "manifest": {"file": str(MANIFEST)}}
    connector = connector_of("crm", AirbyteProvider.model_validate(settings), {"token": TOKEN})
    with pytest.raises(SyncError, match="lacks api_url") as error:
        connector.collections()
    assert error.value.code == "credential"


def test_private_addresses_are_refused(server: LoopbackApi) -> None:
    with pytest.raises(SyncError) as error:
        Read(server.url, allow_private=False).ids("contacts")
    assert error.value.code == "private_address"
    assert not server.asked


def test_an_address_in_a_template_and_schemas_in_files(server: LoopbackApi) -> None:
    text = MANIFEST.read_text()
    for before, after in (
        ("{{ config['api_url'] }}", f"{{{{ 'http://a.b/c' if config.sandbox else '{server.url}' }}}}"),
        ("{type: InlineSchemaLoader, schema: {type: object, properties: {}}}",
         "{type: JsonFileSchemaLoader, file_path: ./source_crm/schemas/x.json}"),
    ):  # fmt: skip
        assert before in text
        text = text.replace(before, after)
    read = Read(server.url, manifest=text)
    read.connector.check(read.session)
    assert len(read.ids("contacts")[0]) == 6


def test_components_of_its_own(server: LoopbackApi, tmp_path: Path) -> None:
    code = tmp_path / "components.py"
    code.write_text(
        "import dataclasses\n"
        "import socket\n"
        "from airbyte_cdk.sources.declarative.decoders import JsonDecoder\n"
        "from airbyte_cdk.sources.declarative.schema import JsonFileSchemaLoader\n"
        "from airbyte_cdk.sources.declarative.extractors import DpathExtractor\n"
        "class Mine(DpathExtractor):\n"
        "    def extract_records(self, response):\n"
        "        print('a line of its own')\n"
        "        try:\n"
        "            socket.create_connection(('127.0.0.1', 1))\n"
        "        except OSError as error:\n"
        "            yield {'id': str(error), 'updated_at': '2026-05-01T10:00:00Z'}\n"
        "@dataclasses.dataclass\n"
        "class Fails(DpathExtractor):\n"
        "    other: JsonDecoder = JsonDecoder(parameters={})\n"
        "    def extract_records(self, response):\n"
        "        return [{}['a']]\n"
        "class Reads(DpathExtractor):\n"
        "    def extract_records(self, response):\n"
        "        loader = JsonFileSchemaLoader({}, {}, 'crm/schemas/contacts.json')\n"
        "        return [loader.get_json_schema()]\n"
    )
    text = MANIFEST.read_text().replace(
        "{type: DpathExtractor,", "{type: CustomRecordExtractor, class_name: "
        "source_declarative_manifest.components.Mine,",
    )  # fmt: skip
    (first, *_), _ = Read(server.url, manifest=text, components=str(code)).ids("contacts")
    assert first.startswith("this process makes no connection")
    for name, why in (
        ("Fails", r"there is no 'a' \(line 17 of the components\)"),
        ("Reads", r"a file of the connector's package, and is not here \(line 21 of the"),
    ):
        fails = Read(server.url, manifest=text.replace(".Mine,", f".{name},"), components=str(code))
        with pytest.raises(SyncError, match=why):
            fails.ids("contacts")


def test_a_process_that_dies_or_hangs_fails_its_read_alone(
    api: Api, server: LoopbackApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Read(server.url)
    pages = read.pages("contacts")
    next(pages)
    (pid,) = workers()
    psutil.Process(pid).kill()
    with pytest.raises(SyncError) as error:
        next(pages)
    assert (error.value.code, error.value.transient) == ("unavailable", True)
    assert len(read.ids("contacts")[0]) == 6
    (another,) = workers()
    assert another != pid

    pages = read.pages("contacts")
    next(pages)
    psutil.Process(another).suspend()
    held = process.PROCESSES._lent
    assert len(held) == 1
    monkeypatch.setattr(process, "SILENT_SECONDS", 0.5)
    with pytest.raises(SyncError) as error:
        next(pages)
    assert (error.value.code, error.value.transient) == ("timed_out", True)
    assert workers() == []


def test_idle_processes_end(server: LoopbackApi) -> None:
    few = process.Processes(most=1, idle_seconds=0.3)
    with few.lent(time.sleep) as one:
        pid = one.pid
    limit = time.monotonic() + 30
    while psutil.pid_exists(pid):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_without_an_environment(
    server: LoopbackApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process.PROCESSES.close()
    python = environment.interpreter()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SyncError, match="is not installed on") as error:
        Read(server.url).ids("contacts")
    assert "`penstock sync airbyte install`" in error.value.remedy
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(SyncError, match="which is no program"):
        Read(server.url).ids("contacts")
    monkeypatch.setenv(environment.VARIABLE, sys.executable)
    with pytest.raises(SyncError, match=r"does not start with .*No module named 'airbyte_cdk'"):
        Read(server.url).ids("contacts")
    monkeypatch.setenv(environment.VARIABLE, str(python))
    assert len(Read(server.url).ids("contacts")[0]) == 6


def test_sync_try(server: LoopbackApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manifest.yaml").write_text(MANIFEST.read_text())
    (tmp_path / "crm.yaml").write_text(
        "type: airbyte\nmanifest: {file: manifest.yaml}\nallow_private: true\n"
        f"config: {{api_url: '{server.url}', token: '{{token}}'}}\n"
    )
    name, settings = read_provider(tmp_path / "crm.yaml", {})
    assert (name, settings.type) == ("crm", "airbyte")
    given = ["sync", "try", "crm.yaml", "--property", f"token={TOKEN}", "--collection", "contacts"]
    found = CliRunner().invoke(app, given)
    assert found.exit_code == 0, found.output
    assert "contacts: page 2: 2 objects" in found.output
    assert "page 3" not in found.output
    assert "licence Apache-2.0" in found.output
    found = CliRunner().invoke(app, [*given, "--collection", "deals"])
    assert "deals" in found.output
    assert found.exit_code != 0


def test_for_tests_of_users() -> None:
    provider = {
        "type": "airbyte",
        "manifest": MANIFEST.read_text(),
        "config": {"api_url": "https://crm.example", "token": "{token}"},
    }
    answers = iter([ApiAnswer(status=429, headers={"Retry-After": "7"})])

    def api(_: Any) -> Any:
        found = [{"id": 1, "updated_at": "2026-05-01T10:00:00Z"}]
        return next(answers, {"items": found, "meta": {}})

    sync = InMemorySync(provider, "contacts", api, {"token": TOKEN})
    sync.backfill()
    sync.poll()
    assert sync.records == {"1": {"id": 1, "updated_at": "2026-05-01T10:00:00Z"}}
    assert sum(sync.waits) >= 7
