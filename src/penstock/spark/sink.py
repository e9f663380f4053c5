"""The PySpark data source `jetstream`: a streaming DataFrame of messages into NATS JetStream.

    spark.dataSource.register(JetStream)
    messages.writeStream.format("jetstream").options(url="nats://localhost:4222").start()

It takes the columns that `postgres-changes` gives (`record`, `changes`, `action`, `metadata`, and the
group hashes where they are present), and publishes as the NATS sink of `penstock run` does.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import structlog
from pydantic import Field, ValidationError
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.config.nats import NatsSinkConfig
from penstock.config.strict import Untyped
from penstock.core import log as logging
from penstock.core.delivery import DeadLetter
from penstock.core.errors import SinkError
from penstock.core.message import WIRE_SCHEMA
from penstock.sinks.nats.sink import NatsSink
from penstock.spark.dead_letters import DeadLetterFiles
from penstock.spark.message_schema import to_wire

_SPARKS_OWN: Final = frozenset(
    {
        "path",
        "checkpointlocation",
        "queryname",
        "asyncprogresstrackingenabled",
        "asyncprogresstrackingcheckpointintervalms",
        "_asyncprogresstrackingoverridesinksupportcheck",
    }
)
_REQUIRED: Final = ("record", "changes", "action", "metadata")

log = structlog.get_logger("penstock.jetstream")


class SinkOptions(NatsSinkConfig):
    """What may stand in `.options(…)`: the NATS sink's settings, and what `penstock.yaml` would hold."""

    source: str = "spark"
    """Value of `{source}` in the subject."""
    name: str = "jetstream"
    """The sink's name, in `metadata.consumer` and the dead letters' file."""
    deadletters: Path = Field(Path(".penstock/dead-letters"))
    """Folder, on the driver, for messages that no server would take."""
    retry_timeout: float | None = Field(None, gt=0)
    """Seconds of an error that lasts after which the batch fails with it; never if unset."""


class JetStream(DataSource):
    """Messages into JetStream: each is acked, or a dead letter, before its batch is done.

    Options: see `SinkOptions` and `penstock.config.nats.NatsSinkConfig`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "jetstream"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: ARG002 - pyspark's
        """Return the writer; raises `ValueError` for wrong options or missing columns."""
        missing = [name for name in _REQUIRED if name not in schema.fieldNames()]
        if missing:
            raise ValueError(
                f"jetstream needs the columns of postgres-changes; {', '.join(missing)} missing from"
                f" {', '.join(schema.fieldNames())}. Change a message's record with withColumn, and"
                " keep the others."
            )
        return JetStreamWriter(_options(self.options))


@dataclass
class Published(WriterCommitMessage):
    """What one task published."""

    dead: list[DeadLetter] = field(default_factory=list)


class JetStreamWriter(DataSourceStreamArrowWriter):
    """Writes a task's batches through a `NatsSink` that its worker process keeps."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish; runs in an executor."""
        sink, patience = _sink(self._options)
        published = Published()
        for batch in iterator:
            wire = batch if batch.schema.names == WIRE_SCHEMA.names else to_wire(batch)
            patience.rest()
            published.dead.extend(sink.write(wire).dead)
        return published

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002 - pyspark's
        """Make the batch's dead letters durable; runs beside the driver."""
        letters = [
            asdict(letter)
            for message in messages
            if isinstance(message, Published)
            for letter in message.dead
        ]
        if letters:
            DeadLetterFiles(self._options.deadletters).append(self._options.name, letters)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: what was published stays, and the batch's next run repeats it harmlessly."""


def _options(options: Mapping[str, str]) -> SinkOptions:
    given: dict[str, Any] = {
        key.lower(): Untyped(value)
        for key, value in options.items()
        # Spark's own options reach the sink too.
        if key.lower() not in _SPARKS_OWN
    }
    if isinstance(given.get("group_by"), str):
        given["group_by"] = [part.strip() for part in given["group_by"].split(",")]
    try:
        return SinkOptions.model_validate(given)
    except ValidationError as error:
        faults = "; ".join(
            f"option {'.'.join(map(str, e['loc'])) or 'combination'}: {e['msg']}"
            for e in error.errors(include_input=False)
        )
        raise ValueError(
            f"{faults} (jetstream takes {', '.join(SinkOptions.model_fields)})"
        ) from None


class _Patience:
    """Warns of each kind of error once, and raises it once `retry_timeout` is over."""

    def __init__(self, options: SinkOptions) -> None:
        self._timeout = options.retry_timeout
        self._name = options.name
        self.since: float | None = None
        self.reported: set[str] = set()

    def on_retry(self, error: SinkError, seconds: float) -> None:
        if self.since is None:
            self.since = time.monotonic()
        if error.code not in self.reported:
            self.reported.add(error.code)
            log.warning("sink held up", sink=self._name, code=error.code, error=str(error),
                        retry_in=round(seconds, 1))  # fmt: skip

    def is_over(self) -> bool:
        since = self.since
        if self._timeout is None or since is None:
            return False
        return time.monotonic() - since > self._timeout

    def rest(self) -> None:
        self.since = None
        self.reported.clear()


_sinks: dict[bytes, tuple[NatsSink, _Patience]] = {}


def _sink(options: SinkOptions) -> tuple[NatsSink, _Patience]:
    # A worker process serves every query of its driver, and keeps a sink for each set of options.
    key = pickle.dumps(options)
    if key not in _sinks:
        logging.configure()
        patience = _Patience(options)
        sink = NatsSink(
            options, name=options.name, source=options.source,
            on_retry=patience.on_retry, should_stop=patience.is_over,
        )  # fmt: skip
        _sinks[key] = sink, patience
    return _sinks[key]
