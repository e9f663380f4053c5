"""All webhooks of a store, delivered by one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from penstock.config.bastion import Bastion
from penstock.config.consumers import WebhookSettings
from penstock.push.errors import EndpointError
from penstock.push.webhook import Webhook
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerInfo, StoreUnavailable, UnknownConsumer

_LOOK_SECONDS: Final = 30.0  # also where no change was announced
_AGAIN_SECONDS: Final = 1.0
_AFTER_BUG_SECONDS: Final = 10.0

log = structlog.get_logger("penstock")


class Pusher:
    """Delivers to every webhook consumer that is not disabled, as they come, change and go."""

    def __init__(self, consumers: Consumers) -> None:
        self._consumers = consumers
        self._changed = asyncio.Event()
        self._webhooks: dict[int, _Running] = {}
        consumers.on_change(self._changed.set)

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until `stop` is set; what is under way then is given a few seconds."""
        stopping = asyncio.create_task(self._stop(stop))
        logged = False
        try:
            while not stop.is_set():
                wait = _LOOK_SECONDS
                self._changed.clear()
                try:
                    self._match(await self._consumers.list())
                    logged = False
                except StoreUnavailable as error:
                    wait = _AGAIN_SECONDS
                    if not logged:
                        log.warning("webhooks wait for the store", error=str(error))
                    logged = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._changed.wait()
        finally:
            stopping.cancel()
            for running in self._webhooks.values():
                running.stop()
            tasks = [running.task for running in self._webhooks.values()]
            await asyncio.gather(stopping, *tasks, return_exceptions=True)

    async def _stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._changed.set()

    def _match(self, infos: list[ConsumerInfo]) -> None:
        """Start what should run, and stop what should not; what changed starts anew when it ended."""
        desired = {info.id: info for info in infos if info.type == "webhook" and not info.disabled}
        for number, running in self._webhooks.items():
            info = desired.get(number)
            if info is None or (info.name, info.settings) != running.serves:
                running.stop()
        for number, info in desired.items():
            if number not in self._webhooks and isinstance(info.settings, WebhookSettings):
                running = _Running(self._consumers, info.name, info.settings)
                self._webhooks[number] = running
                running.task.add_done_callback(lambda _, number=number: self._ended(number))  # type: ignore[misc]  # mypy infers no lambda with a default

    def _ended(self, number: int) -> None:
        del self._webhooks[number]
        self._changed.set()


class _Running:
    """A webhook's task, and what it was started with."""

    def __init__(self, consumers: Consumers, name: str, settings: WebhookSettings) -> None:
        self.serves = (name, settings)
        self._consumers = consumers
        self._stopped = asyncio.Event()
        self._webhook: Webhook | None = None
        self.task = asyncio.create_task(self._run(name, settings))

    def stop(self) -> None:
        self._stopped.set()
        if self._webhook is not None:
            self._webhook.stop()

    def _bastion(self, settings: WebhookSettings) -> Callable[[], Awaitable[Bastion]] | None:
        via = settings.via
        if via is None or via.bastion is None:
            return None
        return partial(self._completed, via.bastion.of(via.name))

    async def _completed(self, bastion: Bastion) -> Bastion:
        """Ask the store for the keys each time: a host key may be pinned meanwhile."""
        try:
            return await self._consumers.bastion(bastion)
        except StoreUnavailable as error:
            raise EndpointError("store_unavailable", str(error)) from None

    async def _run(self, name: str, settings: WebhookSettings) -> None:
        try:
            self._webhook = Webhook(
                await self._consumers.get(name), settings, self._bastion(settings)
            )
            if not self._stopped.is_set():
                await self._webhook.run()
            return
        except UnknownConsumer:
            return
        except StoreUnavailable:
            wait = _AGAIN_SECONDS
        except Exception:
            log.exception("webhook broke off, and is started anew", consumer=name)
            wait = _AFTER_BUG_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._stopped.wait()
