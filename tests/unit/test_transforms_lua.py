"""Lua over messages: what a program sees, what comes of what it returns, what Lua changes in JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline import PATIENCE
from tests.streams_help import Change, deleted, inserted, moved, updated, wire

from penstock.config.transforms import TransformSettings
from penstock.core.message import WIRE_SCHEMA
from penstock.transforms import inspect, make
from penstock.transforms.base import FailedMessage, Transformed, TransformError
from penstock.transforms.lua import LuaTransform


def lua(code: str, *changes: Change, **limits: Any) -> Transformed:
    transform = LuaTransform(code, **limits)
    try:
        return transform(wire(changes))
    finally:
        transform.close()


def body(code: str, *changes: Change, **limits: Any) -> Transformed:
    return lua(f"function transform(message)\n{code}\nend", *changes, **limits)


def records(transformed: Transformed) -> list[Any]:
    return [json.loads(text) for text in transformed.batch.column("record").to_pylist()]


def reasons(transformed: Transformed) -> list[str]:
    return [failed.reason for failed in transformed.failed]


def test_what_a_program_sees() -> None:
    seen = body(
        """
        local m = message.metadata
        message.record.seen = {
          message.action, message.changes and message.changes.name or "none", m.table_name,
          m.commit_lsn, #m.record_pks,
        }
        return message
        """,
        inserted(1),
        Change({"id": 1, "name": "b"}, "update", {"name": "a"}),
        deleted(1),
    )
    assert [r["seen"][:2] for r in records(seen)] == [
        ["insert", "none"], ["update", "a"], ["delete", "none"],
    ]  # fmt: skip
    assert {tuple(r["seen"][2:]) for r in records(seen)} == {("items", 101, 1)}
    assert seen.failed == []


def test_changed_dropped_and_multiplied() -> None:
    batch = wire([inserted(1, a="x"), inserted(2, a="y"), moved(3, 4, a="z"), inserted(5)])
    transform = LuaTransform(
        """
        function transform(message)
          local id = message.record.id
          if id == 2 then return nil end
          if id == 4 then
            return {message, {record = {id = id, extra = true}, action = "insert"}, message}
          end
          message.record.a = "changed"
          return message
        end
        """
    )
    done = transform(batch)
    transform.close()
    assert done.batch.schema == WIRE_SCHEMA
    assert records(done) == [
        {"id": 1, "a": "changed"},
        {"id": 4, "a": "z"},
        {"id": 4, "extra": True},
        {"id": 4, "a": "z"},
        {"id": 5, "a": "changed"},
    ]
    assert done.origin.to_pylist() == [0, 2, 2, 2, 3]
    assert done.part == done.batch.column("part").to_pylist() == [0, 0, 1, 2, 0]
    keys, before = (b.column("idempotency_key").to_pylist() for b in (done.batch, batch))
    assert keys == [before[0], before[2], f"{before[2]}-1", f"{before[2]}-2", before[3]]
    reported = [json.loads(m)["idempotency_key"] for m in done.batch.column("metadata").to_pylist()]
    assert reported == keys
    assert done.batch.column("action").to_pylist()[1:4] == ["update", "insert", "update"]
    assert done.batch.column("changes").to_pylist()[1:4] == ['{"id":3}', None, '{"id":3}']
    # The delete of the key that the row has left is sent once.
    assert [old is not None for old in done.batch.column("old_key").to_pylist()] == [
        False, True, False, False, False,
    ]  # fmt: skip
    for name in ("commit_lsn", "commit_idx", "group_hash", "old_group_hash", "table_name"):
        assert done.batch.column(name) == batch.column(name).take(done.origin)


def test_what_is_untouched_is_the_same_batch() -> None:
    batch = wire([inserted(1, a="x"), updated(1, a="y"), deleted(1)])
    transform = LuaTransform("function transform(message) return message end")
    assert transform(batch).batch.equals(batch)
    assert transform(batch.slice(0, 0)).batch.num_rows == 0
    transform.close()


def test_metadata_is_added_and_the_captured_stays() -> None:
    done = body(
        """
        message.metadata.tenant = {"a", null}
        message.metadata.commit_lsn = 7
        message.metadata.idempotency_key = "mine"
        message.metadata.route = "evil"
        message.metadata.record_pks = nil
        return message
        """,
        inserted(1),
    )
    before = json.loads(wire([inserted(1)]).column("metadata")[0].as_py())
    assert json.loads(done.batch.column("metadata")[0].as_py()) == {
        **before, "tenant": ["a", None],
    }  # fmt: skip


def test_the_failing_message_alone() -> None:
    code = """
    function transform(message)
      if message.record.id == 2 then
        return message.record.missing.field
      end
      return message
    end
    """
    done = lua(code, inserted(1), inserted(2), inserted(3), name="lua/orders.lua")
    assert done.origin.to_pylist() == [0, 2]
    assert done.failed == [
        FailedMessage(
            1,
            "transform_failed",
            "orders.lua, line 4: attempt to index a nil value (field 'missing')",
        )
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("return 5", "returned a number: expected a message (a table), a list of them, or nil"),
        ("return {1}", "returned a number at [1]: expected a message (a table)"),
        ("return {x = 1}", "returned a message without record: expected a table there"),
        ("message.x = 1 return message",
         "returned a message with 'x': expected record, changes, action and metadata"),
        ("message.record = {1} return message",
         "record is an array: expected a table with names as keys"),
        ("message.changes = 1 return message",
         "changes is a number: expected a table with names as keys"),
        ("message.action = 'zap' return message",
         "action is 'zap': expected one of insert, update, delete, truncate, read"),
        ("message.action = 1 return message", "action is a number: expected text"),
        ("return {message, {record = {a = pairs}}}",
         "[2].record.a is a function: expected text, a number, true or false, null or a table"),
        ("message.record.a = {b = {1, 0 / 0}} return message",
         "record.a.b[2] is nan, which JSON lacks: make it text, or null"),
        ("message.record.a = '\\xff' return message", "record.a is not valid UTF-8"),
        ("message.record.a = {1, nil, 3} return message",
         "record.a[2] is missing: write null for an element without a value"),
        ("message.record.a = {1, x = 2} return message",
         "record.a has both numbers and other keys: expected an array from 1 on, or text as keys"),
        ("message.record.a = {[7] = 2} return message",
         "record.a has the key 7: expected an array from 1 on, or text as keys"),
        ("message.record[true] = 2 return message",
         "record has the key a boolean: expected an array from 1 on, or text as keys"),
        ("message.record.a = message.record return message",
         "record.a.a… is nested more than 200 levels deep"),
        ("local l = {} for i = 1, 1001 do l[i] = message end return l",
         "returned 1001 messages: at most 1000 are taken"),
        ("error('no such customer')", "line 2: no such customer"),
        ("error({})", "an error was raised that is a table, not text"),
        ("error()", "an error was raised that is nil, not text"),
        ("error('\\xff\\27[2J\\0')", "line 2: ??[2J?"),
        ("error(('é'):rep(400))", f"line 2: {'é' * 243}…"),
        ("error(setmetatable({}, {__index = error}))",
         "an error was raised that is a table, not text"),
        ("message.action = '\\xff' return message", "action is not valid UTF-8"),
        ("return {record = {}, ['\\xff'] = 1}",
         "returned a message with '?': expected record, changes, action and metadata"),
    ],
)  # fmt: skip
def test_what_is_no_message(code: str, reason: str) -> None:
    assert reasons(body(code, inserted(1))) == [reason]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("function transform(m) return m", "line 1: 'end' expected near <eof>"),
        ("function other() end", "the program has no function transform(message)"),
        ("transform = 5",
         "the program has no function transform(message): `transform` is a number there"),
        ("error('early')", "line 1: early"),
        ("while true do end", "line 1: stopped after 100 ms of CPU time"),
        ("('a'):rep(1e6):find('.-.-.-.-b')",
         "the program ran for more than 100 ms before it had defined transform(message)"),
        ("\xff = 1", "line 1: unexpected symbol near '<\\"),
        ("error('\\xff')", "line 1: ?"),
        ("\x1bLua", "attempt to load a binary chunk (mode is 't')"),
        ("return " + "(" * 500 + "1" + ")" * 500, "C stack overflow"),
        ("x = ('x'):rep(100 * 1024 * 1024)", "took more than 64 MiB of memory"),
    ],
)  # fmt: skip
def test_a_program_that_is_refused(code: str, reason: str) -> None:
    settings = TransformSettings.model_validate({"lua": code})
    with pytest.raises(TransformError) as caught:
        inspect(settings)
    assert reason in str(caught.value)
    assert "traceback" not in str(caught.value)


def test_the_limits_are_the_settings() -> None:
    code = "function transform(m) local s = ('x'):rep(8 * 1024 * 1024) return m end"
    values = {"lua": code, "memory_limit_mib": 4, "time_limit_ms": 20}
    transform = make(TransformSettings.model_validate(values))
    assert reasons(transform(wire([inserted(1)]))) == ["took more than 4 MiB of memory"]
    transform.close()


def test_null_and_empty_arrays_stay_what_they_are() -> None:
    record: dict[str, Any] = {
        "id": 1,
        "n": None,
        "a": [],
        "o": {},
        "deep": {"x": [None, [], {}], "y": None},
    }
    done = body(
        """
        local r = message.record
        assert(r.n == null and r.n ~= nil and tostring(r.n) == "null" and r.deep.x[1] == null)
        assert(r.absent == nil and type(null) == "userdata")
        r.copy = {r.n, r.a, r.o, r.deep}
        r.mine, r.empty, r.gone, r.filled = array(), {}, nil, array()
        r.filled[1] = null
        return message
        """,
        Change(record),
    )
    assert done.failed == []
    assert records(done) == [
        {
            **record, "copy": [None, [], {}, record["deep"]], "mine": [], "empty": {},
            "filled": [None],
        }
    ]  # fmt: skip


def test_digits_of_what_is_untouched() -> None:
    text = (
        '{"id":9223372036854775807,"big":123456789012345678901234567890,"f":1.10,"e":1E400,'
        '"j":{"a": 1.10, "b":[12345678901234567890123]},"s":"\\u0000é\\u2028","z":-0}'
    )
    batch = wire([inserted(1)])
    at = batch.schema.get_field_index("record")
    batch = batch.set_column(at, "record", [text])
    transform = LuaTransform(
        "function transform(m) m.record.next = m.record.id - 1 m.record.x = m.record.s return m end"
    )
    done = transform(batch)
    transform.close()
    assert done.failed == []
    assert done.batch.column("record")[0].as_py() == (
        text[:-1] + ',"next":9223372036854775806,"x":"\\u0000é\u2028"}'
    )


def test_the_order_of_fields() -> None:
    done = body(
        "local r = message.record r.z, r.b, r.a, r.m = 1, 2, 3, {y = 1, x = 2} return message",
        Change({"id": 1, "z": 0, "k": 0}),
    )
    # Those that were there keep their place; new ones follow by name, whatever Lua's own order.
    assert done.batch.column("record")[0].as_py() == (
        '{"id":1,"z":1,"k":0,"a":3,"b":2,"m":{"x":2,"y":1}}'
    )


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)
COPY = """
local function copy(value)
  if type(value) ~= "table" then return value end
  local new = {}
  for k, v in pairs(value) do new[k] = copy(v) end
  return next(new) == nil and value or new
