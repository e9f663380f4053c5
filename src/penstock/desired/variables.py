"""The variables that stand in an exported file for the secrets that the store has written out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.config.document import Key
from penstock.config.secret_values import secrets
from penstock.config.yaml_lines import Document, filled
from penstock.core.text import Path
from penstock.desired.entities import Snapshot


class StoredSecret(NamedTuple):
    """A secret of an entity that the store has written out, and the variable that stands for it."""

    key: Key
    path: Path
    variable: str
    value: str


def stored_secrets(snapshot: Snapshot) -> Iterator[StoredSecret]:
    """Yield the secrets of a state; each has a variable of its own, `SOURCE_SHOP_URL`."""
    taken: set[str] = set()
    for key in sorted(snapshot.entities):
        for path, value in secrets(key[0], snapshot.entities[key].spec):
            words = re.sub(r"[^A-Za-z0-9]", "_", "_".join(map(str, (*key, *path)))).upper()
            variable, number = words, 1
            while variable in taken:
                number += 1
                variable = f"{words}_{number}"
            taken.add(variable)
            yield StoredSecret(key, path, variable, value)


def stored_variables(snapshot: Snapshot, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what these variables stand for, so that an exported file plans as empty without them."""
    found = {}
    for secret in stored_secrets(snapshot):
        document = Document()
        value = filled(secret.value, environ, (), document)
        if not document.problems:
            found[secret.variable] = str(value)
    return found
