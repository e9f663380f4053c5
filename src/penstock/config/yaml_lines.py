"""YAML to plain values, with the line of every key, and `${VAR}` filled from the environment.

Made for error messages: a mistake is reported by file, line and key. Text of the file is kept out
of the messages, because any of it may be a password that YAML has read as something else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from penstock.config.strict import Untyped
from penstock.core.text import Path

_VARIABLE = re.compile(
    r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-(?P<value>[^}]*))?\}|(?P<bad>\$\{)"
)
_QUOTED = re.compile(r"'(?!<)[^']{2,}'")
_MERGE = "tag:yaml.org,2002:merge"
_STRING = "tag:yaml.org,2002:str"


@dataclass(slots=True)
class Document:
    """What a file holds: its value, the line of each path, what was written, and the mistakes.

    `raw` has the scalars that named a variable as the file has them, so that a message can show
    `${DATABASE_URL}` and not what it stands for. `written` is the whole value as the file has it.
    """

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    raw: dict[Path, str] = field(default_factory=dict)
    problems: list[tuple[int, Path, str]] = field(default_factory=list)

    @property
    def written(self) -> Any:
        """The value with its variables as they stand in the file."""
        return replaced(self.value, self.raw)

    def line(self, path: Path) -> int:
        """Return the line of a path, or of the nearest thing around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def parse(text: str, environ: Mapping[str, str]) -> Document:
    """Read YAML; mistakes are in the document's `problems`, nothing is raised for them."""
    document = Document()
    try:
        node = _compose(text)
        if node is not None:
            document.value = _Builder(document, environ).build(node, ())
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        problem = _QUOTED.sub("'…'", " ".join(filter(None, (e.problem, e.context))))
        if mark and text[mark.index : mark.index + 1] == "\t":
            problem = "a tab indents this line: write blanks instead"
        document.problems.append((mark.line + 1 if mark else 1, (), f"not valid YAML: {problem}"))
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        document.problems.append((line, (), "not valid YAML: a character that YAML does not allow"))
    except RecursionError:
        document.problems.append((1, (), "not valid YAML: nested too deeply"))
    return document


def _compose(text: str) -> yaml.Node | None:
    """Return the node of a text; raises `yaml.YAMLError` and `RecursionError`.

    libyaml reads ten times as fast, and its events alone: its own nodes overflow the stack where they
    are nested deeply. The errors are those of Python's parser.
    """
    if _Composer is not None:
        composer = _Composer(text)
        try:
            node: yaml.Node | None = composer.get_single_node()
            return node
        except yaml.YAMLError:
            pass
        finally:
            composer.dispose()
    return yaml.compose(text, Loader=yaml.SafeLoader)


_Composer: Any = None
with contextlib.suppress(ImportError):
    from yaml._yaml import CParser
    from yaml.composer import Composer
    from yaml.resolver import Resolver

    class _EventComposer(Composer, CParser, Resolver):
        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            Composer.__init__(self)
            Resolver.__init__(self)

    _Composer = _EventComposer


class _Builder:
    def __init__(self, document: Document, environ: Mapping[str, str]):
        self.document = document
        self.environ = environ
        self.scalars = yaml.constructor.SafeConstructor()
        self.open: set[int] = set()

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open:
            self.problem(node, path, "an alias that contains itself")
            return None
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
            return self.mapping(node, path) if isinstance(node, yaml.MappingNode) else None
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        seen: dict[Any, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                merged |= self.merge(value_node, path)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(key_node, path, "a key must be a name, not a list or a mapping")
                continue
            # A key is read as it stands: `on:` and `1:` are names here, not a boolean or a number.
            key = str(key_node.value)
            here = (*path, key)
            if key in seen:
                message = f"this key is there twice, first on line {seen[key]}: remove one"
                self.document.problems.append((line, here, message))
                continue
            seen[key] = line
            self.document.lines[here] = line
            result[key] = self.build(value_node, here)
        return merged | result

    def merge(self, node: yaml.Node, path: Path) -> dict[Any, Any]:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[Any, Any] = {}
        for part in reversed(parts):
            if not isinstance(part, yaml.MappingNode):
                self.problem(part, path, "`<<` takes a mapping, or a list of mappings")
                continue
            value = self.build(part, path)
            merged |= value if isinstance(value, dict) else {}
        return merged

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        if node.tag == _STRING:
            return self.fill(node, path)
        constructor = self.scalars.yaml_constructors.get(node.tag)
        if constructor is None or node.tag.endswith((":timestamp", ":binary")):
            if not node.tag.endswith(":timestamp"):
                message = "YAML reads this value as a tag because of its `!`: put it in quotes"
                self.problem(node, path, message)
                return None
            return str(node.value)
        try:
            return constructor(self.scalars, node)
        except (ValueError, yaml.YAMLError):
            # `0b9` looks like a binary number to YAML's resolver and is none.
            return str(node.value)

    def fill(self, node: yaml.ScalarNode, path: Path) -> str:
        return _fill(str(node.value), self.environ, path, self.document, node.start_mark.line + 1)

    def problem(self, node: yaml.Node, path: Path, message: str) -> None:
        self.document.problems.append((node.start_mark.line + 1, path, message))


def filled(value: Any, environ: Mapping[str, str], path: Path, document: Document) -> Any:
    """Return JSON values with the `${NAME}` of their strings filled in, as `parse` fills a file's.

    Mistakes go to the problems of `document`, what was written to its `raw`.
    """
    if isinstance(value, str):
        return _fill(value, environ, path, document, document.line(path))
    if isinstance(value, Mapping):
        return {k: filled(v, environ, (*path, k), document) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [filled(v, environ, (*path, i), document) for i, v in enumerate(value)]
    return value


def replaced(value: Any, by_path: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return a copy of JSON values with those at some paths replaced."""
    if path in by_path:
        return by_path[path]
    if isinstance(value, Mapping):
        return {key: replaced(member, by_path, (*path, key)) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(member, by_path, (*path, i)) for i, member in enumerate(value)]
    return value


def variables(text: str) -> list[str]:
    """Return the variables that a text names, those with a default too."""
    return [match["name"] for match in _VARIABLE.finditer(text) if match["name"]]


def without_variables(text: str) -> str:
    """Return what a text has beside the variables that it names; a default counts as text."""
    return _VARIABLE.sub(lambda match: match["value"] or "" if match["name"] else match[0], text)


def escaped(value: Any) -> Any:
    """Return JSON values whose strings are meant to the letter: a `${` in them names no variable."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, Mapping):
        return {key: escaped(member) for key, member in value.items()}
    return [escaped(member) for member in value] if isinstance(value, list | tuple) else value


def _fill(text: str, environ: Mapping[str, str], path: Path, document: Document, line: int) -> str:
    if "${" not in text:
        return text

    def replace(match: re.Match[str]) -> str:
        if match["bad"]:
            message = (
                "`${` starts a variable: expected ${VAR} or ${VAR:-default}, "
                "or $${ where a plain ${ is meant"
            )
            document.problems.append((line, path, message))
            return ""
        name = match["name"]
        if name is None:
            return "${"
        value = environ.get(name)
        # As in a shell, `:-` stands in for an empty variable too.
        if match["default"] is not None:
            return value or match["value"]
        if value is None:
            message = (
                f"the environment variable {name} is not set: set it, or give it a default "
                f"with ${{{name}:-default}}"
            )
            document.problems.append((line, path, message))
            return ""
        return value

    document.raw[path] = text
    return Untyped(_VARIABLE.sub(replace, text))
