"""Salesforce: SOQL has no `select *` for many rows, and objects are found by describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from penstock.syncs.connectors.contract import Collection, Session
from penstock.syncs.connectors.rest import RestConnector
from penstock.syncs.errors import SyncError

_COMPOUND: Final = frozenset({"address", "location", "base64"})
"""Types that a query for many rows refuses; the parts of addresses are fields of their own."""
_T = TypeVar("_T")
_NEEDED: Final = ("Id", "SystemModstamp", "IsDeleted")


class _Field(msgspec.Struct):
    name: str
    type: str


class _Described(msgspec.Struct):
    fields: list[_Field]


class _Object(msgspec.Struct):
    name: str
    queryable: bool = False
    replicateable: bool = False
    deprecatedAndHidden: bool = False  # noqa: N815 - Salesforce's name


class _Objects(msgspec.Struct):
    sobjects: list[_Object]


class SalesforceConnector(RestConnector):
    """Reads any object that can be replicated, custom ones among them."""

    def collections(self, session: Session | None = None) -> Mapping[str, Collection]:
        """Return the objects that the credential's user sees; none without a session."""
        if session is None:
            return {}
        found = _decoded(session, self._url("sobjects"), _Objects)
        names = [
            each.name.lower()
            for each in found.sobjects
            if each.queryable and each.replicateable and not each.deprecatedAndHidden
        ]
        return {name: self.collection(name) for name in names}

    def described(self, name: str, session: Session) -> Mapping[str, Any]:
        """Return the fields of an object."""
        found = _decoded(session, self._url(f"sobjects/{name}/describe"), _Described)
        names = [each.name for each in found.fields if each.type not in _COMPOUND]
        if lacking := [each for each in _NEEDED if each not in names]:
            raise SyncError(
                "connector",
                f"The Salesforce object {name} can't be polled: the user sees no field "
                f"{', '.join(lacking)}.",
                remedy="Sync an object that has them, or give the user the right to see them.",
            )
        return {"fields": ",".join(names)}

    def _url(self, path: str) -> str:
        return f"{self.access.origin}/services/data/{self._values['api_version']}/{path}"


def _decoded(session: Session, url: str, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(session.request("GET", url).content, type=kind)
    except msgspec.DecodeError as error:
        raise SyncError(
            "bad_response", f"Salesforce's description can't be read: {error}."
        ) from None
