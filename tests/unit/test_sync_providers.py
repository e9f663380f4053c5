"""What the configuration, the API and `penstock check` know of providers, without a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.loopback_api import Answer, Asked, LoopbackApi
from typer.testing import CliRunner

from penstock.check.syncs import inspect
from penstock.cli.main import app
from penstock.config.collections import collections_of
from penstock.config.file import load
from penstock.config.provider_file import read_provider
from penstock.config.providers import READY, PythonCollection, RestCollection
from penstock.config.settings import Config
from penstock.core.errors import ConfigError
from penstock.syncs.connectors.make import connector_of

OBJECT = b'{"data": [{"id": "c1", "updated_at": "2026-01-01T00:00:00Z"}, {"name": "no id"}]}'
ONE = """\
type: rest
base_url: "{url}"
allow_private: true
auth: {{type: bearer, token: "{{api_key}}"}}
paginator: {{type: single_page}}
collections:
  contacts: {{path: contacts, data_selector: data, deletes: {{type: {deletes}}}}}
"""


def crm(url: str, deletes: str = "none") -> str:
    return ONE.format(url=url, deletes=deletes)


def file_of(url: str, deletes: str = "none") -> str:
    provider = crm(url, deletes).replace("\n", "\n    ")
    return f"""\
store: postgresql://127.0.0.1:1/none
providers:
  crm:
    {provider}
credentials:
  good: {{provider: crm, properties: {{api_key: hush}}}}
  bad: {{provider: crm, properties: {{api_key: never-shown}}}}
syncs:
  contacts: {{provider: crm, collections: [contacts], credential: good}}
"""


def answer(asked: Asked) -> Answer:
    if asked.headers.get("authorization") != "Bearer hush":
        return Answer(status=401)
    return Answer(body=OBJECT)


@pytest.fixture
def api() -> Iterator[LoopbackApi]:
    with LoopbackApi(answer) as api:
        yield api


def config_of(folder: Path, text: str) -> Config:
    file = folder / "penstock.yaml"
    file.write_text(text)
    return load(file, {})


def test_the_collections_of_ready_providers_are_those_of_their_connectors() -> None:
    for name in READY:
        known = collections_of(name, None)
        if known is not None:
            assert set(known) == set(connector_of(name, None, {}).collections()), name


def test_each_credential_is_tried_and_what_is_not_seen_is_reported(
    tmp_path: Path, api: LoopbackApi
) -> None:
    found = {f.subject: f for f in inspect(config_of(tmp_path, file_of(api.url)))}
    assert (found["credential good"].level, found["credential good"].message) == (
        "ok", "crm takes it",
    )  # fmt: skip
    bad = found["credential bad"]
    assert bad.level == "error"
    assert bad.fix
    assert "never-shown" not in str(found)
    unseen = found["sync contacts: crm:contacts"]
    assert (unseen.level, unseen.message) == (
        "warning", "deletes are not seen: the API does not show them",
    )  # fmt: skip
    found = {f.subject: f for f in inspect(config_of(tmp_path, file_of(api.url, "sweep")))}
    assert "sync contacts: crm:contacts" not in found


def test_an_api_that_does_not_answer_is_asked_twice_for_each_credential(tmp_path: Path) -> None:
    with LoopbackApi(lambda _: Answer(status=503)) as away:
        found = {f.subject: f for f in inspect(config_of(tmp_path, file_of(away.url)))}
        logins = Counter(asked.headers["authorization"] for asked in away.asked)
    assert (found["credential good"].level, found["credential bad"].level) == ("error", "error")
    assert list(logins.values()) == [2, 2]


def test_a_provider_of_a_file_by_itself_has_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "crm.yaml"
    file.write_text(crm("https://api"))
    name, provider = read_provider(file, {})
    assert (name, list(provider.collections)) == ("crm", ["contacts"])
    file.write_text(crm("https://api").replace("path: contacts", "pth: contacts"))
    with pytest.raises(ConfigError, match=r"crm.yaml:7: providers.crm.collections.contacts.pth"):
        read_provider(file, {})
    file.write_text("providers:\n  a: {type: python, function: 'a:b', collections: {c: {}}}\n")
    assert read_provider(file, {})[0] == "a"


def try_(*words: str, **environ: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sync", "try", *words], env=environ)
    return result.exit_code, result.output


def test_try_prints_what_a_connector_reads(
    tmp_path: Path, api: LoopbackApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "crm.yaml").write_text(crm(api.url))
    code, text = try_("crm.yaml", "--property", "api_key=${KEY}", KEY="hush")
    assert code == 1  # one of them can't be read
    assert "contacts: page 1: 1 object, the last" in text or "contacts: page 1: 1 object" in text
    assert "  c1" in text
    assert "✗ can't be read" in text
    code, text = try_("crm.yaml", "--property", "api_key=never-shown")
    assert code == 1
    assert "401" in text
    assert "never-shown" not in text
    code, text = try_("crm.yaml", "--property", "api_key=hush", "--collection", "contact")
    assert (code, "no collection 'contact'" in text) == (1, True)
    code, text = try_("strip")
    assert (code, "did you mean stripe?" in text) == (2, True)
    assert "crm.yaml or my.py:read" in text
    code, text = try_("mine.py")
    assert (code, "mine.py:read" in text) == (2, True)
    code, text = try_("none.yaml")
    assert (code, "none.yaml: no such file" in text, "init" in text) == (2, True, False)
    code, text = try_("crm.yaml", "--property", "api_key=")
    assert (code, "--property api_key: it is empty" in text) == (2, True)
    code, text = try_("crm.yaml")
    assert code == 1
    assert "--property 'NAME=${VARIABLE}'" in text
    code, text = try_("crm.yaml", "--property", "api_key=${NONE:-}")
    assert (code, "it is empty" in text) == (2, True)


def test_a_sync_is_tried_by_its_provider(
    tmp_path: Path, api: LoopbackApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.yaml").write_text(file_of(api.url))
    code, text = try_("contacts")
    assert (code, "contacts is a sync: name its provider, as in penstock sync try crm" in text) == (
        2, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (Answer({"message": "no scope"}, 403), "403: no scope"),
        (Answer(b"<html>login</html>"), "malformed"),
        (Answer(b"", 302, {"Location": "https://other.example/"}), "redirects to https://other"),
    ],
)
def test_a_check_of_an_api_that_refuses_has_the_cause_and_a_remedy(
    tmp_path: Path, refusal: Answer, message: str
) -> None:
    with LoopbackApi(lambda _: refusal) as refusing:
        found = {f.subject: f for f in inspect(config_of(tmp_path, file_of(refusing.url)))}
    tried = found["credential bad"]
    assert (tried.level, message in tried.message) == ("error", True)
    assert tried.fix
    assert "never-shown" not in str(found)


def test_try_takes_a_function_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def read(request):\n    yield {'id': 7, 'of': request.collection}\n"
    )
    code, text = try_("mine.py:read", "--collection", "things", "--json")
    assert code == 0, text
    assert '"upstream_id": "7", "data": {"id": 7, "of": "things"}' in text


@pytest.mark.parametrize("key", ["", [], ["id", ""]])
def test_a_key_names_fields(key: object) -> None:
    for collection, more in ((RestCollection, {"path": "things"}), (PythonCollection, {})):
        with pytest.raises(ValidationError, match="the fields, that identify an object"):
            collection.model_validate({**more, "primary_key": key})
