"""Subject templates: `shop.{schema}.{table}.{action}` and a message give the message's subject.

Variables: `{source}` `{database}` `{schema}` `{table}` `{action}` `{key}` (the row's primary key) and
`{record.<column>}`. A value is escaped so that it is always exactly one part of one token, and so that
two different values never give the same text, see `penstock.core.subject_token`.

`{record.<column>|dots}` keeps the dots of a value: it gives a token for each part between them, and
each is escaped by the same rules. Two different values still never give the same text.

The records and events of API syncs also have `{sync_id}` `{provider}` `{collection_id}` `{upstream_id}`
and, of events, `{event_type}`.

The messages of an outbox have variables of their own, `{stream_table}` (the outbox), `{op}` (what the
publisher gave, by default `insert`), `{outbox_id}`, `{payload.<field>}` and `{header.<name>}`, and the
same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.json_members import members, text_of
from penstock.core.message import INSERT
from penstock.core.subject_token import escape, escape_parts, few_keys, keys

DEFAULT_SUBJECT: Final = "{source}.{schema}.{table}.{action}"
ROWS_SUBJECT: Final = "{source}.{schema}.{table}"
MAX_SUBJECT_BYTES: Final = 3900
"""The server reads at most 4,096 bytes of `HPUB <subject> <reply> <sizes>`; this leaves room."""

SUBJECT_RULES: Final = (
    "no token may be empty or have a blank, a control character, '*' or '>',"
    " and the first may not begin with '$'"
)
_SUBJECT: Final = r"^[^\x00-\x20\x7f.*>$][^\x00-\x20\x7f.*>]*(?:\.[^\x00-\x20\x7f.*>]+)*$"

_VARIABLES: Final = ("source", "database", "schema", "table", "action", "key")
KEY: Final = "key"
_OUTBOX_NAME: Final = "stream_table"
_OF_OUTBOX: Final = ("outbox_id", "op")
_DOTS: Final = "|dots"
OUTBOX_VARIABLES: Final = "{stream_table} {op} {outbox_id} {payload.<field>} {header.<name>}"
_MEMBERS: Final = {"payload": "payload", "header": "headers"}
PER_ROW: Final = {
    "schema": "table_schema", "table": "table_name", "action": "action",
    "sync_id": "table_schema", "collection_id": "table_name",
}  # fmt: skip
"""The variables that are a column of a message."""
OF_RECORD: Final = ("provider", "upstream_id", "event_type")
"""The variables of syncs that are members of a record, or of an event."""
OF_SYNCS: Final = ("sync_id", "provider", "collection_id", "upstream_id", "event_type")
"""The variables that only messages of syncs have."""
SYNC_VARIABLES: Final = " ".join(f"{{{name}}}" for name in OF_SYNCS)
_SEPARATOR: Final = pa.scalar("\0", pa.string())
_EMPTY_TEXT: Final = pa.scalar("", pa.string())
_NO_BYTES: Final = pa.scalar(b"", pa.binary())
_UNSAFE_LITERAL: Final = re.compile(r"[\x00-\x20\x7f*>]")
_NAMES: Final = {" ": "a blank", "\t": "a tab", "\n": "a line end", "\r": "a line end"}


def is_subject(column: pa.Array) -> pa.Array:
    """Return of each text (UTF-8 as binary) whether it is a subject to publish to, whatever its size."""
    return pc.match_substring_regex(column, _SUBJECT)


def covers(pattern: str, subject: str) -> bool:
    """Return whether a pattern takes all that `subject` (wildcards allowed) stands for."""
    have, other = pattern.split("."), subject.split(".")
    for i, part in enumerate(have):
        if part == ">":
            return len(other) > i
        if i >= len(other) or other[i] == ">" or part not in ("*", other[i]):
            return False
    return len(have) == len(other)


def overlaps(one: str, other: str) -> bool:
    """Return whether there is a subject that both patterns take."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)


