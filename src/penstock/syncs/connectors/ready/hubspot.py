"""HubSpot: a search gives only the properties that it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.syncs.connectors.contract import Session
from penstock.syncs.connectors.objects import items
from penstock.syncs.connectors.rest import RestConnector


class _Property(msgspec.Struct):
    name: str


class HubspotConnector(RestConnector):
    """Asks for all properties of an object."""

    def described(self, name: str, session: Session) -> Mapping[str, Any]:
        """Return the names of the properties."""
        response = session.request("GET", f"{self.access.origin}/crm/v3/properties/{name}")
        found = items(response.content, "results")
        return {
            "all_properties": [msgspec.json.decode(each, type=_Property).name for each in found]
        }
