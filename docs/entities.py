"""Writes docs/reference/entities.md from the models that validate the configuration: `make docs`."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from penstock.config.models import ENTITIES, SECTIONS

PAGE: Final = Path(__file__).parent / "reference" / "entities.md"
_INTRO: Final = """\
# Entities

Every key of every entity, as the file, `penstock plan` and the management API take them. This page is
made from the models that validate them, by `make docs`. [Configuration](configuration.md) explains how
they work together; it also has `store`, `spark` and sources of type `outbox`, which are settings of a
process and no entities.

In any string `${VAR}` names an environment variable, `${VAR:-default}` with a default, and `$${` is a
plain `${`. The store keeps the name; each process fills it from its own environment. What keys marked
*secret* hold is masked wherever it is shown, as are logins in a `url`; `penstock export` writes a
variable in its place.
"""
_MEANINGS: Final[Mapping[str, str]] = {
    "type": "which type of its kind it is",
    "source": "the source that it takes from",
    "sink.tables": "patterns of tables, each covered by those of the source; all of the source if unset",
    "source.tables": "what is captured: `schema.table`, or `schema.*` for every table of a schema",
    "slot": "the replication slot; made if missing",
    "publication": "the publication; made if missing, completed if it lacks tables",
    "source.url": "libpq URI or connection string",
    "group_by": "columns that make the unit of order; the primary key if unset",
    "subject": "subject template; in kind rows without `{action}` if unset",
    "retention": "how long messages are kept; kind rows keeps the newest of each row for ever",
    "actions": "which changes are sent",
    "transform": "how messages are changed, [below](#transform)",
    "user": "login, with `password`",
    "password": "login, with `user`",
    "token": "login by a token",
    "credentials_file": "login by a file of NATS credentials",
    "tls_ca_cert": "file of the authorities that are trusted, instead of the system's",
    "tls_cert": "file of the client's certificate, with `tls_key`",
    "tls_key": "file of the client's key, with `tls_cert`",
    "consumer.stream": "the stream that it reads",
    "ack_wait_ms": "milliseconds until a message that is not acked is delivered again",
    "max_deliver": "how often a message is delivered before it is a dead letter; -1 for ever",
    "max_ack_pending": "how many messages may be out at once",
    "max_waiting": "how many receives may wait at once",
    "deliver_policy": "where a new consumer starts: `all` at the beginning, `new` at the end, `last`"
    " with the last message, `1h` so long ago",
    "NatsConsumer.deliver_policy": "where a new consumer starts: `all` at the beginning, `new` at the"
    " end",
    "filters": "which messages it gets, [below](#filters)",
    "consumer.url": "where messages are sent",
    "headers": "headers of each request; their values are secret",
    "timeout_ms": "milliseconds that an answer may take",
    "concurrency": "how many requests are under way at once",
    "batch": "whether a request carries several messages",
    "consumer.batch_size": "how many messages a request carries at most",
    "NatsConsumer.batch_size": "how many messages of one group go at once to a stream that takes atomic "
    "batches; 1 is none",
    "NatsConsumer.deletes": "of a stream of kind rows: whether hard deletes are published",
    "NatsConsumer.subject": "subject template; that of a NATS sink of the stream's kind if unset",
    "NatsConsumer.url": "servers of one cluster, separated by commas, `nats://` or `tls://`",
    "secrets": "Standard Webhooks secrets, two while one takes the other's place",
    "allow_private": "whether the URL may be an address of a private network",
    "target": "the name of a target, in place of `url` and what belongs to it",
    "consumer.path": "what comes behind the URL of the target",
    "bastion": "the SSH server that it lies behind, [below](#bastion)",
    "host": "its name or address",
    "port": "its port",
    "sql": "a condition in SQL, as a sink's `filter` has it",
    "storage": "where the stream keeps its messages",
    "max_msgs_per_subject": "how many messages of a subject it keeps; -1 for no limit",
    "max_age": "how long it keeps a message",
    "max_bytes": "how many bytes it keeps; -1 for no limit",
    "max_msgs": "how many messages it keeps; -1 for no limit",
    "discard": "what goes where a limit is reached",
    "duplicate_window": "for how long it recognises a message that comes again",
    "replicas": "how many servers of the cluster keep it",
    "python": "`package.module:function`, importable where Spark's executors run",
    "when": "a condition; a rule without one matches everything, and is the last",
    "to": "the template of the route",
    "table": "`schema.table`, `schema.*`, a table's name, or `*`",
    "collection_id": "the same as `table`: the id of a sync's collection",
    "resource_id": "the schema of a database, or the id of a sync",
    "Filters.sync_id": "the same as `resource_id`",
    "Filters.provider": "the provider of a sync",
    "action": "`insert`, `update`, `delete`, `read`, or `*`",
}
"""What keys mean where the models don't say it, or not for users: by `Model.key`, `kind.key`, `key`."""
_REFUSED: Final = {"NatsConsumer": ("kind", "group_by")}
"""Keys that a model has and refuses."""
_DEFAULTS: Final = {
    "source.slot": "`penstock_<source>`",
    "source.publication": "`penstock_<source>`",
}
"""Defaults that follow from something else."""
_VALUES: Final = {"lua": "text, or `{file: path}`"}
_TITLES: Final = {
    "TransformSettings": "transform",
    "RouteRule": "Rules of a route",
    "Filters": "filters",
    "BastionSettings": "bastion",
    "JetStreamSettings": "stream_config",
}
_FIRST: Final = ("type", "source", "stream")
_DURATION: Final = re.compile(r"P(?:(\d+)D)?T?(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?")


