"""`penstock try` as a user runs it: expressions by real Spark, Lua, Python, files, live changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.embedded.handles import Database

from ..cli import SECRET, fails, run, write
from ..pipeline import COMMAND, PATIENCE, penstock

TABLE = "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(10, 2), region text, name text)"
SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
CONFIG = """\
sources:
  shop:
    type: postgres
    url: ${DATABASE_URL}
    tables: [public.orders]
sinks:
  sql:
    type: nats
    source: shop
    url: nats://localhost
    filter: "record.amount > 100"
    transform: {sql: "record.id as id, upper(record.name) as name, 1 / record.id as share"}
    route: "'orders.' || record.region"
  lua:
    type: nats
    source: shop
    url: nats://localhost
    subject: "orders.{record.region}"
    transform:
      lua: |
        function transform(message)
          local r = message.record
          if r.region == "nowhere" then return nil end
          if r.region == "bad" then error("no such region") end
          r.name = r.name:upper()
          return {message, message}
        end
  python:
    type: stream
    source: shop
    kind: rows
    transform: {python: "shop_transforms:change"}
    route: [{to: "r/{record.region}"}]
"""
MODULE = """
def change(message):
    message["record"]["name"] = message["record"]["name"].title()
    message["metadata"]["by"] = "python"
    return message
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, CONFIG)
    (tmp_path / "shop_transforms.py").write_text(MODULE)
    return tmp_path


def environment(url: str = f"postgresql://user:{SECRET}@127.0.0.1:1/shop") -> dict[str, str]:
    return {"DATABASE_URL": url, "PYTHONPATH": "."}


def tried(folder: Path, sink: str, *messages: Any, url: str = "", code: int = 0) -> Any:
    """Run it over messages, and return what it prints of each."""
    (folder / "messages.json").write_text(json.dumps(messages))
    done = penstock(
        "try", "--sink", sink, "--message", "messages.json", "--json",
        cwd=folder, environment=environment(url) if url else environment(),
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    return json.loads(done.stdout)


def order(number: int, **columns: Any) -> dict[str, Any]:
    return {"record": {"id": number, "amount": "150.00", "region": "eu", "name": "ann", **columns}}


def test_expressions(folder: Path, database: Database) -> None:
    database.execute(TABLE)
    found = tried(
        folder, "sql", order(1), order(2, amount="99.99"), order(0), order(1, region="e.u"),
        {**order(4), "action": "truncate"}, url=database.url, code=1,
    )  # fmt: skip
    assert [f["result"] for f in found] == ["sent", "dropped", "failed", "sent", "passed by"]
    (out,) = found[0]["out"]
    assert out["to"] == "orders.eu"
    assert out["message"]["record"] == {"id": 1, "name": "ANN", "share": 1}
    assert out["message"]["metadata"]["consumer"] == {"id": "sql", "name": "sql"}
    assert found[1]["why"] == "by the filter"
    assert found[2]["code"] == "transform_failed"
    assert "share" in found[2]["why"]
    # No value adds a token.
    assert found[3]["out"][0]["to"] == "orders.e%2Eu"
    assert database.execute(SLOTS) == []


def test_lua_without_any_server(folder: Path) -> None:
    found = tried(
        folder, "lua", order(1), order(2, region="nowhere"), order(3, region="bad"), code=1
    )
    assert [f["result"] for f in found] == ["sent", "dropped", "failed"]
    assert [out["to"] for out in found[0]["out"]] == ["orders.eu", "orders.eu"]
    assert [out["message"]["record"]["name"] for out in found[0]["out"]] == ["ANN", "ANN"]
    keys = [out["message"]["metadata"]["idempotency_key"] for out in found[0]["out"]]
    assert keys == ["try-1-0", "try-1-0-1"]
    assert found[2]["why"] == "line 4: no such region"
    assert all(f["milliseconds"] < 5_000 for f in found)


def test_python_and_rows(folder: Path) -> None:
    (found,) = tried(folder, "python", order(1))
    (out,) = found["out"]
    assert out["to"] == "r/eu"
    assert set(out["message"]) == {"record", "metadata"}
    assert out["message"]["record"]["name"] == "Ann"
    assert out["message"]["metadata"]["by"] == "python"


def test_for_people_and_from_standard_input(folder: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "try", "--sink", "lua", "--message", "-"],
        input=json.dumps(order(1)), cwd=folder, env={**os.environ, **environment()},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '→ out  orders.eu  {"record":{"id":1' in done.stdout
    assert "1 in, 2 out" in done.stdout
    assert "Nothing was delivered." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--sink", "lua"], "give either --message FILE (- for stdin)"),
        (["--sink", "lua", "--message", "x", "--live", "1"], "give either --message"),
        (["--sink", "lau", "--message", "x"], "there is no sink 'lau': expected one of sql, lua"),
        (["--sink", "lua", "--message", "none.json"], "none.json: it cannot be read: No such file"),
        (["--sink", "lua", "--message", "penstock.yaml"], "penstock.yaml: no JSON, line 1"),
        (["--message", "x"], "Missing option '--sink'"),
    ],
)
def test_wrong_uses(folder: Path, arguments: list[str], output: str) -> None:
    assert output in fails(folder, 2, "try", *arguments, **environment())


