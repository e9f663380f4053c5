"""Python functions over messages: what they get and give, what they may not, how they fail."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.streams_help import Change, deleted, inserted, moved, wire

from penstock.config.transforms import TransformSettings
from penstock.core.message import WIRE_SCHEMA
from penstock.transforms import inspect, make
from penstock.transforms.base import FailedMessage, Transformed, TransformError

MODULE = """
import datetime, decimal, os, sys, uuid


def same(message):
    return message


def orders(message):
    record = message["record"]
    if record["id"] == 2:
        return None
    if record["id"] == 4:
        return [message, {"record": {"id": 4, "extra": True}, "action": "insert"}, message]
    record["a"] = "changed"
    return message


def more(message):
    message["metadata"].update(tenant=["a", None], commit_lsn=7, route="evil")
    return message


def numbers(message):
    message["record"]["next"] = message["record"]["id"] + 1
    return message


def values(message):
    message["record"] = {
        "d": decimal.Decimal("1.10"), "t": datetime.datetime(2024, 1, 2, 3, 4, 5),
        "z": datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.timezone.utc),
        "day": datetime.date(2024, 1, 2), "u": uuid.UUID(int=1), "pair": (1, 2),
    }
    return message


def fails(message):
    if message["record"]["id"] == 2:
        return helper(message)
    return message


def helper(message):
    return message["record"]["missing"]


def leaks(message):
    raise RuntimeError("cannot connect with " + os.environ["SHOP_PASSWORD"] + " to "
                       + os.environ["SHOP_URL"] + " or nats://token@host")


class Odd(Exception):
    def __str__(self):
        raise ValueError


def odd(message):
    raise Odd


def screen(message):
    raise ValueError("\\x1b[2J\\x00")


def leaves(message):
    sys.exit("bye")


class Panic(BaseException):  # as pyo3's PanicException is
    pass


def panics(message):
    raise Panic("index out of bounds")


def cancelled(message):
    import asyncio
    raise asyncio.CancelledError("gone")


def interrupts(message):
    raise KeyboardInterrupt


def interrupted(message):
    import signal
    signal.raise_signal(signal.SIGINT)


class Silent(BaseException):
    def __str__(self):
        raise Panic


def silent(message):
    raise Silent


def remembers(message):
    raise MemoryError


class Bad(dict):
    def items(self):
        raise Panic("no items")

    keys = get = items


def unreadable(message):
    return {"record": Bad(a=1)}


def unreadable_message(message):
    return Bad(record={})


def deep(message):
    return deep(message)


async def later(message):
    return message


def one_by_one(message):
    yield message


class Changer:
    @staticmethod
    def change(message):
        return {"record": {"by": "method"}}


constant = 5
returned = None


def returns(message):
    return returned(message)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "shop_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "shop_code", raising=False)
    return "shop_code"


def apply(spec: str, *changes: Change) -> Transformed:
    return make(TransformSettings.model_validate({"python": spec}))(wire(changes))


def records(done: Transformed) -> list[Any]:
    return [json.loads(text) for text in done.batch.column("record").to_pylist()]


def test_untouched(module: str) -> None:
    batch = wire([inserted(1, a="x"), moved(1, 2), deleted(1)])
    done = make(TransformSettings.model_validate({"python": f"{module}:same"}))(batch)
    assert done.batch.equals(batch)
    assert done.batch.schema == WIRE_SCHEMA


def test_changed_dropped_and_multiplied(module: str) -> None:
    changes = (inserted(1), inserted(2), moved(3, 4), inserted(5))
    done = apply(f"{module}:orders", *changes)
    assert done.failed == []
    assert records(done) == [
        {"id": 1, "a": "changed"}, {"id": 4}, {"id": 4, "extra": True}, {"id": 4},
        {"id": 5, "a": "changed"},
    ]  # fmt: skip
    assert done.origin.to_pylist() == [0, 2, 2, 2, 3]
    assert done.batch.column("part").to_pylist() == done.part == [0, 0, 1, 2, 0]
    assert done.batch.column("changes").to_pylist()[1:4] == ['{"id":3}', None, '{"id":3}']
    assert done.batch.column("action").to_pylist()[1:4] == ["update", "insert", "update"]


