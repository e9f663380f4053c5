"""What errors have in common: the word that was meant, the path of a key, the end of a sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

Path = tuple[str | int, ...]


def nearest(given: Any, known: Iterable[str]) -> str:
    """Return `; did you mean …?` for the known word that is most like the given one, or nothing."""
    close = closest(str(given), known)
    return "" if close is None else f"; did you mean {close}?"


def closest(given: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like the given one, None where none is like it."""
    words = {word.lower(): word for word in reversed(list(known))}
    found = difflib.get_close_matches(given.lower(), list(words), n=1)
    return words[found[0]] if found else None


def sentence(text: str) -> str:
    """Return a text with a full stop, unless it ends with a question: `…; did you mean id?`."""
    return text if text.endswith("?") else f"{text}."


def dotted(path: Path) -> str:
    """Return a path as a message names it: `sinks.orders.tables[0]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")