@dataclass(frozen=True, slots=True)
class SubjectTemplate:
    """A template that was read: literal parts and variables in turn.

    `literals` has one more element than `variables`; `literals[i]` stands before `variables[i]`.
    """

    text: str
    literals: tuple[str, ...]
    variables: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, *, outbox: str | None = None) -> SubjectTemplate:
        """Read a template; raises `ValueError` that names the position of what is wrong.

        With `outbox`, the name of one, the variables are those of its messages.
        """
        literals, variables = [""], list[str]()
        at = 0
        while at < len(text):
            char = text[at]
            if char == "{":
                end = text.find("}", at)
                if end < 0:
                    raise _wrong(text, at, "'{' without its '}'")
                name = text[at + 1 : end]
                at = end + 1
                if outbox is not None and name == _OUTBOX_NAME:
                    literals[-1] += escape(outbox)
                    continue
                variables.append(_variable(text, at - len(name) - 2, name, outbox is not None))
                literals.append("")
                continue
            if char == "}":
                raise _wrong(text, at, "'}' without its '{'")
            if _UNSAFE_LITERAL.match(char):
                reason = " (a wildcard, and a message goes to one subject)" * (char in "*>")
                raise _wrong(text, at, f"{named(char)} is not allowed{reason}")
            literals[-1] += char
            at += 1
        _check_tokens(text)
        return cls(text, tuple(literals), tuple(variables))

    @property
    def record_columns(self) -> tuple[str, ...]:
        """The columns that `{record.<column>}` names, each once."""
        return tuple(dict.fromkeys(_member(v)[1] for v in self.variables if v[:7] == "record."))

    @property
    def of_syncs(self) -> tuple[str, ...]:
        """The variables that only messages of syncs have, each once."""
        return tuple(dict.fromkeys(v for v in self.variables if v in OF_SYNCS))

    @property
    def _members(self) -> tuple[str, ...]:
        """The members of a record that the variables name, each once."""
        return tuple(dict.fromkeys(_member(v)[1] for v in self.variables if _is_member(v)))

    def wildcard(self, source: str | None = None) -> str:
        """Return the subject filter that covers all that this template can give.

        A token that holds a variable becomes `*`; `{source}` is known if `source` is given. From a
        variable that keeps its dots on there may be any number of tokens: `>`.
        """
        parts = [self.literals[0]]
        for variable, literal in zip(self.variables, self.literals[1:], strict=True):
            if variable.endswith(_DOTS):
                before = "".join(parts).split(".")[:-1]
                return ".".join([*("*" if "\0" in token else token for token in before), ">"])
            known = variable == "source" and source is not None
            parts += [escape(source) if known else "\0", literal]
        return ".".join("*" if "\0" in token else token for token in "".join(parts).split("."))

    def render(self, batch: pa.RecordBatch, *, source: str, database: str | None) -> pa.Array:
        """Return the subject of each row of a batch of `WIRE_SCHEMA`, as a binary array.

        Rows that share schema, table and action share a subject unless `{key}` or `{record.<column>}`
        is used, so without these the work is done once a combination.
        """
        if not batch.num_rows:
            return pa.array([], pa.binary())
        if any(v in _OF_OUTBOX or v.partition(".")[0] in _MEMBERS for v in self.variables):
            return self._render_outbox(batch)
        fixed = {"source": escape(source), "database": escape(database)}
        if self._members:
            return pa.array(self._subjects(batch, fixed), pa.binary())
        if KEY in self.variables:
            key = keys(batch).cast(pa.binary())
            around = [each._render_fixed(batch, fixed) for each in self._split_by(KEY)]
            pieces = [piece for each in around for piece in (key, each)][1:]
            return pc.binary_join_element_wise(*pieces, _NO_BYTES)
        found = self._render_fixed(batch, fixed)
        return pa.repeat(found, batch.num_rows) if isinstance(found, pa.Scalar) else found

    def _split_by(self, variable: str) -> list[SubjectTemplate]:
        """Return the templates that stand before, between and behind a variable."""
        found, first = [], 0
        for at, each in enumerate((*self.variables, variable)):
            if each == variable:
                names = self.variables[first:at]
                found.append(SubjectTemplate(self.text, self.literals[first : at + 1], names))
                first = at + 1
        return found

    def _render_fixed(self, batch: pa.RecordBatch, fixed: dict[str, str]) -> pa.Array | pa.Scalar:
        """Return what only schema, table and action differ in, once a combination of these."""
        names = [n for n in PER_ROW if n in self.variables]
        if not names:
            return pa.scalar(self._fill(fixed).encode(), pa.binary())
        columns = [pc.fill_null(batch.column(PER_ROW[n]), _EMPTY_TEXT) for n in names]
        # A schema's or table's name cannot hold NUL in Postgres, so it is a safe separator.
        found = pc.binary_join_element_wise(*columns, _SEPARATOR).dictionary_encode()
        subjects = [
            self._fill(fixed | dict(zip(names, map(escape, key.split("\0")), strict=True))).encode()
            for key in found.dictionary.to_pylist()
        ]
        return pa.array(subjects, pa.binary()).take(found.indices)

    def render_few(
        self, batch: pa.RecordBatch, *, source: str, database: str | None
    ) -> list[bytes]:
        """Return what `render` does, of a few rows that are no outbox's."""
        return self._subjects(batch, {"source": escape(source), "database": escape(database)})

    def _subjects(self, batch: pa.RecordBatch, fixed: dict[str, str]) -> list[bytes]:
        read = members(*self._members)
        of_record = [(v, *_member(v)[1:]) for v in self.variables if _is_member(v)]
        named = [(n, c) for n, c in PER_ROW.items() if n in self.variables]
        per_row = [(n, batch.column(c).to_pylist()) for n, c in named]
        cache: dict[str, str] = {}  # names and actions repeat; values of records need not
        records = batch.column("record").to_pylist() if of_record else [None] * batch.num_rows
        row_keys = few_keys(batch) if KEY in self.variables else []
        subjects: list[bytes] = []
        for row, text in enumerate(records):
            record = read(text) if of_record else {}
            values = dict(fixed)
            if row_keys:
                values[KEY] = row_keys[row]
            for name, column in per_row:
                value = column[row] or ""
                values[name] = cache.get(value) or cache.setdefault(value, escape(value))
            for variable, column, escaped in of_record:
                values[variable] = escaped(text_of(record[column]))
            subjects.append(self._fill(values).encode())
        return subjects

    def _render_outbox(self, batch: pa.RecordBatch) -> pa.Array:
        records = batch.column("record")
        # Few publishers give an operation: without any, `{op}` is the same in all.
        has_op = "op" in self.variables and pc.any(pc.match_substring(records, '"op"')).as_py()
        if not has_op and set(self.variables) == {"op"}:
            subject = self._fill({"op": INSERT}).encode()
            return pa.repeat(pa.scalar(subject, pa.binary()), batch.num_rows)
        read = members("id", "payload", "headers")
        named = {
            column: [(v, *_member(v)[1:]) for v in self.variables if v.startswith(f"{prefix}.")]
            for prefix, column in _MEMBERS.items()
        }
        if has_op:
            named["headers"].append(("op", "op", escape))
        readers = {
            column: members(*(name for _, name, _ in found))
            for column, found in named.items()
            if found
        }
        subjects: list[bytes] = []
        for text in records.to_pylist():
            record = read(text)
            values = {"op": INSERT, "outbox_id": escape(text_of(record["id"]))}
            for column, reader in readers.items():
                found = reader(record[column])
                for variable, name, escaped in named[column]:
                    value = text_of(found[name])
                    if variable != "op" or value:
                        values[variable] = escaped(value)
            subjects.append(self._fill(values).encode())
        return pa.array(subjects, pa.binary())

    def _fill(self, values: dict[str, str]) -> str:
        parts = [self.literals[0]]
        for variable, literal in zip(self.variables, self.literals[1:], strict=True):
            parts += [values[variable], literal]
        return "".join(parts)


