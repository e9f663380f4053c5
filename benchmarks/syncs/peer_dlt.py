"""dlt's own pipeline, as a process of its own: `python peer_dlt.py SPEC.json`.

Runs under the benchmark's interpreter, which has dlt and nothing of Penstock. It reads the list so many
times, each time into the same table: it begins at a line from its standard input, and prints when the
load was complete, in Unix time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import dlt
from dlt.sources.rest_api import rest_api_resources


def main() -> None:
    """Load as the spec says."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(spec["environment"])
    pipeline = dlt.pipeline(
        "bench",
        pipelines_dir=spec["folder"],
        destination=dlt.destinations.postgres(spec["database"]),
        dataset_name=spec["dataset"],
    )
    nesting = {} if spec["nesting"] is None else {"max_table_nesting": spec["nesting"]}
    for _ in range(spec["times"]):
        sys.stdin.readline()
        config: Any = {
            "client": {
                "base_url": spec["api"],
                "paginator": {
                    "type": "cursor", "cursor_path": "cursors.next", "cursor_param": "cursor",
                },
            },
            "resource_defaults": {
                "primary_key": "id", "write_disposition": spec["write_disposition"],
            },
            "resources": [
                {
                    "name": spec["path"],
                    **nesting,
                    "endpoint": {
                        "path": spec["path"], "data_selector": "data",
                        "params": {"limit": spec["page"]},
                    },
                }
            ],
        }  # fmt: skip
        resources = rest_api_resources(config)
        pipeline.run(resources, loader_file_format=spec["loader_file_format"])
        print(time.time(), flush=True)


if __name__ == "__main__":
    main()
