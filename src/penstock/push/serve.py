"""`penstock push`: webhooks alone, any number of processes over one store."""

from __future__ import annotations

import asyncio
import signal

import structlog
import uvloop

from penstock.core import log as logging
from penstock.push.pusher import Pusher
from penstock.streams.consumers.registry import Consumers
from penstock.streams.store import Store

log = structlog.get_logger("penstock")


def serve(store_url: str) -> int:
    """Deliver the store's webhooks until SIGTERM or Ctrl-C; return the exit code.

    Raises `StoreError` where the store can't be used.
    """
    logging.configure()
    Store.open(store_url).close()  # its schema is made or migrated
    uvloop.run(_push(store_url))
    log.info("ended")
    return 0


async def _push(store_url: str) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    consumers = Consumers(store_url)
    await consumers.open()
    try:
        log.info("pushing")
        await Pusher(consumers).run(stop)
    finally:
        await consumers.close()
