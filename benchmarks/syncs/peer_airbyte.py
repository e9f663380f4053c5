"""airbyte-cdk, as a process of its own: `python peer_airbyte.py SPEC.json`.

Runs under the Python that `penstock sync airbyte install` makes, and has nothing of Penstock. It reads
the list by a declarative manifest, and writes its messages as JSON lines, as a source of Airbyte does:
it begins at a line from its standard input, and prints when the last line was written, in Unix time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from airbyte_cdk.entrypoint import launch
from airbyte_cdk.sources.declarative.concurrent_declarative_source import (
    ConcurrentDeclarativeSource,
)

STREAM = "contacts"


def main() -> None:
    """Read as the spec says."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(spec["folder"])
    (folder / "config.json").write_text("{}")
    (folder / "catalog.json").write_text(json.dumps(_catalog()))
    files = ["--config", str(folder / "config.json"), "--catalog", str(folder / "catalog.json")]
    clock = os.dup(1)
    with Path(spec["output"]).open("wb") as output:
        os.dup2(output.fileno(), 1)  # where a source of Airbyte's writes
    source = ConcurrentDeclarativeSource(
        config={}, catalog=None, state=None, source_config=_manifest(spec)
    )
    sys.stdin.readline()
    try:
        launch(source, ["read", *files])
    except SystemExit:
        said = Path(spec["output"]).read_text(errors="replace").splitlines()
        print(*said[-1:], file=sys.stderr)  # it has why
        raise
    sys.stdout.flush()
    os.write(clock, f"{time.time()}\n".encode())


def _catalog() -> dict[str, Any]:
    stream = {"name": STREAM, "json_schema": {}, "supported_sync_modes": ["full_refresh"]}
    return {
        "streams": [
            {"stream": stream, "sync_mode": "full_refresh", "destination_sync_mode": "append"}
        ]
    }


def _manifest(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": "6.0.0",
        "type": "DeclarativeSource",
        "check": {"type": "CheckStream", "stream_names": [STREAM]},
        "streams": [
            {
                "type": "DeclarativeStream",
                "name": STREAM,
                "primary_key": ["id"],
                "retriever": {
                    "type": "SimpleRetriever",
                    "requester": {
                        "type": "HttpRequester", "url_base": spec["api"], "path": spec["path"],
                        "http_method": "GET", "request_parameters": {"limit": str(spec["page"])},
                    },
                    "record_selector": {
                        "type": "RecordSelector",
                        "extractor": {"type": "DpathExtractor", "field_path": ["data"]},
                    },
                    "paginator": {
                        "type": "DefaultPaginator",
                        "page_token_option": {
                            "type": "RequestOption", "inject_into": "request_parameter",
                            "field_name": "cursor",
                        },
                        "pagination_strategy": {
                            "type": "CursorPagination",
                            "cursor_value": "{{ response.cursors.next }}",
                            "stop_condition": "{{ not response.cursors.next }}",
                        },
                    },
                },
                "schema_loader": {
                    "type": "InlineSchemaLoader", "schema": {"type": "object", "properties": {}},
                },
            }
        ],
        "spec": {"type": "Spec", "connection_specification": {"type": "object", "properties": {}}},
    }  # fmt: skip


if __name__ == "__main__":
    main()
