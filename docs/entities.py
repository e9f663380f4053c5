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

import yaml
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
_WORDS: Final = yaml.safe_load(
    (Path(__file__).parent / "meanings.yaml").read_text(encoding="utf-8")
)
_MEANINGS: Final[Mapping[str, str]] = _WORDS["meanings"]
_TITLES: Final[Mapping[str, str]] = _WORDS["titles"]
_REFUSED: Final = {"NatsConsumer": ("kind", "group_by")}
"""Keys that a model has and refuses."""
_DEFAULTS: Final = {
    "source.slot": "`penstock_<source>`",
    "source.publication": "`penstock_<source>`",
}
"""Defaults that follow from something else."""
_VALUES: Final = dict.fromkeys(("lua", "manifest"), "text, or `{file: path}`")
_HIDDEN: Final = ("Code",)
"""Models whose keys users don't write."""
_FIRST: Final = ("type", "source", "stream")
_ATTRIBUTE: Final = re.compile(r"^(?P<name>\w+): (?P<text>.*(?:\n +.*)*)", re.MULTILINE)
_DURATION: Final = re.compile(r"P(?:(\d+)D)?T?(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?")


def page() -> str:
    """Return the page's text."""
    parts = [_INTRO]
    nested: dict[str, type[BaseModel]] = {}
    for kind, models in ENTITIES.items():
        parts.append(f"## {SECTIONS[kind].capitalize()}\n")
        for name, model in models.items():
            of_type = f" of `type: {name}`" if name else ""
            parts.append(f"### `{kind}`{of_type}\n\n{_about(model)}\n")
            parts.append(_table(kind, model))
            nested |= {inner.__name__: inner for inner in _inner(model)}
    parts.append("## Parts of entities\n")
    for name, model in sorted(nested.items()):
        parts.append(f"### {_TITLES.get(name, name)}\n\n{_about(model)}\n")
        parts.append(_table("", model))
    return "\n".join(parts)


def _about(model: type[BaseModel]) -> str:
    return _split(model)[0]


def _split(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """Return a model's docstring without its list of attributes, and these."""
    about, _, listed = inspect.cleandoc(model.__doc__ or "").partition("\n\nAttributes:\n")
    found: dict[str, str] = {}
    for match in _ATTRIBUTE.finditer(textwrap.dedent(listed)):
        found[match["name"]] = " ".join(match["text"].split())
    return about, found


def _table(kind: str, model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    documented = _docstrings(model)
    aliases = {field.alias: name for name, field in model.model_fields.items() if field.alias}
    documented |= {alias: documented.get(name, "") for alias, name in aliases.items()}
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
    if value is None or value == "":
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
        return _by_name(of.get("additionalProperties", True))
    if kind in ("integer", "number"):
        return _range("whole number" if kind == "integer" else "number", of)
    return {"boolean": "`true` or `false`", "string": "text"}.get(str(kind), "any")


def _by_name(value: Any) -> str:
    """Return what an object takes whose keys are names."""
    if not isinstance(value, Mapping) or not value:
        return "values by name"
    if "$ref" in value:
        return "keys by name"
    return "texts by name, *secret*" if value.get("format") == "password" else "texts by name"


def _range(what: str, of: Mapping[str, Any]) -> str:
    low, high = of.get("minimum"), of.get("maximum")
    if "exclusiveMinimum" in of:
        low = f"more than {of['exclusiveMinimum']:g}"
    if low is None or high is None:
        return what
    return f"{what}, {low if isinstance(low, str) else f'{low:,}'} to {high:,}"


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings that stand under a model's fields, those of its bases too."""
    found: dict[str, str] = _split(model)[1]
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
    """Yield the models whose keys stand inside a model's, at any depth."""
    names = model.model_json_schema().get("$defs", {})
    for field in model.model_fields.values():
        for inner in _models(field.annotation):
            if inner.__name__ in names and inner.__name__ not in _HIDDEN:
                yield inner
                yield from _inner(inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models(part)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
