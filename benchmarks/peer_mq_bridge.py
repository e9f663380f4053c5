"""mq-bridge, Postgres CDC to JetStream, as a process: `python peer_mq_bridge.py SPEC.json`.

Runs under the benchmark's interpreter, which has mq-bridge and nothing of Penstock. One route reads
an existing slot and publishes to a stream that the harness made, with the message id as
`Nats-Msg-Id`, and waits for the acks: what Penstock does too.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import mq_bridge


def route(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the route; `spec["settings"]` holds what this run changes of the defaults."""
    return {
        "input": {
            "postgres_cdc": {
                "url": spec["url"],
                "publication": spec["publication"],
                "slot_name": spec["slot"],
                "create_slot": False,
            }
        },
        "output": {
            "nats": {
                "url": spec["nats_url"],
                "stream": spec["stream"],
                "subject": spec["subject"],
                "deduplicate": True,
            }
        },
        "startup_timeout_ms": 30_000,
        **spec["settings"],
    }


def main() -> None:
    """Run until SIGTERM."""
    # Blocked before the route makes its threads, so that all of them leave the signals to sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    logging.basicConfig(level=logging.WARNING)
    mq_bridge.init_logging("warn")
    running = mq_bridge.Route.from_config(route(json.loads(Path(sys.argv[1]).read_text())))
    running.start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    running.stop()
    running.join()


if __name__ == "__main__":
    main()
