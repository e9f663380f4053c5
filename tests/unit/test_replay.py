"""Replays of dead letters that fell out of a sink's steps, without Spark and NATS."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.config.sources import PostgresSource
from penstock.core.errors import SinkError
from penstock.streams.records import StoredLetter
from penstock.streams.store import Store
from penstock.trial.replay import Replay
from penstock.trial.trial import SentMessage, TrialOutcome


@pytest.mark.parametrize("value", ["1e999", r'"\ud800"', "1.10"])
def test_a_message_that_parsers_refuse_is_published_as_it_is(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[int] = []
    published: list[tuple[Any, ...]] = []
    letters = SimpleNamespace(mark_replayed=lambda id, _also: marked.append(id))  # noqa: A006
    replay = Replay(
        cast("Store", SimpleNamespace(letters=letters)),
        lambda: Config(sources={}, sinks={}),
    )
    sink = {"type": "nats", "source": "shop", "url": "nats://localhost", "subject": "s"}
    source = {"type": "postgres", "url": "postgresql://u@localhost/shop", "tables": ["public.t"]}
    config = SimpleNamespace(
        sinks={"out": NatsSinkSettings.model_validate(sink)},
        sources={"shop": PostgresSource.model_validate(source)},
        nats_consumers={},
    )
    monkeypatch.setattr(replay, "_config", lambda _: cast("Config", config))
    sender = SimpleNamespace(publish=lambda *sent, headers: published.append(sent))
    monkeypatch.setattr(replay, "_publisher", lambda _: sender)

    def trial(batch: Any) -> list[TrialOutcome]:
        (row,) = batch.to_pylist()
        body = f'{{"record":{row["record"]},"metadata":{row["metadata"]}}}'
        return [TrialOutcome(body, "sent", (SentMessage(body, "s.t", row["idempotency_key"]),))]

    monkeypatch.setattr(replay, "_trial", lambda *_: trial)
    message = (
        f'{{"record":{{"v":{value}}},"changes":null,"action":"insert",'
        '"metadata":{"idempotency_key":"k","record_pks":[1e999],"commit_lsn":7}}'
    )
    letter = SimpleNamespace(
        id=3, publisher="out", consumer=None, subject="", code="filter_failed", message=message
    )
    replay.send(cast("StoredLetter", letter))
    ((subject, key, body),) = published
    assert (subject, key, marked) == ("s.t", "k", [3])
    assert f'"v":{value}'.encode() in body
    assert b'"record_pks":[1e999]' in body


@pytest.mark.parametrize(
    ("of_consumer", "refused"),
    [(True, "no consumer of type nats 'mail'"), (False, "no NATS sink 'mail'")],
)
def test_a_letter_goes_to_none_but_what_it_is_of(refused: str, *, of_consumer: bool) -> None:
    """The other of the two may have the name by now."""
    made = Config(sources={}, sinks={})
    if not of_consumer:
        made = made.model_copy(update={"nats_consumers": {"mail": None}})
    replay = Replay(cast("Store", None), lambda: made)
    consumer = "mail" if of_consumer else None
    letter = SimpleNamespace(
        id=3, publisher="mail", consumer=consumer, subject="s", code="too_large", message="{}"
    )
    with pytest.raises(SinkError, match=f"The configuration has {refused} any more"):
        replay.send(cast("StoredLetter", letter))
