"""`penstock api`: the API alone, any number of them over one store."""

from __future__ import annotations

import signal

import structlog

from penstock.api.app import Api, add_health
from penstock.api.manage.context import Tools
from penstock.api.server import Uvicorn, address, bind
from penstock.core import garbage
from penstock.core import log as logging
from penstock.streams.store import Store

log = structlog.get_logger("penstock")


def serve(
    store_url: str, listen: str, tools: Tools | None = None, records_url: str | None = None
) -> int:
    """Serve the store's streams at `listen` until SIGTERM or Ctrl-C; return the exit code.

    `tools` and `records_url` are those of `Api`. Raises `StoreError` where the store can't be used, and
    `ListenError`.
    """
    logging.configure()
    Store.open(store_url).close()  # its schema is made or migrated
    app = Api(store_url, tools=tools, records_url=records_url)
    add_health(app)
    garbage.collect_seldom()
    bound = bind(listen)
    log.info("serving", address=f"http://{address(bound)}", docs=f"http://{address(bound)}/docs")
    server = Uvicorn(app)

    def stop(*_: object) -> None:
        server.should_exit = True

    # Uvicorn raises the signal that ended it again: it should find these and not end the process.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    server.run([bound])
    log.info("ended")
    return 0
