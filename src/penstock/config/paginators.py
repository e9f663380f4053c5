"""How the pages of a list follow each other. The keys are named as those of dlt's `rest_api`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.strict import Flag, StrictModel, Whole

Text = Annotated[str, Field(min_length=1)]


class SinglePage(StrictModel):
    """One answer has all."""

    type: Literal["single_page"]


class JsonLink(StrictModel):
    """The answer has the URL of the next page."""

    type: Literal["json_link"]
    next_url_path: Text = "next"


class HeaderLink(StrictModel):
    """The header `Link` has the URL of the next page."""

    type: Literal["header_link"]
    links_next_key: Text = "next"


class HeaderCursor(StrictModel):
    """A header has what the next request sends as a parameter."""

    type: Literal["header_cursor"]
    cursor_key: Text = "next"
    cursor_param: Text = "cursor"


class CursorPages(StrictModel):
    """The answer has what the next request sends as a parameter, or in its body."""

    type: Literal["cursor"]
    cursor_path: Text = "cursors.next"
    cursor_param: str | None = None
    cursor_body_path: str | None = None
    has_more_path: str | None = None
    stop_after_empty_page: Flag = False


class Offset(StrictModel):
    """The request has how many objects to skip."""

    type: Literal["offset"]
    limit: Whole = Field(gt=0)
    offset: Whole = Field(default=0, ge=0)
    offset_param: str | None = None
    limit_param: str | None = None
    offset_body_path: str | None = None
    limit_body_path: str | None = None
    total_path: str | None = None
    has_more_path: str | None = None
    stop_after_empty_page: Flag = True


class PageNumber(StrictModel):
    """The request has the page's number."""

    type: Literal["page_number"]
    base_page: Whole = Field(default=0, ge=0)
    page_param: str | None = None
    page_body_path: str | None = None
    total_path: str | None = None
    has_more_path: str | None = None
    stop_after_empty_page: Flag = True


class Keyset(StrictModel):
    """Each page begins behind the last object of the one before, by `{cursor}` and `{key}`.

    `limit`: how many objects a full page has; a shorter one is the last.
    `initial_key`: what `{key}` is before the first.
    """

    type: Literal["keyset"]
    limit: Whole = Field(gt=0)
    initial_key: str = ""


Paginator = Annotated[
    SinglePage | JsonLink | HeaderLink | HeaderCursor | CursorPages | Offset | PageNumber | Keyset,
    Field(discriminator="type"),
]