def test_metadata_is_added_and_the_captured_stays(module: str) -> None:
    done = apply(f"{module}:more", inserted(1))
    before = json.loads(wire([inserted(1)]).column("metadata")[0].as_py())
    reported = json.loads(done.batch.column("metadata")[0].as_py())
    assert reported == {**before, "tenant": ["a", None]}


def test_digits_of_what_is_untouched(module: str) -> None:
    text = '{"id":1,"f":1.10,"e":1E40,"big":123456789012345678901,"j":{"a": 1.10, "b":-0}}'
    batch = wire([inserted(1)])
    batch = batch.set_column(0, "record", [text])
    done = make(TransformSettings.model_validate({"python": f"{module}:numbers"}))(batch)
    assert done.batch.column("record")[0].as_py() == text[:-1] + ',"next":2}'


def test_values_of_python(module: str) -> None:
    assert records(apply(f"{module}:values", inserted(1))) == [
        {
            "d": "1.10", "t": "2024-01-02T03:04:05", "z": "2024-01-02T03:00:00Z",
            "day": "2024-01-02", "u": "00000000-0000-0000-0000-000000000001", "pair": [1, 2],
        }
    ]  # fmt: skip


def test_a_method(module: str) -> None:
    assert records(apply(f"{module}:Changer.change", inserted(1))) == [{"by": "method"}]


def line(text: str) -> int:
    return MODULE.split(text, maxsplit=1)[0].count("\n") + 1


def test_the_failing_message_alone(module: str) -> None:
    done = apply(f"{module}:fails", inserted(1), inserted(2), inserted(3))
    assert done.origin.to_pylist() == [0, 2]
    at = line('return message["record"]["missing"]')
    reason = f"shop_code.py, line {at}: KeyError: 'missing'"
    assert done.failed == [FailedMessage(1, "transform_failed", reason)]


def test_no_secret_in_a_reason(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "hunter6")
    monkeypatch.setenv("SHOP_URL", "postgresql://shop:swordfish@db/shop")
    (failed,) = apply(f"{module}:leaks", inserted(1)).failed
    assert "RuntimeError: cannot connect with *** to" in failed.reason
    for secret in ("hunter6", "swordfish", "token"):
        assert secret not in failed.reason


def test_what_would_end_a_worker(module: str) -> None:
    (failed,) = apply(f"{module}:leaves", inserted(1)).failed
    assert "SystemExit: bye" in failed.reason
    (failed,) = apply(f"{module}:odd", inserted(1)).failed
    assert failed.reason.endswith(": Odd")
    (failed,) = apply(f"{module}:screen", inserted(1)).failed
    assert failed.reason.endswith(": ValueError: ?[2J?")
    (failed,) = apply(f"{module}:deep", inserted(1)).failed
    assert f"line {line('return deep')}: RecursionError" in failed.reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("panics", "Panic: index out of bounds"),
        ("cancelled", "CancelledError: gone"),
        ("interrupts", "KeyboardInterrupt"),
        ("silent", "Silent"),
        ("remembers", "MemoryError"),
        ("unreadable", "returned a value that can't be read: "),
        ("unreadable_message", "returned a value that can't be read: "),
    ],
)
def test_what_is_no_exception_fails_its_message_alone(
    module: str, function: str, reason: str
) -> None:
    done = apply(f"{module}:{function}", inserted(1), inserted(2))
    assert [failed.row for failed in done.failed] == [0, 1]
    assert reason in done.failed[0].reason
    assert "Panic" in done.failed[0].reason or "Panic" not in function


