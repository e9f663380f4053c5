"""Plain values as YAML: what `yaml.dump` writes of them, in a fraction of its time.

Names, numbers and booleans, which most of a configuration is made of, are written here. PyYAML writes
what has to be quoted, or takes several lines: all of that at once, which is then put in its places.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

_PLAIN: Final = re.compile(
    r"(?!(?i:true|false|yes|no|on|off|null)\Z)(?=.{1,100}\Z)"
    r"[A-Za-z_][A-Za-z0-9_./-]*(?::(?=/)[A-Za-z0-9_./-]*)*"
)
"""Texts that need no quotes: YAML reads them as they are, and as nothing but a text."""
_CONSTANTS: Final = {True: "true", False: "false", None: "null"}
_BREAK: Final = r"[\n\x85\u2028\u2029]"
"""What YAML takes for the end of a line."""
_ITEM: Final = re.compile(rf"(?:\A|(?<={_BREAK}))- ")
_INDENTED: Final = re.compile(rf"({_BREAK})  ")
_OPEN: Final = re.compile(rf"{_BREAK}{{2}}\Z")
"""The end of a block whose last line breaks are its own."""


def yaml_of(root: Mapping[str, Any]) -> str:
    """Return a mapping of JSON values as YAML, in its order.

    Texts of several lines are blocks. What is alike is repeated: there are no anchors.
    """
    if not root:
        return "{}\n"
    writer = _Writer()
    writer.mapping(root, "")
    return writer.text()


@functools.lru_cache(maxsize=1024)  # keys, and most values, come again and again
def _plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None


class _Writer:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.left: list[tuple[int, str, Any]] = []
        """What PyYAML writes: the number of the part, the indentation of its lines, and a value."""

    def mapping(self, of: Mapping[str, Any], indent: str) -> None:
        write = self.parts.append
        for key, value in of.items():
            kind = type(value)
            if not _is_plain(key):  # a file may have a key that is no text
                write(indent)
                self.leave({key: value}, indent)
            elif kind is dict and value:
                write(f"{indent}{key}:\n")
                self.mapping(value, f"{indent}  ")
            elif kind is list and value:
                write(f"{indent}{key}:\n")
                self.items(value, indent)
            elif kind is int or (kind is str and _plain(value)):
                write(f"{indent}{key}: {value}\n")
            elif value is None or kind is bool:
                write(f"{indent}{key}: {_CONSTANTS[value]}\n")
            else:
                write(f"{indent}{key}: ")
                self.leave(value, f"{indent}  ")

    def items(self, of: list[Any], indent: str) -> None:
        if all(_is_plain(each) for each in of):
            self.parts += [f"{indent}- {each}\n" for each in of]
        else:
            self.parts.append(indent)
            self.leave(of, indent)

    def leave(self, value: Any, indent: str) -> None:
        self.left.append((len(self.parts), indent, value))
        self.parts.append("")

    def text(self) -> str:
        written = _dumped([value for _, _, value in self.left])
        for (number, indent, _), item in zip(self.left, written, strict=True):
            self.parts[number] = _INDENTED.sub(rf"\1{indent}", item)
        text = "".join(self.parts)
        return f"{text}...\n" if _OPEN.search(text) else text  # so that a comment may follow


def _is_plain(value: Any) -> bool:
    return type(value) is str and _plain(value)


_Base: Final = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where PyYAML has it: it takes a quarter of the time."""


class _Dumper(_Base):  # type: ignore[misc,valid-type]  # one of two, as installed
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - as in the base
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def _dumped(values: list[Any]) -> list[str]:
    """Return values as YAML; lines behind the first are indented by two spaces."""
    # With one more, as the last of a document may be written in another way.
    text = yaml.dump(
        [*values, 0], Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000
    )  # fmt: skip
    return _ITEM.split(text)[1:-1]