def test_code_that_does_not_load(tmp_path: Path, database: Database) -> None:
    database.execute(TABLE)
    message = tmp_path / "m.json"
    message.write_text(json.dumps(order(1)))

    def output(*settings: str) -> str:
        sink = CONFIG[: CONFIG.index("    filter")]
        write(tmp_path, sink, *(f"    {line}" for line in settings))
        use = ["try", "--sink", "sql", "--message", "m.json"]
        return fails(tmp_path, 2, *use, **environment(database.url))

    assert "line 1: unexpected symbol" in output('transform: {lua: "transform = = 1"}')
    assert "no function transform(message)" in output('transform: {lua: "x = 1"}')
    assert "there is no module 'nowhere'" in output('transform: {python: "nowhere:f"}')
    assert "amuont" in (text := output('filter: "record.amuont > 1"'))
    assert "amount" in text


def test_a_source_that_is_down(folder: Path) -> None:
    (folder / "m.json").write_text(json.dumps(order(1)))
    use = ["try", "--sink", "sql", "--message", "m.json"]
    assert "127.0.0.1" in fails(folder, 1, *use, **environment())


def test_live(folder: Path, database: Database) -> None:
    database.execute(TABLE)
    database.execute("CREATE PUBLICATION penstock_shop FOR TABLE orders")
    with live(folder, database, "--live", "2", "--json") as process:
        wait_printed(process, "Waiting for the next 2 changes")
        for number in range(3):
            database.execute("INSERT INTO orders VALUES (%s, 1, 'eu', 'bo')", [number])
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert [f["message"]["record"]["id"] for f in found] == [0, 1]
    assert found[0]["out"][0]["message"]["record"]["name"] == "BO"
    until_gone(database)


def test_live_that_is_interrupted(folder: Path, database: Database) -> None:
    database.execute(TABLE)
    database.execute("CREATE PUBLICATION penstock_shop FOR TABLE orders")
    with live(folder, database, "--live", "2") as process:
        wait_printed(process, "Waiting for the next 2 changes")
        assert len(database.execute(SLOTS)) == 1
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    until_gone(database)


def test_live_without_changes(folder: Path, database: Database) -> None:
    database.execute(TABLE)
    database.execute("CREATE PUBLICATION penstock_shop FOR TABLE orders")
    use = ["try", "--sink", "lua", "--live", "2", "--timeout", "1"]
    run(folder, *use, **environment(database.url))


def live(folder: Path, database: Database, *options: str) -> subprocess.Popen[str]:
    # A shell starts what runs in the background with SIGINT ignored, which would be inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [*COMMAND, "try", "--sink", "lua", *options], cwd=folder, text=True,
        env={**os.environ, **environment(database.url)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_printed(process: subprocess.Popen[str], what: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if what in line:
            return
    raise AssertionError(f"it never printed {what!r}")


def until_gone(database: Database) -> None:
    """The server ends the session, and with it the slot, soon after the client has."""
    pause = threading.Event()
    for _ in range(200):
        if not database.execute(SLOTS):
            return
        pause.wait(0.05)
    raise AssertionError(database.execute(SLOTS))