def named(char: str) -> str:
    """Return what a message calls a character that is not allowed somewhere."""
    if (name := _NAMES.get(char)) is not None:
        return name
    return repr(char) if char.isprintable() else f"the control character U+{ord(char):04X}"


def _member(variable: str) -> tuple[str, str, Callable[[Any], str]]:
    """Return of `record.<column>` and its like the prefix, the name, and what escapes a value."""
    if variable in OF_RECORD:
        return "record", variable, escape
    prefix, _, name = variable.partition(".")
    if name.endswith(_DOTS):
        return prefix, name.removesuffix(_DOTS), escape_parts
    return prefix, name, escape


def _is_member(variable: str) -> bool:
    return variable.startswith("record.") or variable in OF_RECORD


def _variable(text: str, at: int, name: str, of_outbox: bool) -> str:
    plain = name.removesuffix(_DOTS)
    prefix, _, rest = plain.partition(".")
    if prefix in (_MEMBERS if of_outbox else ("record",)) and rest:
        return name
    if plain in (_OF_OUTBOX if of_outbox else (*_VARIABLES, *OF_SYNCS)):
        if plain == name:
            return name
        raise _wrong(text, at, f"{{{plain}}} is one token: leave {_DOTS} out")
    if of_outbox:
        raise _wrong(text, at, f"unknown variable {{{name}}}; known are {OUTBOX_VARIABLES}")
    known = " ".join(f"{{{v}}}" for v in _VARIABLES)
    raise _wrong(
        text,
        at,
        f"unknown variable {{{name}}}; known are {known} {{record.<column>}}, and"
        f" of syncs {SYNC_VARIABLES}",
    )


def _check_tokens(text: str) -> None:
    if not text:
        raise _wrong(text, 0, "it is empty")
    if text.startswith("$"):
        raise _wrong(text, 0, "subjects that start with '$' belong to the server")
    # A column's name may hold dots, and what stands in braces is one piece anyway.
    plain = re.sub(r"\{[^}]*\}", lambda found: "v" * len(found.group()), text)
    if plain.startswith("."):
        raise _wrong(text, 0, "the token before '.' is empty")
    if plain.endswith("."):
        raise _wrong(text, len(text) - 1, "the token after '.' is empty")
    if (at := plain.find("..")) >= 0:
        raise _wrong(text, at + 1, "the token between two '.' is empty")


def _wrong(text: str, at: int, what: str) -> ValueError:
    return ValueError(f"subject template {text!r}, position {at}: {what}")
