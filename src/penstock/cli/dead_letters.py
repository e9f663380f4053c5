"""`penstock dead-letters`: what could not be delivered, by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import (
    CONFIG,
    AsJson,
    ConfigFile,
    StoreUrl,
    errors,
    fail,
    json_text,
    note_failure,
    print_table,
    unknown,
)
from penstock.cli.relay import URL_VARIABLE, configuration
from penstock.cli.store import store_of

if TYPE_CHECKING:
    from penstock.config.settings import Config
    from penstock.config.sources import OutboxSource
    from penstock.streams.connection import Also
    from penstock.streams.records import StoredLetter
    from penstock.streams.store import Store

dead_letters = typer.Typer(
    help="Look at what could not be delivered, deliver it again, or delete it.",
    no_args_is_help=True,
)

SinkName = Annotated[
    str | None, typer.Option("--sink", help="Those of this sink, or pipeline of a relay, alone.")
]
ConsumerName = Annotated[
    str | None, typer.Option("--consumer", help="Those of this consumer alone.")
]
RelayUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Those of the relay of this database; no file is read then.",
        show_default=False,
    ),
]
Numbers = Annotated[list[int] | None, typer.Argument(help="Their numbers.", show_default=False)]


@dataclasses.dataclass(frozen=True)
class _Letters:
    """The store that dead letters are in.

    Attributes:
        store: The store.
        configuration: Gives what they are replayed by, with the sinks or a relay's database.
        sinks: Gives the names of the sinks, whatever else is wrong with the configuration.
        kind: Returns whether the sink of a letter is a "sink", or a "pipeline" of a relay.
    """

    store: Store
    configuration: Callable[[], Config]
    sinks: Callable[[], list[str]]
    kind: Callable[[str], str]

    def owner(self, letter: StoredLetter) -> str:
        """Return what a letter is of."""
        if letter.sink is None:
            return f"consumer {letter.consumer}"
        return f"{self.kind(letter.sink)} {letter.sink}"


@contextlib.contextmanager
def _letters(config: Path, url: str | None, store_url: str | None) -> Iterator[_Letters]:
    """Give the store that dead letters are in: the file's, or a relay's."""
    from penstock.streams.store import Store

    if url is None and store_url is None and not config.exists():
        url = os.environ.get(URL_VARIABLE)
    if url is None:
        with store_of(config, store_url) as store:
            yield _Letters(
                store,
                lambda: _configured(config, store_url),
                lambda: _sinks(config, store),
                functools.cache(lambda name: _kind(config, store, name)),
            )
        return
    relay = configuration(url, None, store_url)
    source = relay.outboxes["outbox"]
    with Store.open((relay.store or source.url).get_secret_value()) as store:
        yield _Letters(store, lambda: relay, lambda: _pipelines(source), lambda _: "pipeline")


def _configured(file: Path, store_url: str | None) -> Config:
    from penstock.desired.with_file import configured

    found = configured(file, store_url)
    note_failure(found)
    return found.config


def _sinks(file: Path, store: Store) -> list[str]:
    from penstock.config.file import sink_names
    from penstock.desired.state import DesiredState

    names = dict.fromkeys(sink_names(file)) if file.exists() else {}
    return list(names | dict.fromkeys(DesiredState(store).read().of_kind("sink")))


def _kind(file: Path, store: Store, name: str) -> str:
    """Return what has dead letters as a sink: what is no sink of a file with outboxes is a pipeline."""
    from penstock.config.file import has_outboxes
    from penstock.syncs.job import SINK

    relays = file.exists() and has_outboxes(file)
    return "pipeline" if relays and name not in (SINK, *_sinks(file, store)) else "sink"


def _consumers(store: Store) -> list[str]:
    from penstock.streams.nats_consumers import NatsConsumers

    return [*(found.name for found in store.consumers()), *NatsConsumers(store).streams()]


def _pipelines(source: OutboxSource) -> list[str]:
    from penstock.outbox.configured import pipelines

    return list(pipelines(source))


@dead_letters.command("list")
def list_letters(
    sink: SinkName = None,
    consumer: ConsumerName = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the oldest first.")] = 100,
    config: ConfigFile = CONFIG,
    url: RelayUrl = None,
    store_url: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, without their messages."""
    with errors(), _letters(config, url, store_url) as letters:
        _check_names(letters, sink, consumer)
        found = letters.store.letters.page(sink, consumer, limit + 1)
        more = len(found) > limit
        del found[limit:]
        of = list(map(letters.owner, found))
    if as_json:
        typer.echo(json_text([_described(letter) for letter in found]))
    else:
        print_table(
            ("number", "of", "at", "code", "reason", "replayed"),
            [
                (x.id, owner, x.at, x.code, x.reason, x.replayed_at)
                for x, owner in zip(found, of, strict=True)
            ],
        )
    if more:
        typer.echo(f"There are more than these {limit}: see --limit.", err=True)