def page() -> str:
    """Return the page's text."""
    parts = [_INTRO]
    nested: dict[str, type[BaseModel]] = {}
    for kind, models in ENTITIES.items():
        parts.append(f"## {SECTIONS[kind].capitalize()}\n")
        for name, model in models.items():
            parts.append(f"### `{kind}` of `type: {name}`\n\n{_about(model)}\n")
            parts.append(_table(kind, model))
            nested |= {inner.__name__: inner for inner in _inner(model)}
    parts.append("## Parts of entities\n")
    for name, model in sorted(nested.items()):
        parts.append(f"### {_TITLES.get(name, name)}\n\n{_about(model)}\n")
        parts.append(_table("", model))
    return "\n".join(parts)


def _about(model: type[BaseModel]) -> str:
    return inspect.cleandoc(model.__doc__ or "")


def _table(kind: str, model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    documented = _docstrings(model)
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    keys = [key for key in _FIRST if key in schema.get("required", ()) or key == "type"]
    keys = [key for key in keys if key in schema["properties"]]
    refused = _REFUSED.get(model.__name__, ())
    keys += [key for key in schema["properties"] if key not in (*keys, *refused)]
    for key in keys:
        of = schema["properties"][key]
        names = (f"{model.__name__}.{key}", f"{kind}.{key}", key)
        meaning = next((_MEANINGS[n] for n in names if n in _MEANINGS), documented.get(key, ""))
        required = key in schema.get("required", ())
        default = "must be given" if required else _DEFAULTS.get(f"{kind}.{key}", _default(of))
        value = _VALUES.get(key, _value(of, schema))
        cells = (f"`{key}`", value, default, " ".join(meaning.split()).removesuffix("."))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _default(of: Mapping[str, Any]) -> str:
    value = of.get("default")
    if value is None:
        return "none"
    if isinstance(value, dict | list) and (not value or isinstance(value, dict)):
        return "none"
    if of.get("format") == "duration" or "duration" in str(of.get("anyOf", "")):
        return f"`{_duration(str(value))}`"
    text = TypeAdapter(Any).dump_json(value).decode()
    return f"`{text.strip(chr(34))}`" if isinstance(value, str) else f"`{text}`"


def _duration(text: str) -> str:
    match = _DURATION.fullmatch(text)
    parts = zip(match.groups() if match else (), "dhms", strict=False)
    return "".join(f"{count}{unit}" for count, unit in parts if count) or text


def _value(of: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return what a key takes, in words."""
    if "$ref" in of:
        return "keys"
    if "anyOf" in of or "oneOf" in of:
        options = [o for o in of.get("anyOf", of.get("oneOf")) if o.get("type") != "null"]
        return " or ".join(dict.fromkeys(_value(option, schema) for option in options))
    if "const" in of:
        return f"`{of['const']}`"
    if "enum" in of:
        return " or ".join(f"`{value}`" for value in of["enum"])
    if of.get("format") == "password":
        return "text, *secret*"
    if of.get("format") == "duration":
        return "duration: `90s`, `30m`, `12h`, `7d`"
    if of.get("format") == "path":
        return "path of a file"
    kind = of.get("type")
    if kind == "array":
        items = of.get("items", {})
        what = "rules" if "$ref" in items else _value(items, schema)
        return f"list of {what}"
    if kind == "object":
        return "texts by name, *secret*"
    if kind in ("integer", "number"):
        return _range("whole number" if kind == "integer" else "number", of)
    return {"boolean": "`true` or `false`", "string": "text"}.get(str(kind), "any")


def _range(what: str, of: Mapping[str, Any]) -> str:
    low, high = of.get("minimum"), of.get("maximum")
    if "exclusiveMinimum" in of:
        low = f"more than {of['exclusiveMinimum']:g}"
    if low is None or high is None:
        return what
    return f"{what}, {low if isinstance(low, str) else f'{low:,}'} to {high:,}"


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings that stand under a model's fields, those of its bases too."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or not cls.__module__.startswith("penstock."):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for field, after in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[field.target.id] = str(after.value.value)
    return found


def _inner(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the models whose keys stand inside a model's."""
    names = model.model_json_schema().get("$defs", {})
    for field in model.model_fields.values():
        yield from (inner for inner in _models(field.annotation) if inner.__name__ in names)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models(part)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
