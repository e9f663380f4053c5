"""Named SQL from the `.sql` files that stand beside the code that runs it.

A file holds queries one after the other, each under a line `-- name: some_name`; the comment lines
that follow describe what the query returns.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import LiteralString, cast

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


@cache
def load(package: str, file: str) -> dict[str, LiteralString]:
    """Return the queries of `file` in `package` by name.

    The text comes from the installed package alone, hence the `LiteralString` that psycopg requires.
    """
    text = files(package).joinpath(file).read_text(encoding="utf-8")
    parts = _NAME.split(text)[1:]
    return {
        name: cast("LiteralString", body.strip())
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