def test_ctrl_c_ends_the_command(module: str) -> None:
    # Ignored where the tests run in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            apply(f"{module}:interrupted", inserted(1))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda m: 5, "returned an int: expected a message (a dict), a list of them, or None"),
        (lambda m: [5], "returned an int at [0]: expected a message (a dict)"),
        (lambda m: {}, "returned a message without record: expected a dict"),
        (lambda m: {"record": [1]}, "record is a list: expected a dict"),
        (lambda m: [m, {"record": 1}], "[1].record is an int: expected a dict"),
        (lambda m: {"record": {}, "x": 1},
         "returned a message with 'x': expected record, changes, action and metadata"),
        (lambda m: {"record": {}, "changes": 1}, "changes is an int: expected a dict or None"),
        (lambda m: {"record": {}, "metadata": 1}, "metadata is an int: expected a dict"),
        (lambda m: {"record": {}, "action": "zap"},
         "action is 'zap': expected one of insert, update, delete, truncate, read"),
        (lambda m: {"record": {"a": [1, {"b": b"x"}]}},
         "record.a[1].b is a bytes: expected text, a number, true or false, None, a dict or list"),
        (lambda m: {"record": {"a": float("nan")}},
         "record.a is nan, which JSON lacks: make it text, or None"),
        (lambda m: {"record": {"a": {1: 2}}}, "record.a has the key 1: expected text"),
        (lambda m: {"record": {"a": {"b": "\ud800"}}},
         "record.a.b is text with half a surrogate pair"),
        (lambda m: {"record": {"a": nested(300)}}, "is nested more than 200 levels deep"),
        (lambda m: [m] * 1001, "returned 1,001 messages: at most 1,000 are taken"),
    ],
)  # fmt: skip
def test_what_is_no_message(module: str, returned: Callable[[Any], Any], reason: str) -> None:
    transform = make(TransformSettings.model_validate({"python": f"{module}:returns"}))
    __import__("sys").modules[module].returned = returned
    done = transform(wire([inserted(1)]))
    assert reason in done.failed[0].reason
    assert done.batch.num_rows == 0


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("no_such_package:f", "there is no module 'no_such_package': install the package"),
        ("json.nothing:f", "there is no module 'json.nothing'"),
        ("shop_code:transfrom", "'shop_code' has no 'transfrom'; it has Bad, Changer, Odd, Panic"),
        ("shop_code:constant", "'constant' is an int, not a function"),
        ("shop_code:later", "async or a generator"),
        ("shop_code:one_by_one", "async or a generator"),
        ("broken:f", "module 'broken' cannot be imported: SyntaxError"),
        ("needs:f", "module 'needs' needs 'no_such_package', which is not installed"),
        ("panics:f", "module 'panics' cannot be imported: panics.py, line 1: GeneratorExit: no"),
        ("stops:f", "module 'stops' cannot be imported: stops.py, line 1: KeyboardInterrupt"),
        ("lazy:f", "module 'lazy' cannot be imported: lazy.py, line 2: GeneratorExit: lazy"),
        ("raises:f", "module 'raises' cannot be imported: raises.py, line 2: ValueError: boom"),
    ],
)
def test_a_function_that_is_refused(module: str, tmp_path: Path, spec: str, reason: str) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    (tmp_path / "panics.py").write_text("raise GeneratorExit('no')")
    (tmp_path / "stops.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "lazy.py").write_text("def __getattr__(name):\n    raise GeneratorExit('lazy')\n")
    (tmp_path / "raises.py").write_text("\nraise ValueError('boom')\n")
    with pytest.raises(TransformError) as caught:
        inspect(TransformSettings.model_validate({"python": spec}))
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{spec}: ")


@pytest.mark.parametrize(
    ("value", "output"),
    [
        ('"\\ud800"', "the message has JSON that can't be read"),
        ("[" * 300 + "]" * 300, "nested"),
        # Later versions of Python read 10,000 levels.
        ("[" * 100_000 + "]" * 100_000, "the message is nested too deep to be read"),
    ],
)
def test_messages_that_cannot_be_read(module: str, value: str, output: str) -> None:
    # Postgres' json keeps any escape, and any depth that its stack allows.
    batch = wire([inserted(1), inserted(2), inserted(3)])
    texts = ['{"id":1}', f'{{"id":2,"j":{value}}}', '{"id":3,"j":' + "[" * 150 + "]" * 150 + "}"]
    transform = make(TransformSettings.model_validate({"python": f"{module}:same"}))
    done = transform(batch.set_column(0, "record", pa.array(texts)))
    transform.close()
    assert done.batch.column("record").to_pylist() == [texts[0], texts[2]]
    (failed,) = done.failed
    assert output in failed.reason
