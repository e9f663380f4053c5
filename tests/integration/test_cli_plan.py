"""`penstock plan`, `apply`, `diff` and `export`, over a real store; exit codes, secrets, saved plans."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.api_help import ApiServer
from tests.streams_help import inserted, make_stream, publish, source_of, wire
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.core.errors import SinkError
from penstock.desired.entities import Change
from penstock.desired.state import DesiredState
from penstock.embedded.handles import Database
from penstock.expressions import ColumnType
from penstock.sinks.backlog import store as backlog
from penstock.streams.store import Store

SECRET = "hunter6"
TEXT = f"""\
store: ${{STORE}}
sources:
  shop:
    type: postgres
    url: postgres://app:{SECRET}@127.0.0.1:1/shop
sinks:
  orders:
    type: stream
    source: shop
  out:
    type: nats
    source: shop
    url: nats://token-{SECRET}@n:4222
    filter: record.total > 10
consumers:
  hook:
    type: webhook
    stream: orders
    url: https://hook.example/in
    headers:
      authorization: Bearer {SECRET}
  pull:
    stream: orders
"""

Penstock = Callable[..., str]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Database) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STORE", database.url)
    path = tmp_path / "penstock.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def penstock(file: Path) -> Penstock:
    def run(*arguments: str, code: int = 0, may_show: bool = False) -> str:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == code, (done.output, done.exception)
        assert may_show or SECRET not in done.output
        return done.output

    return run


def plan_json(penstock: Penstock, *arguments: str, code: int = 2) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(penstock("plan", "--json", *arguments, code=code))
    return found


def test_a_file_is_planned_applied_and_exported(
    penstock: Penstock, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = penstock("plan", code=2)
    assert "+ source shop" in shown
    assert "a new slot penstock_shop begins at its present end" in shown
    assert "its sinks' expressions are not checked" in shown  # nothing listens there
    assert "Plan: 5 to create." in shown
    assert "Nobody can be asked here" in penstock("apply", code=1)
    assert json.loads(penstock("apply", "--yes", "--json"))["applied"] == 1
    assert "Nothing to do" in penstock("plan")
    assert "Nothing to do" in penstock("apply")
    file.write_text(TEXT.replace("total > 10", "total > 11").replace(SECRET + "@n", SECRET + "x@n"))
    (change,) = plan_json(penstock)["changes"]
    assert [(f["path"], f["before"], f["after"]) for f in change["fields"]] == [
        ("url", "nats://***@n:4222", "nats://***@n:4222"),
        ("filter", "record.total > 10", "record.total > 11"),
    ]
    assert change["consequences"] == [
        "filter counts from the next round on; what was sent stays as it is"
    ]
    assert "(another secret)" in penstock("diff", code=2)
    exported = tmp_path / "exported.yaml"
    penstock("export", "-o", str(exported))
    text = exported.read_text()
    assert SECRET not in text
    assert "url: ${SOURCE_SHOP_URL}" in text
    assert "#   CONSUMER_HOOK_HEADERS_AUTHORIZATION  consumer hook: headers.authorization" in text
    assert "Nothing to do" in penstock("plan", str(exported))
    for command in ("plan", "apply", "diff"):
        assert "Nothing to do" in penstock(command, "-c", str(exported))
    monkeypatch.setenv("SINK_OUT_URL", "nats://elsewhere")
    assert plan_json(penstock, str(exported))["counts"]["update"] == 1


def test_a_saved_plan_is_applied_verbatim_or_refused(
    penstock: Penstock, file: Path, tmp_path: Path, store: Store
) -> None:
    out = str(tmp_path / "plan.json")
    penstock("plan", "--out", out, code=2)
    assert Path(out).stat().st_mode & 0o777 == 0o600
    file.write_text(TEXT.replace("  pull:\n", "  other:\n"))  # the plan counts, not the file
    penstock("apply", out)
    state = DesiredState(store)
    before = state.read()
    assert ("consumer", "pull") in before.entities
    assert before.entities["source", "shop"].spec["url"].endswith("@127.0.0.1:1/shop")
    assert "The desired state has moved since: consumer hook" in penstock("apply", out, code=1)
    penstock("plan", "--out", out, "--prune", code=2)
    pull = before.entities["consumer", "pull"]
    state.write([Change(*pull.key, pull.spec, pull.spec)], by="ann", door="api")
    assert "moved since: consumer pull" in penstock("apply", out, code=1)
    assert ("consumer", "other") not in state.read().entities  # one transaction
    assert "can't be added" in penstock("apply", out, "--prune", code=1)
    assert "is a saved plan. Apply it: penstock apply " in penstock("plan", out, code=1)
    assert "is a saved plan" in penstock("diff", out, code=1)
    before_text = file.read_text()
    assert "no saved plan" in penstock("plan", "--out", "penstock.yaml", code=1)
    assert file.read_text() == before_text
    Path(out).write_text(Path(out).read_text().replace('"version"', '"vers"'))
    assert "damaged" in penstock("apply", out, code=1)


def test_a_saved_plan_is_refused_where_anything_has_changed_since(
    penstock: Penstock, file: Path, tmp_path: Path, store: Store
) -> None:
    """What its changes lead to may be something else by then."""
    penstock("apply", "-y")
    file.write_text(TEXT.replace("total > 10", "total > 11"))
    out = str(tmp_path / "plan.json")
    penstock("plan", "--out", out, code=2)
    state = DesiredState(store)
    spec = {"stream": "orders"}
    state.write([Change("consumer", "new", None, spec)], by="ann", door="api")
    before = state.read()
    assert "moved since: consumer new." in penstock("apply", out, code=1)
    assert state.read() == before
    penstock("plan", "--out", out, code=2)
    penstock("apply", out)
    assert state.read().entities["sink", "out"].spec["filter"] == "record.total > 11"
    assert state.read().entities["consumer", "new"].managed_by == "api"


def test_deletes_are_shown_and_done_with_prune_alone(
    penstock: Penstock, file: Path, store: Store
) -> None:
    publish(store, make_stream(store, "orders"), [inserted(1), inserted(2)])
    penstock("apply", "-y")
    by_api = [
        Change("consumer", "mine", None, {"stream": "orders"}),
        Change("sink", "extra", None, {"type": "stream", "source": "shop"}),
    ]
    state = DesiredState(store)
    state.write(by_api, by="ann", door="api")
    shorter = TEXT[: TEXT.index("  out:")] + "consumers: {mine: {stream: orders}}\n"
    file.write_text(shorter)
    shown = penstock("plan", code=2)
    assert "= consumer mine  which the api manages: the file takes it over" in shown
    assert "Plan: 1 to take over, 3 kept that --prune would delete." in shown
    penstock("apply", "-y")
    assert state.read().entities["consumer", "mine"].managed_by == "file"
    assert ("consumer", "pull") in state.read().entities
    penstock("plan", code=2)
    file.write_text("store: ${STORE}\n")
    assert "sink extra: source: there is no source 'shop'" in penstock("plan", "--prune", code=1)
    gone = Change("sink", "extra", by_api[1].after, None)
    state.write([gone], by="ann", door="api")
    words = [c for p in plan_json(penstock, "--prune")["changes"] for c in p["consequences"]]
    assert "drops the slot penstock_shop: what was committed since then can't be read" in words
    assert "drops the stream orders with 2 messages and its consumers hook, mine, pull" in words
    penstock("apply", "-y", "--prune")
    assert state.read().entities == {}
    assert penstock("export") == "store: ${STORE}\n\n# Variables to set:\n#   STORE  store\n"


def test_what_waits_for_a_sink_is_named_before_the_sink_goes(
    penstock: Penstock, file: Path, store: Store
) -> None:
    source = source_of(store, make_stream(store, "orders"))
    penstock("apply", "-y")
    why = SinkError("unavailable", "It does not answer.")
    with store.connection() as connection, connection.transaction():
        backlog.put_behind(connection, source.id, "out", why)
        waiting = wire([inserted(1), inserted(2), inserted(3)])
        backlog.spill(connection, source.id, "out", waiting, source.base)
    file.write_text(TEXT.replace(TEXT[TEXT.index("  out:") : TEXT.index("consumers:")], ""))
    words = "sink out has a backlog of 3 messages, which goes with it"
    assert words in penstock("plan", "--prune", code=2)
    assert words in penstock("plan", code=2), "it is named as what --prune would delete, too"
    out = TEXT[TEXT.index("  out:") : TEXT.index("consumers:")]
    file.write_text(TEXT.replace(out, "  out: {type: stream, source: shop}\n"))
    words = "sink out has a backlog of 3 messages, which stays in the store and is not sent"
    assert words in " ".join(penstock("plan", code=2).split())


@pytest.mark.parametrize("type_", ["pull", "nats"])
def test_a_plan_refuses_a_condition_as_apply_would(
    penstock: Penstock, file: Path, store: Store, type_: str
) -> None:
    make_stream(store, "orders")
    store.save_catalog("shop", {("public", "items"): {"id": ColumnType("pg_catalog", "int8")}})
    penstock("apply", "-y")
    spec = {"pull": "", "nats": "type: nats, url: 'nats://n:4222', "}[type_]
    wrong = f"{TEXT}  late: {{{spec}stream: orders, filters: {{sql: record.totl > 1}}}}\n"
    file.write_text(wrong)
    expected = "consumer late: filters.sql: position 1: unknown column record.totl of public.items"
    assert expected in penstock("plan", code=1)
    assert expected in penstock("apply", "-y", code=1)
    file.write_text(wrong.replace("totl", "id"))
    assert "+ consumer late" in penstock("plan", code=2)


def test_an_export_of_what_the_api_made_changes_nothing(
    penstock: Penstock, file: Path, store: Store
) -> None:
    penstock("apply", "-y")
    state = DesiredState(store)
    state.write([Change("consumer", "mine", None, {"stream": "orders"})], by="ann", door="api")
    penstock("export", "-o", "penstock.yaml")
    shown = penstock("plan")
    assert "= consumer mine  which the api manages: the file takes it over" in shown
    assert "Plan: 1 to take over. Nothing else: the file and the desired state agree." in shown
    assert state.read().entities["consumer", "mine"].managed_by == "api"
    penstock("apply", "-y")
    assert state.read().entities["consumer", "mine"].managed_by == "file"
    assert "Nothing to do" in penstock("plan")


def test_what_the_api_changes_of_a_files_entity_the_next_apply_puts_back(
    penstock: Penstock, file: Path, store: Store, database: Database
) -> None:
    penstock("apply", "-y")
    state = DesiredState(store)
    with ApiServer(database.url, store.tokens.create("ops", "admin")) as api:
        patch = {"filter": "record.total > 99"}
        answers = [api.client.patch("/v1/sinks/out", json=patch).json() for _ in range(2)]
    assert [(each["action"], each["taken_from"]) for each in answers] == [
        ("update", "file"),
        ("nothing", None),
    ]
    by = {key: entity.managed_by for key, entity in state.read().entities.items()}
    assert by.pop(("sink", "out")) == "api"
    assert set(by.values()) == {"file"}
    (change,) = plan_json(penstock)["changes"]
    assert (change["name"], change["action"], change["taken_from"]) == ("out", "update", "api")
    assert [(f["path"], f["before"], f["after"]) for f in change["fields"]] == [
        ("filter", "record.total > 99", "record.total > 10")
    ]
    shown = "~ sink out  which the api manages: the file takes it over"
    assert shown in penstock("plan", code=2)
    penstock("apply", "-y")
    sink = state.read().entities["sink", "out"]
    assert (sink.spec["filter"], sink.managed_by) == ("record.total > 10", "file")
    assert "Nothing to do" in penstock("plan")


def test_errors_have_exit_code_1(penstock: Penstock, file: Path) -> None:
    file.write_text(TEXT.replace("filter:", "filtre:"))
    expected = "penstock.yaml:14: sinks.out.filtre: unknown key; did you mean filter?"
    assert expected in penstock("plan", code=1)
    assert expected in penstock("diff", code=1)
    assert "No such option" in penstock("plan", "--prun", code=1)
    for command in ("plan", "apply", "diff"):
        for named in ("third.yaml", "penstock.yaml"):
            two = f"other.yaml and --config {named} are two files: name one"
            assert two in penstock(command, "other.yaml", "-c", named, code=1)
    file.write_text(TEXT.replace("stream: orders", "stream: odrers"))
    expected = ":18: consumers.hook.stream: there is no stream 'odrers'"
    assert expected in penstock("plan", code=1)


def test_an_expression_that_does_not_plan_refuses_all(
    penstock: Penstock, file: Path, database: Database
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, total int)")
    here = TEXT.replace(f"postgres://app:{SECRET}@127.0.0.1:1/shop", "${STORE}")
    file.write_text(here.replace("record.total", "record.totl"))
    refused = penstock("apply", "--yes", code=1)
    assert refused.startswith("sink out: filter: position 1: ")
    assert "total" in refused
    file.write_text(here)
    assert "sink out: filter, public.orders: a DELETE lacks total" in penstock("plan", code=2)


SYNC = """\
store: ${STORE}
credentials:
  key: {provider: stripe, properties: {api_key: k}}
