"""Providers: the APIs that syncs read. The keys of `rest` are named as those of dlt's `rest_api`.

Texts may hold `{name}`: a property of the credential, `{collection}`: the collection's name, and in a
collection's requests `{cursor}`: from where a poll reads, and `{key}`: behind which key.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from penstock.config.api_logins import Auth
from penstock.config.durations import Duration
from penstock.config.paginators import Keyset, Paginator, Text
from penstock.config.strict import Flag, StrictModel, Whole
from penstock.config.texts import Code, text_and_file

READY: Final = ("stripe", "salesforce", "servicenow", "hubspot", "github")
"""The providers that need no entry: they are in the package."""
ANY: Final = "*"
"""The name of the collection that stands for all that have no entry of their own."""


class Incremental(StrictModel):
    """How a collection is polled.

    Attributes:
        cursor_path: The field that has when an object changed, or a number that grows.
        format: How the field is written.
        initial_value: What `{cursor}` is for the first read; without it, parameters that hold
            `{cursor}` are left out of the first read.
        order: How the API sorts by the field. `descending`: a poll stops at the first page that is
            older than the cursor.
        overlap: How far a poll reads back behind the cursor.
    """

    cursor_path: Text
    format: Literal["iso8601", "unix", "unix_ms", "servicenow", "number"] = "iso8601"
    initial_value: str | None = None
    order: Literal["ascending", "descending", "none"] = "none"
    overlap: Duration = timedelta(seconds=60)
    restart: Flag | None = None
    """Whether each page is asked for by the cursor of the one before, as soon as that has moved.
    It is, where the API sorts by the cursor and counts pages: those shift when an object changes."""


class Endpoint(StrictModel):
    """A request that lists objects."""

    path: Text
    method: Literal["GET", "POST"] = "GET"
    params: dict[str, Any] = Field(default_factory=dict)
    json_body: dict[str, Any] | None = Field(default=None, alias="json")
    headers: dict[str, str] = Field(default_factory=dict)
    data_selector: Text = "$"
    paginator: Paginator | None = None


class Tombstones(StrictModel):
    """Deleted objects are in the list; a field that is there and not empty says so."""

    type: Literal["tombstone"]
    path: Text


class FlagDeletes(StrictModel):
    """A field has a value where the object is deleted."""

    type: Literal["flag"]
    path: Text
    value: Any = True


class EventDeletes(Endpoint):
    """A list of its own has what was deleted."""

    type: Literal["events"]
    key_path: Text
    """The field with the key of the deleted object."""
    incremental: Incremental | None = None


class SweepDeletes(StrictModel):
    """All are listed from time to time, and what is missing is deleted."""

    type: Literal["sweep"]


class NoDeletes(StrictModel):
    """The API does not show them."""

    type: Literal["none"]


def some_key(value: str | list[str]) -> str | list[str]:
    """Return a key that names a field; raises `ValueError`."""
    if not value or (isinstance(value, list) and not all(value)):
        raise ValueError("expected the field, or the fields, that identify an object")
    return value


class Keyed(StrictModel):
    """What identifies an object."""

    primary_key: str | list[str] = "id"

    @field_validator("primary_key")
    @classmethod
    def _some_key(cls, value: str | list[str]) -> str | list[str]:
        return some_key(value)

    @property
    def key(self) -> tuple[str, ...]:
        """The fields that identify an object."""
        return (self.primary_key,) if isinstance(self.primary_key, str) else tuple(self.primary_key)


class RestCollection(Endpoint, Keyed):
    """A collection of a REST API."""

    created_path: str | None = None
    incremental: Incremental | None = None
    exclude_path: str | None = None
    """Objects that have this field, and not null, are left out."""
    deletes: Annotated[
        Tombstones | FlagDeletes | EventDeletes | SweepDeletes | NoDeletes,
        Field(discriminator="type"),
    ] = SweepDeletes(type="sweep")
    sweep: Endpoint | None = None
    """How all ids are listed; without it, as the first read lists all."""
    delete_notes: str = ""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if isinstance(self.paginator, Keyset) and self.incremental is None:
            raise ValueError("the paginator keyset needs incremental: with cursor_path")
        return self


class RateDefaults(StrictModel):
    """What a credential may ask where its sync sets nothing."""

    allowed_requests: Whole = Field(default=10, gt=0)
    interval: Duration = timedelta(seconds=1)
    max_concurrent_requests: Whole = Field(default=4, gt=0)


class Check(StrictModel):
    """The harmless request that tries a credential."""

    path: Text
    params: dict[str, Any] = Field(default_factory=dict)


class RestProvider(StrictModel):
    """A REST API, described."""

    type: Literal["rest"]
    base_url: Text
    headers: dict[str, str] = Field(default_factory=dict)
    auth: Auth | None = None
    paginator: Paginator | None = None
    rate_limit: RateDefaults = RateDefaults()
    allow_private: Flag = False
    """Whether the API may have an address of a private network."""
    check_request: Check | None = Field(default=None, alias="check")
    properties: dict[str, str] = Field(default_factory=dict)
    """What a credential's property is where the credential has none of that name."""
    collections: dict[str, RestCollection] = Field(min_length=1)

    @model_validator(mode="after")
    def _pages(self) -> Self:
        for name, each in self.collections.items():
            lists = {name: each, f"{name}.sweep": each.sweep}
            if isinstance(each.deletes, EventDeletes):
                lists[f"{name}.deletes"] = each.deletes
            for where, endpoint in lists.items():
                if endpoint is not None and not (endpoint.paginator or self.paginator):
                    raise ValueError(
                        f"collections.{where} has no paginator: name one, so that no page is missed "
                        "(single_page where one answer has all)"
                    )
        return self


