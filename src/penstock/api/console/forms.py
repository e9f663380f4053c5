"""Forms: what was posted, and what is wrong with each field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

from starlette.requests import Request

from penstock.api.console.calls import Answer

_TYPE: Final = "application/x-www-form-urlencoded"
_MOST_FIELDS: Final = 2000
CSRF: Final = "csrf"
"""The field with the session's token; htmx may send it as the header `X-CSRF-Token`."""


class Form:
    """The fields of a form as they were filled in, and the errors beside them."""

    def __init__(self, fields: Mapping[str, list[str]] | None = None) -> None:
        self._fields = dict(fields or {})
        self.errors: dict[str, str] = {}
        self.problem = ""
        """What is wrong with the whole of it."""
        self.lost: list[str] = []
        """What it would destroy, for its page to show beside the field for the name."""
        self.review: Any = None
        """What the API would do of it, where that was asked for."""

    def __getitem__(self, name: str) -> str:
        """Return a field's value without blanks around it, empty where it is not there."""
        return self.raw(name).strip()

    def raw(self, name: str) -> str:
        """Return a field's value as it was sent."""
        return self._fields.get(name, [""])[-1]

    def many(self, name: str) -> list[str]:
        """Return the values of a field that may be there several times."""
        return self._fields.get(name, [])

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def filled(self, **values: str) -> Form:
        """Return a form with these values, where a thing is edited."""
        return Form({name: [value] for name, value in values.items()} | self._fields)

    @property
    def status(self) -> int:
        """The HTTP status of the page that shows it."""
        return 422 if self.errors or self.problem else 200

    def confirms(self, name: object) -> bool:
        """Return whether the name of what is destroyed was typed; if not, show that beside the field."""
        if self["confirm"] == str(name):
            return True
        self.errors["confirm"] = f"This is not {name}."
        return False

    def agrees(self, name: object, lost: Sequence[str]) -> bool:
        """Return whether nothing is lost, or the name was typed below all of that; if not, show it."""
        self.lost = list(lost)
        if self.many("lost") != self.lost:
            self._fields.pop("confirm", None)  # it was typed for something else
            return not lost
        return not lost or self.confirms(name)

    def refuse(self, answer: Answer, *known: str) -> None:
        """Take in a problem of the API: errors of `known` fields go beside them, others on top."""
        self.errors |= {name: text for name, text in answer.errors.items() if name in known}
        if not answer.errors or any(name not in known for name in answer.errors):
            self.problem = answer.detail


async def read_form(request: Request) -> Form:
    """Return the form in a request's body; one that is no form is empty."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _TYPE:
        return Form()
    fields: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(
            (await request.body()).decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS
        )
    except ValueError:
        return Form()
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    return Form(fields)
