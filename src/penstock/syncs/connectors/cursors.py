"""Cursors: the times and numbers by which collections are polled, in the forms of their APIs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Final

Value = datetime | Decimal
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SERVICENOW: Final = "%Y-%m-%d %H:%M:%S"
_SECOND: Final = timedelta(seconds=1)
_UNITS: Final = {"unix": _SECOND, "unix_ms": timedelta(milliseconds=1)}


@dataclass(frozen=True, slots=True)
class CursorFormat:
    """Reads and writes cursors of one format: see `config.providers.Incremental`."""

    name: str

    @property
    def is_time(self) -> bool:
        """Whether the cursor is a time."""
        return self.name != "number"

    def parse(self, text: str) -> Value:
        """Return what a text stands for; raises `ValueError`."""
        if self.name in {"iso8601", "servicenow"}:
            try:
                found = datetime.fromisoformat(text.strip())
            except ValueError:
                raise ValueError(f"{text[:40]!r} is no time") from None
            return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
        unit = _UNITS.get(self.name)
        try:
            if unit is not None and text.isdecimal() and text.isascii():
                return _EPOCH + int(text) * unit
            number = Decimal(text)
            if not number.is_finite():
                raise InvalidOperation
            if self.name == "number":
                return number
            seconds = number / 1000 if self.name == "unix_ms" else number
            return _EPOCH + timedelta(microseconds=int(seconds * 1_000_000))
        except (InvalidOperation, OverflowError):
            raise ValueError(
                f"{text[:40]!r} is no {'number' if not self.is_time else 'time'}"
            ) from None

    def write(self, value: Value) -> str:
        """Return a value as the API has it, a time in whole seconds, or ms where it counts those."""
        if isinstance(value, Decimal):
            return f"{value:f}"
        if self.name == "servicenow":
            return value.strftime(_SERVICENOW)
        if self.name == "unix":
            return str((value - _EPOCH) // _SECOND)
        if self.name == "unix_ms":
            return str((value - _EPOCH) // timedelta(milliseconds=1))
        return value.isoformat(timespec="seconds").replace("+00:00", "Z")

    def back(self, text: str, overlap: timedelta) -> str:
        """Return the cursor that stands `overlap` before `text`; numbers have no overlap."""
        value = self.parse(text)
        if isinstance(value, Decimal):
            return text
        try:
            return self.write(value - overlap)
        except OverflowError:
            return text

    def just_before(self, text: str) -> str:
        """Return a cursor below `text`, by which an API gives what has `text` itself in any case."""
        value = self.parse(text)
        if isinstance(value, Decimal):
            return self.write(value.to_integral_value() - 1)
        return self.write(value - _SECOND)

    def capped(self, text: str, until: datetime) -> str:
        """Return the earlier one of a cursor and a time."""
        value = self.parse(text)
        if isinstance(value, datetime) and value > until:
            return self.write(until)
        return text

    def forms(self, text: str) -> dict[str, str]:
        """Return what `{cursor}` and its other forms stand for."""
        value = self.parse(text)
        found = {"cursor": text}
        if isinstance(value, datetime):
            found["cursor_unix"] = CursorFormat("unix").write(value)
            found["cursor_unix_ms"] = CursorFormat("unix_ms").write(value)
            found["cursor_iso"] = CursorFormat("iso8601").write(value)
        return found


_ISO: Final = CursorFormat("iso8601")
_UNIX: Final = CursorFormat("unix")
_UNIX_MS: Final = CursorFormat("unix_ms")


def time_of(value: Value | None) -> datetime | None:
    """Return a cursor's value if it is a time."""
    return value if isinstance(value, datetime) else None


def time_in(text: str | None) -> datetime | None:
    """Return the time that a field has, in whichever form, or None."""
    if text is None:
        return None
    try:
        if text.lstrip("-").replace(".", "", 1).isdigit():
            form = _UNIX_MS if len(text.partition(".")[0]) >= 12 else _UNIX
            return time_of(form.parse(text))
        return time_of(_ISO.parse(text))
    except ValueError:
        return None