end
function transform(message)
  return {record = {id = message.record.id, copy = copy(message.record.value)}}
end
"""


@pytest.fixture(scope="module")
def copying() -> Iterator[LuaTransform]:
    transform = LuaTransform(COPY)
    yield transform
    transform.close()


@settings(max_examples=150, deadline=None)
@given(st.lists(JSON, min_size=1, max_size=4))
def test_any_json_through_lua(copying: LuaTransform, values: list[Any]) -> None:
    done = copying(wire([inserted(1, value=value) for value in values]))
    assert reasons(done) == []
    assert [_typed(r["copy"]) for r in records(done)] == [_typed(v) for v in values]


def _typed(value: Any) -> Any:
    """The value with its types, as 1 and 1.0 and True are equal to Python."""
    if isinstance(value, dict):
        return {name: _typed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return type(value), value


def test_a_message_that_is_too_large() -> None:
    done = body("return message", inserted(1, a="x" * 3_000_000), inserted(2), memory_limit=4 << 20)
    assert done.origin.to_pylist() == [1]
    assert reasons(done)[0].startswith("the message has 3,000,0")


def test_a_message_whose_values_do_not_fit_ends_the_process_alone() -> None:
    # Two bytes of JSON are sixteen in Lua, and more while the table grows.
    done = body(
        "return message", inserted(1), inserted(2, a=[1] * 600_000), inserted(3),
        memory_limit=4 << 20,
    )  # fmt: skip
    assert done.origin.to_pylist() == [0, 2]
    assert "4 MiB" in reasons(done)[0]


def test_a_process_that_is_killed_from_outside_fails_nothing() -> None:
    transform = LuaTransform("function transform(m) m.record.x = 1 return m end")
    batch = wire([inserted(i) for i in range(3)])
    before = transform._process._process
    os.kill(before.pid, signal.SIGKILL)
    before.wait(PATIENCE)
    assert records(transform(batch)) == [{"id": i, "x": 1} for i in range(3)]
    assert transform._process._process.pid != before.pid
    transform.close()
    assert transform._process._process.returncode is not None


ORPHANED = """
import sys, time
from penstock.transforms.lua import LuaTransform
transform = LuaTransform("function transform(m) return m end")
print(transform._process._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_process_whose_parent_is_killed_ends() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        helper = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([helper], timeout=60)[1] == []


def test_a_process_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transforms.lua.PATIENCE", 0.5)
    transform = LuaTransform("function transform(m) return m end")
    os.kill(transform._process._process.pid, signal.SIGSTOP)
    done = transform(wire([inserted(1), inserted(2)]))
    assert reasons(done)[0].startswith("did not end in")
    assert done.origin.to_pylist() == [1]
    transform.close()


def test_the_limit_is_lowered_while_all_are_stopped() -> None:
    code = """
    function transform(message)
      if message.record.id < 40 then while true do end end
      if message.record.id < 43 then return ("a"):rep(100000):find(".-.-.-.-b") end
      return message
    end
    """
    transform = LuaTransform(code, time_limit=0.04)
    done = transform(wire([inserted(number) for number in range(46)]))
    lowered = " (of 40 ms: lowered while message after message is stopped)"
    call = "stopped after 4 ms of CPU time, inside one call of a library function"
    reported = reasons(done)
    assert reported[:20] == ["line 3: stopped after 40 ms of CPU time"] * 20
    assert reported[20:40] == [f"line 3: stopped after 4 ms of CPU time{lowered}"] * 20
    assert [reason.startswith(call) and reason.endswith(lowered) for reason in reported[40:]] == [
        True
    ] * 3
    assert done.origin.to_pylist() == [43, 44, 45]
    # One that ended in time has brought the limit back; the count goes on from batch to batch.
    loops = wire([inserted(1)] * 20)
    assert reasons(transform(loops)) == reported[:20]
    process = psutil.Process(transform._process._process.pid)
    before = process.cpu_times().user
    assert reasons(transform(loops)) == reported[20:40]
    assert process.cpu_times().user - before < 0.4
    transform.close()


def test_the_environment_does_not_reach_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "hunter6")
    transform = LuaTransform("function transform(m) return m end")
    pid = transform._process._process.pid
    assert b"hunter6" not in Path(f"/proc/{pid}/environ").read_bytes()
    transform.close()


@pytest.mark.parametrize(
    ("value", "output"),
    [
        ('"\\ud800"', "the message has JSON that can't be read"),
        ("[" * 300 + "]" * 300, "nested"),
        ("[" * 5_000 + "]" * 5_000, "the message is nested too deep to be read"),
    ],
)
def test_messages_that_cannot_be_read(value: str, output: str) -> None:
    # Postgres' json keeps any escape, and any depth that its stack allows.
    batch = wire([inserted(1), inserted(2), inserted(3)])
    texts = ['{"id":1}', f'{{"id":2,"j":{value}}}', '{"id":3,"j":' + "[" * 150 + "]" * 150 + "}"]
    transform = LuaTransform("function transform(m) return m end")
    done = transform(batch.set_column(0, "record", pa.array(texts)))
    transform.close()
    assert done.batch.column("record").to_pylist() == [texts[0], texts[2]]
    (failed,) = done.failed
    assert output in failed.reason