syncs:
  billing: {provider: stripe, collections: [customers], credential: key}
"""


def test_what_is_printed_lets_the_last_sync_go(
    penstock: Penstock, file: Path, store: Store, database: Database
) -> None:
    """A consumer that the API made needs the stream `events`: each remedy works to the letter."""
    file.write_text(SYNC)
    penstock("apply", "--yes")
    token = store.tokens.create("ops", "admin")
    with ApiServer(database.url, token) as api:
        made = api.client.put("/v1/consumers/mail", json={"stream": "events"})
        assert made.status_code == 201, made.text
        file.write_text("store: ${STORE}\n")
        printed = penstock("apply", "--prune", "--yes", code=1)
        assert (
            "consumer mail: stream: there is no stream 'events' without a sync: keep or add one, which"
            " may have `status: disabled`, or delete the consumer. No file manages it: to delete it,"
            " DELETE /v1/consumers/mail"
        ) in " ".join(printed.split())

        file.write_text(SYNC.replace("credential: key}", "credential: key, status: disabled}"))
        penstock("apply", "--prune", "--yes")
        file.write_text("store: ${STORE}\n")
        penstock("apply", "--prune", "--yes", code=1)

        method, path = printed.split("to delete it,")[1].split()[:2]
        assert api.client.request(method, path).status_code in (200, 204)
    assert "Plan: 2 to delete." in penstock("apply", "--prune", "--yes")
    assert not DesiredState(store).read().entities


def test_a_terminal_gets_colours_and_a_pipe_gets_none(file: Path, penstock: Penstock) -> None:
    assert "\x1b" not in penstock("plan", code=2)
    terminal, end = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environ.pop(name, None)
    command = [sys.executable, "-m", "penstock", "plan", str(file)]
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        process = subprocess.Popen(command, stdout=end, env=environ)
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # so ends a terminal whose other side is closed
            while part := screen.read(65_536):
                shown += part
        assert process.wait(60) == 2
    assert b"\x1b[32m+ source shop\x1b[0m" in shown
