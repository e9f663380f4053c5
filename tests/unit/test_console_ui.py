"""The console's parts of pages, rendered alone."""

from __future__ import annotations

from penstock.api.console.forms import Form
from penstock.api.console.render import _ENVIRONMENT


def field(arguments: str, form: Form) -> str:
    """Return what `ui.field` makes of these arguments."""
    text = '{% import "ui.html" as ui with context %}{{ ui.field(' + arguments + ") }}"
    return _ENVIRONMENT.from_string(text).render(form=form)


def test_a_field_shows_what_was_typed_unless_it_is_a_password() -> None:
    form = Form({"key": ["typed"]})
    assert 'value="typed"' in field("'key', 'Key'", form)
    assert "typed" not in field("'key', 'Key', type='password'", form)
    assert 'value="***"' in field("'key', 'Key', type='password', value='***'", form)