@dead_letters.command("show")
def show_letter(
    number: Annotated[int, typer.Argument(help="Its number, from the list.")],
    config: ConfigFile = CONFIG,
    url: RelayUrl = None,
    store_url: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show all of one dead letter, its message too."""
    with errors(), _letters(config, url, store_url) as letters:
        letter = _letter(letters.store, number)
        owner = letters.owner(letter)
    described = _described(letter)
    if as_json:
        typer.echo(json_text({**described, "message": letter.message}))
        return
    del described["sink"], described["consumer"]
    for key, value in {"id": described.pop("id"), "of": owner, **described}.items():
        if value is not None:
            typer.echo(f"{key}: {value}")
    typer.echo(f"\n{letter.message}")


@dead_letters.command("replay")
def replay_letters(
    numbers: Numbers = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All that were not replayed yet.")
    ] = False,
    sink: SinkName = None,
    consumer: ConsumerName = None,
    config: ConfigFile = CONFIG,
    url: RelayUrl = None,
    store_url: StoreUrl = None,
) -> None:
    """Publish those of sinks and NATS consumers again, with their Nats-Msg-Id; put others back."""
    if bool(numbers) == everything:
        raise fail("name dead letters by their numbers, or add --all (of a --sink, a --consumer)")
    with errors(), _letters(config, url, store_url) as letters:
        _check_names(letters, sink, consumer)
        from penstock.desired.actions import Action, of_letters
        from penstock.trial.replay import Replay

        meant: Iterable[StoredLetter] = (
            (_letter(letters.store, number) for number in numbers)
            if numbers
            else _all_letters(letters.store, sink, consumer)
        )
        lines: dict[tuple[str, str], Also] = {}
        with Replay(letters.store, letters.configuration) as replay:
            for letter in meant:
                _check_owner(letters, letter, sink, consumer)
                of = of_letters(letter.sink, letter.consumer)
                if of not in lines:
                    lines[of] = Action(*of, "replay dead letters").counting(letters.store)
                replay.send(letter, lines[of])
                typer.echo(f"Replayed {letter.id}, of {letters.owner(letter)}.")
    if not lines:
        typer.echo("There is nothing to replay.")


@dead_letters.command("purge")
def purge_letters(
    numbers: Numbers = None,
    sink: SinkName = None,
    consumer: ConsumerName = None,
    replayed: Annotated[bool, typer.Option("--replayed", help="Replayed ones alone.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm that they are deleted.")] = False,
    config: ConfigFile = CONFIG,
    url: RelayUrl = None,
    store_url: StoreUrl = None,
) -> None:
    """Delete dead letters for ever: those that fit all that is given, or all of them."""
    from penstock.desired.actions import note_action, of_letters

    with errors(), _letters(config, url, store_url) as letters:
        _check_names(letters, sink, consumer)
        named = [_letter(letters.store, number) for number in numbers or ()]
        for letter in named:
            _check_owner(letters, letter, sink, consumer)
        if not yes:
            which = "these" if numbers or sink or consumer or replayed else "all"
            raise fail(f"purge deletes {which} dead letters for ever: add --yes to do it")
        done: Counter[tuple[str, str]] = Counter()
        everything: list[tuple[str | None, str | None, int | None]] = [(sink, consumer, None)]
        chosen = [(letter.sink, letter.consumer, letter.id) for letter in named]
        with letters.store.transaction():
            for of_sink, of_consumer, number in chosen or everything:
                done[of_letters(of_sink, of_consumer)] += letters.store.letters.purge(
                    of_sink, of_consumer, number, replayed=replayed or None
                )
            for of, count in (+done).items():
                note_action(letters.store, *of, "drop dead letters", {"count": count})
    count = done.total()
    typer.echo(f"Deleted {count} dead letter{'' if count == 1 else 's'}.")


def _all_letters(store: Store, sink: str | None, consumer: str | None) -> Iterator[StoredLetter]:
    """Give the letters that were not replayed, page by page."""
    offset = 0
    while page := store.letters.page(sink, consumer, 500, offset):
        offset += len(page)
        yield from (letter for letter in page if letter.replayed_at is None)


def _letter(store: Store, number: int) -> StoredLetter:
    letter = store.letters.get(number)
    if letter is None:
        raise fail(f"there is no dead letter {number}; `penstock dead-letters list` has them")
    return letter


def _check_owner(
    letters: _Letters, letter: StoredLetter, sink: str | None, consumer: str | None
) -> None:
    if sink not in (None, letter.sink) or consumer not in (None, letter.consumer):
        raise fail(f"dead letter {letter.id} belongs to {letters.owner(letter)}")


def _check_names(letters: _Letters, sink: str | None, consumer: str | None) -> None:
    """End the command where there is no sink or consumer of a name, rather than find nothing."""
    if sink is not None and consumer is not None:
        raise fail("a dead letter is of a sink or of a consumer: give --sink or --consumer")
    store = letters.store
    if sink is not None and not store.letters.page(sink=sink, limit=1):
        names = letters.sinks()
        if sink not in names:
            if sink in _consumers(store):
                raise fail(f"{sink!r} is a consumer, and no sink: give --consumer {sink}")
            raise fail(unknown("sink", sink, names, "the configuration has none"))
    if consumer is not None and not store.letters.page(consumer=consumer, limit=1):
        names = _consumers(store)
        if consumer not in names:
            raise fail(unknown("consumer", consumer, names, "the store has none yet"))


def _described(letter: StoredLetter) -> dict[str, Any]:
    described = dataclasses.asdict(letter)
    del described["message"]
    return described
