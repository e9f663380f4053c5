"""`penstock try`: messages through one sink's filter, transform and route, and nothing delivered."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import Raw

from penstock.cli.common import (
    CONFIG,
    AsJson,
    ConfigFile,
    StoreUrl,
    errors,
    fail,
    missing,
    note_failure,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console

    from penstock.config.settings import Config
    from penstock.trial.trial import Trial, TrialOutcome

_MARKS = {
    "sent": ("→", "green"),
    "dropped": ("∅", "yellow"),
    "passed by": ("∅", "dim"),
    "failed": ("✗", "bold red"),
}


def try_sink(
    sink: Annotated[str, typer.Option("--sink", help="The sink whose steps are tried.")],
    message: Annotated[
        str | None,
        typer.Option(help="A file with messages as JSON: one, a list, or one a line. - is stdin."),
    ] = None,
    live: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Wait for this many changes of the sink's tables."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that --live waits; then what came is tried.")
    ] = 60,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show what a sink would send of messages, and where to, without delivering anything.

    Ends with 1 if a message failed, as it would be dead-lettered.
    """
    if (message is None) == (live is None):
        raise fail(
            "give either --message FILE (- for stdin), with messages such as "
            '{"record": {"id": 1}, "action": "insert"}, or --live N for the next N changes',
            2,
        )
    from penstock.desired.with_file import configured

    with errors():
        found = configured(config, store_url)
        note_failure(found)
        if sink not in found.config.sinks:
            raise fail(missing(found, "sink", sink, found.config.sinks), 2)
        raise typer.Exit(_run(found.config, sink, message, live, timeout, as_json=as_json))


def _run(
    config: Config,
    sink: str,
    message: str | None,
    live: int | None,
    timeout: float,
    *,
    as_json: bool,
) -> int:
    batch = None if message is None else _given(config, sink, message)
    trial = _made(config, sink)
    try:
        if live is not None:
            batch = _captured(config, sink, trial, live, timeout)
        if batch is None:
            typer.echo(f"No change of the sink's tables came in {timeout:g} s.", err=True)
            return 0
        outcomes = []
        for outcome in trial(batch):
            outcomes.append(outcome)
            if not as_json:
                _show(outcome, len(outcomes))
    finally:
        trial.close()
    if as_json:
        from penstock.trial.trial import described

        typer.echo(msgspec.json.encode([described(outcome) for outcome in outcomes]))
    else:
        _sum_up(outcomes)
    return int(any(outcome.result == "failed" for outcome in outcomes))


def _given(config: Config, sink: str, file: str) -> pa.RecordBatch:
    from penstock.trial import messages

    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise fail(f"--message {file}: it cannot be read: {error.strerror}", 2) from None
    settings = config.sinks[sink]
    try:
        return messages.read(text, config.sources[settings.source], settings)
    except messages.MessageError as error:
        raise fail(f"--message {file}: {error}", 2) from None


def _made(config: Config, sink: str) -> Trial:
    from penstock import transforms
    from penstock.expressions import ExpressionError
    from penstock.transforms.base import TransformError
    from penstock.trial.trial import Trial

    try:
        # Ctrl-C ends one that never ends, and the time it takes is its own.
        return Trial(config, sink, lambda text: typer.echo(text, err=True), transforms.make)
    except TransformError as error:
        raise fail(f"sinks.{sink}.transform: {error}", 2) from None
    except ExpressionError as error:
        raise fail(str(error), 2) from None


def _captured(
    config: Config, sink: str, trial: Trial, count: int, timeout: float
) -> pa.RecordBatch | None:
    from penstock.trial import live

    def ready() -> None:
        changes = "the next change" if count == 1 else f"the next {count} changes"
        typer.echo(f"Waiting for {changes}, {timeout:g} s at most …", err=True)

    source = config.sources[config.sinks[sink].source]
    return live.read(source, trial.select, count, timeout, ready)


def _show(outcome: TrialOutcome, number: int) -> None:
    from rich.text import Text

    console = _console()
    mark, style = _MARKS[outcome.result]
    took = f"  {outcome.seconds * 1_000:.2f} ms"
    console.print(Text.assemble((f"{number}  in   ", "bold"), _brief(outcome.message)))
    for sent in outcome.out:
        to = f"{sent.to}  " if sent.to is not None else ""
        body = _brief(sent.body, outcome.message)
        console.print(Text.assemble((f"   {mark} out  ", style), (to, "cyan"), body, (took, "dim")))
        took = ""
    if outcome.result != "sent":
        code = f" ({outcome.code})" if outcome.code else ""
        text = f"{outcome.result}{code}: {outcome.why}"
        console.print(Text.assemble((f"   {mark} ", style), (text, style), (took, "dim")))


def _brief(message: str, before: str | None = None) -> str:
    """Return a message in short: of its metadata only what differs from `before`."""
    from penstock.transforms.json_values import decode_raw, encode

    fields = decode_raw(message)
    metadata = decode_raw(fields.pop("metadata"))
    if before is None:
        fields["metadata"] = Raw(
            encode({name: metadata[name] for name in ("table_schema", "table_name")})
        )
    else:
        known = {n: bytes(v) for n, v in decode_raw(decode_raw(before)["metadata"]).items()}
        # What the sink adds to each message is no part of the question.
        known |= {name: bytes(metadata[name]) for name in ("consumer", "route") if name in metadata}
        new = {n: v for n, v in metadata.items() if known.get(n) != bytes(v)}
        if new:
            fields["metadata"] = Raw(encode(new))
    if bytes(fields.get("changes", Raw(b"null"))) == b"null":
        fields.pop("changes", None)
    return encode(fields).decode()


def _sum_up(outcomes: list[TrialOutcome]) -> None:
    counts = {result: sum(o.result == result for o in outcomes) for result in _MARKS}
    sent = sum(len(outcome.out) for outcome in outcomes)
    parts = [f"{len(outcomes)} in, {sent} out"]
    parts += [f"{n} {result}" for result, n in counts.items() if n and result != "sent"]
    milliseconds = 1_000 * sum(outcome.seconds for outcome in outcomes) / max(len(outcomes), 1)
    typer.echo(f"{', '.join(parts)}; {milliseconds:.2f} ms each. Nothing was delivered.")


def _console() -> Console:
    from rich.console import Console

    # Messages are there to be copied, so lines are not folded to the terminal's width.
    return Console(soft_wrap=True, highlight=False)
