"""One sink's filter, transform and route over messages: what it would send, and where to.

All is done by what the pipeline does it with: Spark for expressions, `Steps` for the rest, the sink's
own encoder for what is sent. Only the connection to the sink is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
from msgspec import Raw

from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings, Sink, SinkSettings
from penstock.config.transforms import TransformSettings
from penstock.core.blocks import Block, pack, unpack, with_fields
from penstock.core.json_members import members, text_of
from penstock.core.message import DELETE, READ
from penstock.core.record_forms import EVENTS, form_of
from penstock.expressions.fields import Extractor
from penstock.sinks.nats.frames import Encoder
from penstock.spark.plan import ExpressionPlan, plan
from penstock.spark.planning import needed_columns
from penstock.spark.routes import Route
from penstock.spark.sink_plan import DROP, SinkPlan
from penstock.spark.steps import Steps
from penstock.transforms import isolated
from penstock.transforms.base import MessageTransform

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Result = Literal["sent", "dropped", "failed", "passed by"]
_LINE: Final = b"\r\n"
_ID: Final = "\r\nNats-Msg-Id: "


@dataclass(frozen=True)
class SentMessage:
    """A message as the sink would send it; `to` is its subject or path, None where it has none.

    Of a NATS message `key` is its `Nats-Msg-Id`, and `headers` are those that the message itself has,
    each with the line end behind it.
    """

    body: str
    to: str | None
    key: str = ""
    headers: str = ""


@dataclass(frozen=True)
class TrialOutcome:
    """What became of a message: `why` is the reason where it is not sent, `code` where it failed.

    `seconds` are those of its transform and route; Spark's are not among them.
    """

    message: str
    result: Result
    out: tuple[SentMessage, ...] = ()
    why: str = ""
    code: str = ""
    seconds: float = 0.0


class Trial:
    """A sink's steps, ready to be tried.

    Args:
        config: The configuration.
        name: The sink's name in it.
        progress: Called with what takes a while: the start of Spark.
        made_by: What makes its transform. By default Python runs in a process of its own: where
            it never ends, no other request waits for it.
        keeps_spark: Whether Spark outlives the trial, for the next one. A session that was there
            before is never ended.

    Raises:
        ExpressionError: An expression names what no table has, or does not fit its type.
        TransformError: The Lua or Python cannot be loaded.
        CaptureError: The source, which knows the columns' types, can't be reached.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        progress: Callable[[str], None],
        made_by: Callable[[TransformSettings], MessageTransform] = isolated,
        *,
        keeps_spark: bool = False,
    ) -> None:
        self._config = config
        self._ends_spark = not keeps_spark
        self._sink: Sink = config.sinks[name]
        self._progress = progress
        transform, code = self._sink.transform, None
        if transform is not None and transform.sql is None:
            code = made_by(transform)  # before the source is asked
        columns, _ = needed_columns(config.sources[self._sink.source], [self._sink])
        self._plan: ExpressionPlan | None = plan({name: self._sink}, columns)
        self._of_sink: SinkPlan | None = self._plan.sinks.get(name) if self._plan else None
        self._route = Route(name, self._sink, 0)
        self._steps = Steps(
            self._route,
            self._of_sink,
            self._sink.source,
            made_by if code is None else lambda _: code,
        )
        self._steps.start()
        self._encoder = (
            Encoder(self._sink, name, self._sink.source, b"_")
            if isinstance(self._sink, NatsSinkSettings)
            else None
        )
        self._spark: SparkSession | None = None

    def select(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages of the sink's tables and actions."""
        mask = self._route.mask(batch)
        return batch if mask is None else batch.filter(mask)

    def __call__(self, batch: pa.RecordBatch) -> Iterator[TrialOutcome]:
        """Yield what becomes of each message of a batch of `WIRE_SCHEMA`."""
        if self._plan is not None and self._plan.fields:
            blocks = list(self._evaluated(batch, self._plan))
        else:
            blocks = [Block(None, batch)]
        for block in blocks:
            for row in range(block.messages.num_rows):
                results = None if block.results is None else block.results.slice(row, 1)
                yield self._one(Block(None, block.messages.slice(row, 1), results))

    def close(self) -> None:
        """End Spark and the operator's code."""
        self._steps.close()
        if self._spark is not None and self._ends_spark:
            self._spark.stop()

    def _evaluated(self, batch: pa.RecordBatch, plan: ExpressionPlan) -> Iterator[Block]:
        """Return the messages with what Spark makes of them."""
        if self._spark is None:
            self._progress("Starting Spark …")
            from penstock.spark import session  # noqa: PLC0415 - seconds, and for expressions alone

            self._ends_spark &= not session.is_running()
            self._spark = session.create("local[1]", self._config.spark.conf, app="penstock try")
        rows = with_fields(pack(batch), Extractor(plan.fields))
        frame = self._spark.createDataFrame(pa.Table.from_batches([rows]))
        values = unpack(iter(plan.results(frame).toArrow().to_batches()))
        return (value for value in values if isinstance(value, Block))

    def _one(self, block: Block) -> TrialOutcome:
        text = _envelope(block.messages)
        if why := self._passed_by(block.messages):
            return TrialOutcome(text, "passed by", why=why)
        started = time.perf_counter()
        prepared = self._steps(block)
        seconds = time.perf_counter() - started
        if prepared.dead:
            letter = prepared.dead[0]
            return TrialOutcome(
                text, "failed", why=letter.reason, code=letter.code, seconds=seconds
            )
        if not prepared.messages.num_rows:
            by = "the filter" if self._is_filtered(block) else "the transform"
            return TrialOutcome(text, "dropped", why=f"by {by}", seconds=seconds)
        if self._encoder is None:
            out = tuple(_stored(prepared.messages, self._sink))
            return TrialOutcome(text, "sent", out, seconds=seconds)
        frames = self._encoder.block(prepared.messages, 0, 1)
        if frames.refused:
            code, why = next(iter(frames.refused.values()))
            return TrialOutcome(text, "failed", why=why, code=code, seconds=seconds)
        out = tuple(_published(bytes(frames.frame(row))) for row in range(frames.rows))
        return TrialOutcome(text, "sent", out, seconds=seconds)

    def _passed_by(self, message: pa.RecordBatch) -> str:
        """Return why the sink does not take a message at all, or nothing."""
        if self._route.mask(message) is None:
            return ""
        action = message.column("action")[0].as_py()
        if action not in (*self._sink.actions, READ):
            return f"the sink's actions are {', '.join(self._sink.actions)}"
        return f"the sink's tables are {', '.join(map(str, self._sink.patterns or ()))}"

    def _is_filtered(self, block: Block) -> bool:
        if self._of_sink is None or self._of_sink.filter is None or block.results is None:
            return False
        return bool(block.results.field(self._of_sink.keep)[0].as_py() == DROP)


def described(outcome: TrialOutcome) -> dict[str, Any]:
    """Return an outcome as JSON; messages are as they are."""
    return {
        "message": Raw(outcome.message.encode()),
        "result": outcome.result,
        "out": [{"message": Raw(s.body.encode()), "to": s.to} for s in outcome.out],
        "code": outcome.code or None,
        "why": outcome.why or None,
        "milliseconds": round(outcome.seconds * 1_000, 3),
    }


def _envelope(message: pa.RecordBatch, kind: str = "changes") -> str:
    record, changes, action, metadata = (
        message.column(name)[0].as_py() for name in ("record", "changes", "action", "metadata")
    )
    if kind == "rows":
        of_delete = ',"action":"delete"' if action == DELETE else ""
        return f'{{"record":{record}{of_delete},"metadata":{metadata}}}'
    if kind == EVENTS:
        return f'{{"event":{record},"metadata":{metadata}}}'
    return (
        f'{{"record":{record},"changes":{changes or "null"},"action":"{action}",'
        f'"metadata":{metadata}}}'
    )


def _stored(messages: pa.RecordBatch, sink: SinkSettings) -> Iterator[SentMessage]:
    for row in range(messages.num_rows):
        message = messages.slice(row, 1)
        route = members("route")(message.column("metadata")[0].as_py())["route"]
        yield SentMessage(_envelope(message, form_of(sink.source, sink.kind)), text_of(route))


def _published(frame: bytes) -> SentMessage:
    """Return what a frame of the NATS protocol would publish."""
    subject = frame.split(b" ", 2)[1]
    head, _, body = frame.partition(2 * _LINE)
    key, *headers = head.decode().partition(_ID)[2].split("\r\n")
    lines = "".join(f"{line}\r\n" for line in headers)
    return SentMessage(body.removesuffix(_LINE).decode(), subject.decode(), key, lines)
