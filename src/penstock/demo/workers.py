"""The demo's workers: they read streams over HTTP, as workers of an application would."""

from __future__ import annotations

import ssl
import time
from typing import Any

import httpx

from penstock.demo.background import Background
from penstock.demo.consumer import change_of, change_of_record
from penstock.demo.ledger import Change, Ledger

STREAM = "orders"
COUNT = 2
RECORDS = "records"
"""The stream of an API's records. A stream has one source, so that it is no part of `STREAM`."""
_BATCH = 100
_WAIT_MS = 500  # so that a worker sees within this time that it is to end
_TIMEOUT = 30.0
_RETRY = 0.2
# All addresses are http ones; without it each client reads all certificate authorities, 20 ms of CPU.
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Worker(Background):
    """Receives, enters every message in the ledger, acks."""

    def __init__(self, name: str, stream: str, base_url: str, token: str, ledger: Ledger) -> None:
        super().__init__(name)
        self.received = 0
        self.error: str | None = None
        self._ledger = ledger
        self._change_of = _record if stream == RECORDS else change_of
        self._http = httpx.Client(
            base_url=f"{base_url}/v1/streams/{stream}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=_TIMEOUT,
            trust_env=False,
            verify=_NO_TLS,
        )

    def run(self) -> None:
        """Work until `stop`."""
        try:
            with self._http:
                while not self._stopping.is_set():
                    self._step()
        except (httpx.HTTPError, ValueError, KeyError) as error:
            if not self._stopping.is_set():
                self.error = f"{type(error).__name__}: {error}"

    def _step(self) -> None:
        parameters = {"batch_size": _BATCH, "wait_for_ms": _WAIT_MS}
        answer = self._http.get("/receive", params=parameters)
        if answer.status_code == httpx.codes.NOT_FOUND and not self.received:
            self._stopping.wait(_RETRY)  # the stream of records comes with the first sync
            return
        messages = self._data(answer)
        if not messages:
            return
        now = time.perf_counter()
        for message in messages:
            self._ledger.received(self._change_of(message["data"]), now)
        self.received += len(messages)
        acks = [message["ack_id"] for message in messages]
        self._http.post("/ack", json={"ack_ids": acks}).raise_for_status()

    @staticmethod
    def _data(answer: httpx.Response) -> list[dict[str, Any]]:
        answer.raise_for_status()
        data: list[dict[str, Any]] = answer.json()["data"]
        return data


def _record(message: dict[str, Any]) -> Change:
    return change_of_record(message["record"])


def add_entities(base_url: str, token: str, document: str) -> None:
    """Add what a document has to the desired state, which the run follows; raises `HTTPError`."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/yaml"}
    with httpx.Client(
        base_url=base_url, headers=headers, timeout=_TIMEOUT, trust_env=False, verify=_NO_TLS
    ) as http:
        http.post("/v1/apply", content=document).raise_for_status()


def is_ready(url: str) -> bool:
    """Return whether the pipeline answers that it is ready."""
    try:
        answer = httpx.get(url, timeout=2, trust_env=False, verify=_NO_TLS)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK
