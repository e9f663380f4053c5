"""JSON objects whose fields keep their text where the operator's code has left their values alone.

Imports nothing of ours and nothing large: the Lua helper loads it too.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

Raw = msgspec.Raw
decode_raw: Final = msgspec.json.Decoder(dict[str, Raw]).decode
"""Returns an object's fields, each with its text."""
encode: Final = msgspec.json.Encoder().encode


UNREADABLE: Final = (RecursionError, msgspec.MsgspecError)
"""What decoding a message raises: Postgres' json takes some texts that its jsonb, and others, don't."""


def unreadable(error: Exception) -> str:
    """Return the reason in an error of `UNREADABLE`."""
    if isinstance(error, RecursionError):
        return "the message is nested too deep to be read"
    return f"the message has JSON that can't be read: {error}"


def same_value(one: Any, other: Any) -> bool:
    """Return whether two decoded values are equal; numbers by the double that they come to."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(v, other[k]) for k, v in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    # The types themselves: true is an int to Python.
    if type(one) in (int, float) and type(other) in (int, float):
        return bool(one == other) or as_float(one) == as_float(other)
    return type(one) is type(other) and bool(one == other)


def as_float(number: float) -> float:
    """Return the nearest double, infinity where there is none."""
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


class Values:
    """Decodes values, and finds numbers that a double may spell otherwise."""

    def __init__(self) -> None:
        self.floats = False
        """Whether a number with a point or an exponent was read since this was last set to False."""
        self.decode: Final = msgspec.json.Decoder(float_hook=self._float).decode
        """Returns the value of a text; a number beyond a double's range is infinite.

        Raises `RecursionError` for what is nested some hundred levels deep.
        """

    def same(self, one: Raw, other: Raw) -> bool:
        """Return whether two texts have the same value."""
        return bytes(one) == bytes(other) or same_value(self.decode(one), self.decode(other))

    def _float(self, text: str) -> float:
        self.floats = True
        return float(text)

    def restored(self, before: str, after: bytes) -> bytes:
        """Return the object `after`, with the text of each field whose value `before` has too."""
        old, new = decode_raw(before), decode_raw(after)
        changed = False
        for name, value in new.items():
            was = old.get(name)
            if was is not None and bytes(was) != bytes(value) and self.same(was, value):
                new[name] = was
                changed = True
        return encode(new) if changed else after

    def merged(self, before: str, fields: str | None, dropped: str | None) -> str | None:
        """Return the object `before` with `fields` set, and those dropped that an array names.

        None where nothing differs then. A nested value that is the same keeps its text.
        """
        if fields is None and dropped is None:
            return None
        known = decode_raw(before)
        changed = False
        for name in self.decode(dropped) if dropped else ():
            changed |= known.pop(name, None) is not None
        for name, value in decode_raw(fields).items() if fields else ():
            was = known.get(name)
            if was is None or bytes(was)[:1] not in (b"{", b"[") or not self.same(was, value):
                known[name] = value
                changed = True
        return encode(known).decode() if changed else None
