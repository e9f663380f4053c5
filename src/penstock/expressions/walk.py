"""Follows a path into a value's JSON text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from penstock.core.json_members import Members

Json = msgspec.Raw | bytes
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])


class Walk:
    """Follows a path into JSON: keys, and indexes from 0."""

    def __init__(self, path: Iterable[str | int]) -> None:
        self._steps = list(map(_step, path))

    def __call__(self, raw: Json) -> Json | None:
        """Return what the path leads to, None where it leads nowhere; raises one of `UNREADABLE`."""
        at: Json | None = raw
        for step in self._steps:
            if at is None:
                return None
            at = step(at)
        return at


def _step(step: str | int) -> Callable[[Json], Json | None]:
    """Return what takes an element of a list, or a member of an object: None where there is none."""
    if isinstance(step, int):

        def element(raw: Json) -> Json | None:
            try:
                values = _LIST.decode(raw)
            except msgspec.ValidationError:
                return None
            return values[step] if step < len(values) else None

        return element
    try:
        shape = msgspec.defstruct(
            "Member", [("m", msgspec.Raw, None)], rename={"m": step}, gc=False
        )
    except ValueError:  # a name with a quote in it
        return lambda raw: Members((step,))(bytes(raw))[step]
    decode = msgspec.json.Decoder(shape).decode

    def member(raw: Json) -> Json | None:
        try:
            found: Json | None = decode(raw).m  # type: ignore[attr-defined]  # of a struct made above
        except msgspec.ValidationError:
            return None
        return found

    return member
