"""`penstock token` and `penstock dead-letters`: what is kept in the store, by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli_common import (
    CONFIG,
    AsJson,
    ConfigFile,
    errors,
    fail,
    json_text,
    print_table,
)

if TYPE_CHECKING:
    from penstock.streams.store import Store, StoredLetter

tokens = typer.Typer(help="Make, list and revoke the API's tokens.", no_args_is_help=True)
dead_letters = typer.Typer(
    help="Look at what could not be delivered, deliver it again, or delete it.",
    no_args_is_help=True,
)

SinkName = Annotated[str | None, typer.Option("--sink", help="Those of this sink alone.")]
ConsumerName = Annotated[
    str | None, typer.Option("--consumer", help="Those of this consumer alone.")
]
Numbers = Annotated[list[int] | None, typer.Argument(help="Their numbers.", show_default=False)]


@contextlib.contextmanager
def opened(config: Path) -> Iterator[str]:
    """Give the URL of the store that a file names, or of the embedded one, which then runs."""
    from penstock.config import load_store  # noqa: PLC0415
    from penstock.embedded.store import open_store  # noqa: PLC0415

    with open_store(load_store(config)) as url:
        yield url


@contextlib.contextmanager
def _store(config: Path) -> Iterator[Store]:
    from penstock.streams.store import Store  # noqa: PLC0415

    with opened(config) as url, Store.open(url) as store:
        yield store


# -- token


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="What to call it: a worker, a person.")],
    role: Annotated[
        str, typer.Option(help="worker: receive and ack; admin: everything.")
    ] = "worker",
    consumer: Annotated[
        list[str] | None,
        typer.Option("--consumer", help="A consumer that it may use; repeatable. Without: all."),
    ] = None,
    config: ConfigFile = CONFIG,
) -> None:
    """Make a token and print it, this once: the store keeps its hash alone."""
    from penstock.settings import nearest  # noqa: PLC0415
    from penstock.streams.consumer_settings import NAME  # noqa: PLC0415

    if not re.match(NAME, name):
        raise fail(f"{name!r} is not a name: expected letters, digits, `_`, `.` and `-`")
    if role not in ("worker", "admin"):
        raise fail(f"--role {role}: expected worker or admin{nearest(role, ('worker', 'admin'))}")
    if role == "admin" and consumer:
        raise fail("an admin may use every consumer: leave --consumer out, or --role admin")
    with errors(), _store(config) as store:
        known = [found.name for found in store.consumers()]
        token = store.create_token(name, role, consumer or None)
    typer.echo(token)
    allowed = "every consumer" if not consumer else f"consumer {', '.join(consumer)}"
    typer.echo(
        f"Token {name}: {role}, {allowed}. It is not shown again. "
        "Send it as the header `Authorization: Bearer pst_…`.",
        err=True,
    )
    for missing in (each for each in consumer or () if each not in known):
        hint = nearest(missing, known)
        typer.echo(f"Note: there is no consumer {missing!r} so far{hint}", err=True)


@tokens.command("list")
def list_tokens(config: ConfigFile = CONFIG, as_json: AsJson = False) -> None:
    """List all tokens, revoked ones too; not what they are, which nobody can tell any more."""
    with errors(), _store(config) as store:
        found = store.tokens()
    if as_json:
        typer.echo(json_text([dataclasses.asdict(token) for token in found]))
        return
    print_table(
        ("name", "role", "consumers", "created", "revoked"),
        [
            (t.name, t.role, ", ".join(t.consumers or ("all",)), t.created_at, t.revoked_at)
            for t in found
        ],
    )


@tokens.command("revoke")
def revoke_token(
    name: Annotated[str, typer.Argument(help="The token's name.")], config: ConfigFile = CONFIG
) -> None:
    """Make a token worthless, at once and for ever."""
    from penstock.settings import nearest  # noqa: PLC0415

    with errors(), _store(config) as store:
        if not store.revoke_token(name):
            live = {token.name: token.revoked_at is None for token in store.tokens()}
            if name in live:
                raise fail(f"token {name!r} is revoked already")
            hint = nearest(name, [token for token, is_live in live.items() if is_live])
            raise fail(f"there is no token {name!r}{hint}; `penstock token list` has them")
    typer.echo(f"Revoked {name}.")


# -- dead-letters


@dead_letters.command("list")
def list_letters(
    sink: SinkName = None,
    consumer: ConsumerName = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the oldest first.")] = 100,
    config: ConfigFile = CONFIG,
    as_json: AsJson = False,
) -> None:
    """List dead letters, without their messages."""
    with errors(), _store(config) as store:
        _check_names(store, config, sink, consumer)
        found = store.dead_letters(sink, consumer, limit + 1)
    more = len(found) > limit
    del found[limit:]
    if as_json:
        typer.echo(json_text([_described(letter) for letter in found]))
    else:
        print_table(
            ("number", "of", "at", "code", "reason", "replayed"),
            [(x.id, _owner(x), x.at, x.code, x.reason, x.replayed_at) for x in found],
        )
    if more:
        typer.echo(f"There are more than these {limit}: see --limit.", err=True)


@dead_letters.command("show")
def show_letter(
    number: Annotated[int, typer.Argument(help="Its number, from the list.")],
    config: ConfigFile = CONFIG,
    as_json: AsJson = False,
) -> None:
    """Show all of one dead letter, its message too."""
    with errors(), _store(config) as store:
        letter = _letter(store, number)
    if as_json:
        typer.echo(json_text({**_described(letter), "message": letter.message}))
        return
    for key, value in _described(letter).items():
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
) -> None:
    """Publish a sink's again, with their Nats-Msg-Id; put a consumer's back into it."""
    from penstock.replay import Replay  # noqa: PLC0415

    if bool(numbers) == everything:
        raise fail("name dead letters by their numbers, or say --all (of a --sink, a --consumer)")
    with errors(), _store(config) as store:
        _check_names(store, config, sink, consumer)
        letters: Iterable[StoredLetter] = (
            (_letter(store, number) for number in numbers)
            if numbers
            else _all_letters(store, sink, consumer)
        )
        count = 0
        with Replay(store, config) as replay:
            for letter in letters:
                _check_owner(letter, sink, consumer)
                replay.send(letter)
                count += 1
                typer.echo(f"Replayed {letter.id}, of {_owner(letter)}.")
    if not count:
        typer.echo("There is nothing to replay.")


@dead_letters.command("purge")
def purge_letters(
    numbers: Numbers = None,
    sink: SinkName = None,
    consumer: ConsumerName = None,
    replayed: Annotated[bool, typer.Option("--replayed", help="Replayed ones alone.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do delete them.")] = False,
    config: ConfigFile = CONFIG,
) -> None:
    """Delete dead letters for ever: those that fit all that is given, or all of them."""
    with errors(), _store(config) as store:
        _check_names(store, config, sink, consumer)
        for number in numbers or ():
            _check_owner(_letter(store, number), sink, consumer)
        if not yes:
            which = "these" if numbers or sink or consumer or replayed else "all"
            raise fail(f"purge deletes {which} dead letters for ever: add --yes to do it")
        count = sum(
            store.purge(sink, consumer, number, replayed=replayed) for number in numbers or (None,)
        )
    typer.echo(f"Deleted {count} dead letter{'' if count == 1 else 's'}.")


def _all_letters(store: Store, sink: str | None, consumer: str | None) -> Iterator[StoredLetter]:
    """Give the letters that were not replayed, page by page."""
    offset = 0
    while page := store.dead_letters(sink, consumer, 500, offset):
        offset += len(page)
        yield from (letter for letter in page if letter.replayed_at is None)


def _letter(store: Store, number: int) -> StoredLetter:
    letter = store.dead_letter(number)
    if letter is None:
        raise fail(f"there is no dead letter {number}; `penstock dead-letters list` has them")
    return letter


def _owner(letter: StoredLetter) -> str:
    return f"sink {letter.sink}" if letter.sink is not None else f"consumer {letter.consumer}"


def _check_owner(letter: StoredLetter, sink: str | None, consumer: str | None) -> None:
    if sink not in (None, letter.sink) or consumer not in (None, letter.consumer):
        raise fail(f"dead letter {letter.id} is of {_owner(letter)}")


def _check_names(store: Store, config: Path, sink: str | None, consumer: str | None) -> None:
    """End the command where there is no sink or consumer of a name, rather than find nothing."""
    from penstock.config import sink_names  # noqa: PLC0415
    from penstock.settings import nearest  # noqa: PLC0415

    if sink is not None and consumer is not None:
        raise fail("a dead letter is of a sink or of a consumer: give --sink or --consumer")
    if sink is not None and not store.dead_letters(sink=sink, limit=1):
        names = sink_names(config)
        if sink not in names:
            expected = f"expected one of {', '.join(names)}" if names else f"{config} has none"
            raise fail(f"there is no sink {sink!r}: {expected}{nearest(sink, names)}")
    if consumer is not None:
        names = [found.name for found in store.consumers()]
        if consumer not in names:
            expected = f"expected one of {', '.join(names)}" if names else "the store has none yet"
            raise fail(f"there is no consumer {consumer!r}: {expected}{nearest(consumer, names)}")


def _described(letter: StoredLetter) -> dict[str, Any]:
    described = dataclasses.asdict(letter)
    del described["message"]
    return described
