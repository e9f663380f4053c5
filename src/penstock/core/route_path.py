"""Paths that a stream's `route` gives, which webhooks append to their URLs: `orders/{record.id}`.

The variables are those of subjects (`penstock.core.subject`). A value is escaped so that it is always
exactly one part of one segment: what is not plain text in a path, `/` and `%` among it, becomes `%XX`, a
value of dots alone too; an empty string is `%empty`, null (or a column that the message lacks) `%null`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.json_members import Members, text_of
from penstock.core.subject import OF_RECORD, PER_ROW, SubjectTemplate, named
from penstock.core.subject_token import EMPTY, NULL

PATH_RULES: Final = (
    "segments stand between slashes, none is empty, '.' or '..', and none has a blank, a control "
    "character, '?', '#' or a backslash"
)
_PATH: Final = r"^/?[^\x00-\x20\x7f?#\\/]+(?:/[^\x00-\x20\x7f?#\\/]+)*$"
_DOTS: Final = r"(?:^|/)\.{1,2}(?:/|$)"
_UNSAFE: Final = re.compile(r"[\x00-\x20\x7f%/\\?#;]")
_UNSAFE_LITERAL: Final = re.compile(r"[\x00-\x20\x7f?#\\]")
_ONLY_DOTS: Final = re.compile(r"\.+\Z")


def escape(value: str | None) -> str:
    """Return a value as text that is safe inside a segment, by the rules at the top of this file."""
    if value is None:
        return NULL
    if not value:
        return EMPTY
    unsafe = _ONLY_DOTS.match(value)
    return value.replace(".", "%2E") if unsafe else _UNSAFE.sub(_hex, value)


def _hex(found: re.Match[str]) -> str:
    return f"%{ord(found.group()):02X}"


def is_path(column: pa.Array) -> pa.Array:
    """Return of each text whether it is a path that can be appended to a URL."""
    dots = pc.match_substring_regex(column, _DOTS)
    return pc.and_not(pc.match_substring_regex(column, _PATH), dots)


@dataclass(frozen=True, slots=True)
class PathTemplate:
    """A template that was read: literal parts and variables in turn, as in `SubjectTemplate`."""

    text: str
    literals: tuple[str, ...]
    variables: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> PathTemplate:
        """Read a template; raises `ValueError` that names what is wrong."""
        plain = re.sub(r"\{[^}]*\}", lambda found: "v" * len(found.group()), text)
        if (found := _UNSAFE_LITERAL.search(plain)) is not None:
            raise _wrong(text, f"position {found.start()}: {named(found.group())} is not allowed")
        if not is_path(pa.array([plain]))[0].as_py():
            raise _wrong(text, PATH_RULES)
        # What braces hold follows the same rules; all else is plain to a subject once its dots are gone.
        try:
            parts = SubjectTemplate.parse(_braces_only(text))
        except ValueError as error:
            reason = str(error).partition(": ")[2].replace(" {key} ", " ")
            raise _wrong(text, reason) from None
        if dotted := [v for v in parts.variables if v.endswith("|dots")]:
            raise _wrong(text, f"{{{dotted[0]}}}: dots stay as they are in a path: leave |dots out")
        if "key" in parts.variables:
            raise _wrong(
                text, "{key} is for NATS subjects: name the key's columns, {record.<column>}"
            )
        literals = re.split(r"\{[^}]*\}", text)
        return cls(text, tuple(literals), parts.variables)

    @property
    def record_columns(self) -> tuple[str, ...]:
        """The columns that `{record.<column>}` names, each once."""
        named = (v.removeprefix("record.") for v in self.variables if v.startswith("record."))
        return tuple(dict.fromkeys(named))

    def render(self, batch: pa.RecordBatch, *, source: str, database: str | None) -> list[str]:
        """Return the path of each message of a batch of `WIRE_SCHEMA`."""
        values: dict[str, list[str]] = {}
        for variable in self.variables:
            if variable.startswith("record."):
                column = variable.removeprefix("record.")
                values[variable] = [escape(v) for v in _texts(batch.column("record"), column)]
            elif variable in OF_RECORD:
                values[variable] = [escape(v) for v in _texts(batch.column("record"), variable)]
            elif variable in PER_ROW:
                column = PER_ROW[variable]
                values[variable] = [escape(v or "") for v in batch.column(column).to_pylist()]
            else:
                fixed = source if variable == "source" else database
                values[variable] = [escape(fixed)] * batch.num_rows
        columns = [values[variable] for variable in self.variables]
        if not columns:
            return [self.text] * batch.num_rows
        template = "%s".join(literal.replace("%", "%%") for literal in self.literals)
        return [template % row for row in zip(*columns, strict=True)]


def _braces_only(text: str) -> str:
    """Return a subject template with the variables of `text`, and its unmatched braces."""
    return re.sub(r"[^{}](?![^{]*\})", "x", text)


def _texts(records: pa.Array, column: str) -> list[str | None]:
    """Return a column's value of each record: a string as it is, other JSON as its text."""
    members = Members((column,))
    return [text_of(members(record)[column]) for record in records.to_pylist()]


def _wrong(text: str, what: str) -> ValueError:
    return ValueError(f"path template {text!r}: {what}")