def _function(value: str) -> str:
    module, colon, name = value.rpartition(":")
    if not (module and colon and name):
        raise ValueError("expected module:function or path/to/file.py:function")
    return value


class PythonCollection(Keyed):
    """A collection whose objects a function yields."""

    created_path: str | None = None
    incremental: Incremental | None = None
    deletes: Annotated[
        Tombstones | FlagDeletes | SweepDeletes | NoDeletes, Field(discriminator="type")
    ] = NoDeletes(type="none")
    delete_notes: str = ""


class PythonProvider(StrictModel):
    """A function or class of the user's own."""

    type: Literal["python"]
    function: Annotated[str, AfterValidator(_function)]
    collections: dict[str, PythonCollection] = Field(min_length=1)
    base_url: str | None = None
    """The URL to which alone `auth` logs in."""
    auth: Auth | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    rate_limit: RateDefaults = RateDefaults()
    allow_private: Flag = False


class AirbyteCollection(StrictModel):
    """What a manifest does not say of a stream, or what is to be otherwise.

    Attributes:
        primary_key: What identifies an object; the manifest's if unset.
        overlap: How far a poll reads back behind the cursor.
    """

    primary_key: str | list[str] | None = None
    created_path: str | None = None
    overlap: Duration = timedelta(seconds=60)
    deletes: Annotated[
        Tombstones | FlagDeletes | SweepDeletes | NoDeletes, Field(discriminator="type")
    ] = NoDeletes(type="none")
    delete_notes: str = ""

    @field_validator("primary_key")
    @classmethod
    def _some_key(cls, value: str | list[str] | None) -> str | list[str] | None:
        return None if value is None else some_key(value)


class AirbyteProvider(StrictModel):
    """A declarative manifest of Airbyte, which airbyte-cdk runs in a process of its own."""

    type: Literal["airbyte"]
    manifest: Code
    """YAML; in the file the text, or `{file: path}`."""
    components: Text | None = None
    """The Python file of the manifest's custom components; it is as trusted as Penstock."""
    config: dict[str, Any] = Field(default_factory=dict)
    """What the manifest asks for, beside the properties of the credential."""
    collections: dict[str, AirbyteCollection] = Field(default_factory=dict)
    rate_limit: RateDefaults = RateDefaults()
    allow_private: Flag = False

    @field_validator("manifest", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Code):
            return value
        code, file = text_and_file(value, info, "a manifest, or {file: path} where a file holds it")
        manifest_of(code)
        return Code(code=code, file=file)


def manifest_of(text: str) -> dict[str, Any]:
    """Return a manifest as its YAML has it; raises `ValueError`."""
    try:
        found = yaml.load(str(text), _SAFE)  # noqa: S506 - it is a safe loader
    except yaml.YAMLError as error:
        raise ValueError(f"the manifest is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not (found.get("streams") or found.get("dynamic_streams")):
        raise ValueError(
            "it is no manifest of Airbyte: expected the keys version, check and streams"
        )
    return found


_SAFE: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
PROVIDERS: Final[dict[str, type[RestProvider | PythonProvider | AirbyteProvider]]] = {
    "rest": RestProvider,
    "python": PythonProvider,
    "airbyte": AirbyteProvider,
}
ProviderSettings = RestProvider | PythonProvider | AirbyteProvider
