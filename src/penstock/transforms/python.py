"""Transforms in Python: a function of a module that the operator has installed.

It runs in the Spark worker itself, with no limits: it is as trusted as Penstock. It is given a dict
`{"record", "changes", "action", "metadata"}` of its own, and returns a message like it, a list of them,
or None to drop it.
"""

from __future__ import annotations

import datetime
import decimal
import math
import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from penstock.transforms.base import (
    MOST_MESSAGES,
    RESERVED,
    Output,
    Transformed,
    assemble,
    captured,
    known_action,
)
from penstock.transforms.json_values import UNREADABLE, Values, unreadable
from penstock.transforms.python_function import Interrupts, described, kind, load

_PLAIN: Final = frozenset({str, int, bool, type(None)})
# Written as text, in the same forms that the capture gives them.
_AS_TEXT: Final = (decimal.Decimal, datetime.date, datetime.time, uuid.UUID)
_DEPTH: Final = 200
_CAPTURED: Final = frozenset(RESERVED)
_FIELDS: Final = frozenset({"record", "changes", "action", "metadata"})


class _BadValueError(Exception):
    """A returned value that is no message; the text names it."""


class PythonTransform:
    """Calls the operator's function for each message.

    Args:
        spec: The function as `package.module:function`.

    Raises:
        TransformError: The module cannot be imported, or has no such function.
    """

    def __init__(self, spec: str) -> None:
        self._function, self._file = load(spec)
        self._interrupts = Interrupts()
        self._values = Values()
        self._encode = msgspec.json.Encoder(decimal_format="string").encode

    def __call__(self, batch: pa.RecordBatch) -> Transformed:
        """Return what the messages of `batch` become; see `MessageTransform`."""
        columns = captured(batch)
        with Interrupts() as self._interrupts:
            return assemble(batch, columns, map(self._one, *columns))

    def close(self) -> None:
        """Do nothing: a module is never forgotten."""

    def _one(
        self, record: str, changes: str | None, action: str, metadata: str
    ) -> Sequence[Output] | str:
        values = self._values
        values.floats = False
        try:
            message = {
                "record": values.decode(record),
                "changes": None if changes is None else values.decode(changes),
                "action": action,
                "metadata": values.decode(metadata),
            }
        except UNREADABLE as error:
            return unreadable(error)
        # What is plain keeps its text anyway; only floats and nested values can be spelt otherwise.
        exact = values.floats or "{" in record[1:] or "[" in record
        try:
            result = self._function(message)
        except BaseException as error:  # a panic of a native extension is no Exception
            if self._interrupts.seen:
                raise
            return described(error, self._file)
        try:
            return self._outputs(result, record, changes, exact)
        except _BadValueError as bad:
            return str(bad)
        except RecursionError:
            return f"returned a value that is nested more than {_DEPTH} levels deep"
        except BaseException as error:  # of an object whose own methods fail
            if self._interrupts.seen:
                raise
            return f"returned a value that can't be read: {described(error, self._file)}"

    def _outputs(
        self, result: Any, record: str, changes: str | None, exact: bool
    ) -> Sequence[Output]:
        if result is None:
            return ()
        if isinstance(result, dict):
            return (self._output(result, "", record, changes, exact),)
        if not isinstance(result, list | tuple):
            raise _BadValueError(
                f"returned {kind(result)}: expected a message (a dict), a list of them, or None"
            )
        if len(result) > MOST_MESSAGES:
            raise _BadValueError(
                f"returned {len(result):,} messages: at most {MOST_MESSAGES:,} are taken"
            )
        return [
            self._output(item, f"[{i}]", record, changes, exact) for i, item in enumerate(result)
        ]

    def _output(
        self, message: Any, where: str, record: str, changes: str | None, exact: bool
    ) -> Output:
        if not isinstance(message, dict):
            raise _BadValueError(
                f"returned {kind(message)} at {where}: expected a message (a dict)"
            )
        new = message.get("record")
        if not isinstance(new, dict):
            at = f"{where}.record".lstrip(".")
            found = "returned a message without record" if new is None else f"{at} is {kind(new)}"
            raise _BadValueError(f"{found}: expected a dict")
        if unknown := message.keys() - _FIELDS:
            raise _BadValueError(
                f"returned a message with {min(map(str, unknown))!r}: expected record, changes, "
                "action and metadata"
            )
        prefix = f"{where}." if where else ""
        text = self._json(new, f"{prefix}record", record if exact else None)
        old = message.get("changes")
        if old is not None and not isinstance(old, dict):
            raise _BadValueError(f"{prefix}changes is {kind(old)}: expected a dict or None")
        changed = "null"
        if old is not None:
            changed = self._json(old, f"{prefix}changes", changes)
        action = message.get("action")
        if action is not None and (problem := known_action(action)):
            raise _BadValueError(f"{prefix}{problem}")
        return Output(text, changed, action, self._extras(message.get("metadata"), prefix))

    def _extras(self, metadata: Any, prefix: str) -> str | None:
        if metadata is None:
            return None
        if not isinstance(metadata, dict):
            raise _BadValueError(f"{prefix}metadata is {kind(metadata)}: expected a dict")
        if metadata.keys() <= _CAPTURED:
            return None
        extras = {name: value for name, value in metadata.items() if name not in _CAPTURED}
        return self._json(extras, f"{prefix}metadata", None)

    def _json(self, value: dict[Any, Any], path: str, before: str | None) -> str:
        """Return the JSON of a dict, with the text of those fields that `before` has too."""
        _check(value, path, 0)
        try:
            text: bytes = self._encode(value)
        except UnicodeEncodeError:
            raise _BadValueError(
                f"{_surrogate(value, path)} is text with half a surrogate pair"
            ) from None
        if before is not None:
            text = self._values.restored(before, text)
        return text.decode()


def _check(value: Any, path: str, depth: int) -> None:
    """Raise `_BadValueError` naming the first value that JSON lacks."""
    if depth > _DEPTH:
        raise _BadValueError(f"{path[:200]} is nested more than {_DEPTH} levels deep")
    if isinstance(value, dict):
        for name, item in value.items():
            if type(name) is not str:
                raise _BadValueError(f"{path} has the key {name!r:.40}: expected text")
            if type(item) not in _PLAIN:
                _check(item, f"{path}.{name}", depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            if type(item) not in _PLAIN:
                _check(item, f"{path}[{i}]", depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _BadValueError(f"{path} is {value}, which JSON lacks: make it text, or None")
    elif type(value) not in _PLAIN and not isinstance(value, _AS_TEXT):
        raise _BadValueError(
            f"{path} is {kind(value)}: expected text, a number, true or false, None, a dict or list"
        )


def _surrogate(value: Any, path: str) -> str:
    """Return where the text is that UTF-8 has no form for."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        if any(not _encodable(name) for name in value):
            return f"a key of {path}"
        items = [(f"{path}.{name}", item) for name, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    for where, item in items:
        if isinstance(item, str):
            if not _encodable(item):
                return where
        elif (found := _surrogate(item, where)) != where:
            return found
    return path


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
