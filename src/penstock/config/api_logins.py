"""Logins of the APIs that syncs read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.strict import StrictModel, Whole

Text = Annotated[str, Field(min_length=1)]


class Bearer(StrictModel):
    """`Authorization: Bearer`."""

    type: Literal["bearer"]
    token: Text


class HttpBasic(StrictModel):
    """HTTP basic authentication."""

    type: Literal["http_basic"]
    username: str
    password: str = ""


class ApiKey(StrictModel):
    """A key in a header, or in the query."""

    type: Literal["api_key"]
    name: Text = "Authorization"
    api_key: Text
    location: Literal["header", "query"] = "header"


class ClientCredentials(StrictModel):
    """OAuth 2: a token for the client itself."""

    type: Literal["oauth2_client_credentials"]
    access_token_url: Text
    client_id: Text
    client_secret: Text
    access_token_request_data: dict[str, str] = Field(default_factory=dict)
    default_token_expiration: Whole = Field(default=3600, gt=0)


class RefreshToken(StrictModel):
    """OAuth 2: a refresh token; where the server rotates it, the new one is kept."""

    type: Literal["oauth2_refresh_token"]
    access_token_url: Text
    client_id: Text
    client_secret: str = ""
    refresh_token: Text
    access_token_request_data: dict[str, str] = Field(default_factory=dict)
    default_token_expiration: Whole = Field(default=3600, gt=0)


Auth = Annotated[
    Bearer | HttpBasic | ApiKey | ClientCredentials | RefreshToken, Field(discriminator="type")
]
