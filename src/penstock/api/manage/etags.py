"""ETags: an entity's is its version, so that a change of what has changed since is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.api.problems import Problem

IF_MATCH: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": "If-Match",
            "in": "header",
            "required": False,
            "schema": {"type": "string"},
            "description": "The `ETag` of what the change is made from: refused where that is older.",
        }
    ]
}
"""The header as OpenAPI has it."""
_TAG = re.compile(r'(?:W/)?"([^"]*)"')


def etag(version: int) -> dict[str, str]:
    """Return the header of an answer that shows what has this version."""
    return {"ETag": f'"{version}"'}


def check(headers: Mapping[str, str], version: int | None, what: str) -> None:
    """Raise `Problem` where `If-Match` or `If-None-Match` rules a change out.

    `version` is that of what is to be changed, None where it is not there.
    """
    wanted = headers.get("if-match")
    if wanted is not None and not _holds(wanted, version):
        raise Problem(
            412, f"If-Match: {_mismatch(wanted, version, what)}",
            headers=None if version is None else etag(version),
        )  # fmt: skip
    unwanted = headers.get("if-none-match")
    if unwanted is not None and _holds(unwanted, version):
        raise Problem(412, f"If-None-Match: {what} is there already.")


def _mismatch(header: str, version: int | None, what: str) -> str:
    if version is None:
        return f"{what} is not there: it was deleted since, or was never made."
    if header.strip() != "*" and not _TAG.search(header):
        return (
            f"{header!r} is no ETag: expected one in its quotes, as the answer's header `ETag` has it; "
            f'{what} has "{version}" now.'
        )
    return f'{what} has the ETag "{version}" now: it was changed since. Read it again, and change that.'


def _holds(header: str, version: int | None) -> bool:
    if version is None:
        return False
    return header.strip() == "*" or str(version) in _TAG.findall(header)
