"""Where an answer of the management API puts the mistakes of a change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn, cast

import pytest

from penstock.api.manage import changes
from penstock.api.manage.context import Context
from penstock.api.problems import Problem
from penstock.core.errors import Concern, ConfigError, Mistake
from penstock.desired.entities import Snapshot

ASKED = changes.Asked("target", "out", {}, "ann", "api", dry_run=False)


@pytest.mark.parametrize(
    ("mistake", "placed"),
    [
        (Mistake(Concern("target", "out", "tls.ca"), "no: this"), ("tls.ca", "no: this")),
        (Mistake(Concern("target", "out"), "orders: it is another's"),
         ("body", "target out: orders: it is another's")),
        (Mistake(Concern("consumer", "out", "stream"), "gone"), ("body", "consumer out: stream: gone")),
        ("target out: filter: text alone", ("body", "target out: filter: text alone")),
    ],
)  # fmt: skip
def test_a_mistake_stands_at_the_setting_that_it_concerns(
    monkeypatch: pytest.MonkeyPatch, mistake: str | Mistake, placed: tuple[str, str]
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise ConfigError([mistake])

    monkeypatch.setattr(changes, "planned_with", refuse)
    state = SimpleNamespace(read=lambda: Snapshot(0, {}))
    context = cast("Context", SimpleNamespace(state=state))
    with pytest.raises(Problem) as caught:
        changes.put(context, ASKED, lambda _: {"type": "nats", "url": "nats://n:4222"})
    assert caught.value.errors == [{"field": placed[0], "message": placed[1]}]
