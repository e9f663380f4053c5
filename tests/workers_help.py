"""Workers over HTTP that note what came to them and when, and what must have been true of it.

A message is a version of a row; a group is a row, whose versions count from 1. Workers ack, nack, let
deliveries expire, ack too late, and ask again whatever was not answered.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Literal, Self

import httpx
import orjson

from .pipeline import NO_TLS

TOLERANCE: Final = 0.3
"""Seconds that a deadline may be off, as the store's clock is measured over a busy connection."""
_WAIT_MS: Final = 300  # short: a delivery is made somewhere between its request and its answer
_GIVEN_UP: Final = 60.0


@dataclass(slots=True)
class Delivery:
    """One message in one worker's hands; times are seconds of the worker's own clock."""

    group: int
    version: int
    position: str
    token: str
    sent: float
    """When the request was that it answers: its time cannot have begun before."""
    received: float
    fate: Literal["ack", "nack", "none"] = "none"
    settled: float = inf
    """When the ack or nack was first sent."""
    attempts: int = 0
    asked: float = inf
    """When it was last sent, and that was answered at `answered`."""
    answered: float = inf
    accepted: bool | None = None

    def end(self, ack_wait: float) -> float:
        """Return until when it was certainly this worker's."""
        return min(self.sent + ack_wait - TOLERANCE, self.settled)

    def in_time(self, ack_wait: float) -> bool:
        """Whether it was settled at the first attempt and before its time was over."""
        return self.attempts == 1 and self.answered < self.sent + ack_wait - TOLERANCE

    def __str__(self) -> str:
        return f"version {self.version} of {self.group} at {self.position}"


class Ledger:
    """What all workers saw."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.acked: set[tuple[int, int]] = set()
        self.broken = 0
        """Requests without an answer, or with one that the store is away."""

    def faults(self, versions: Mapping[int, int], ack_wait: float) -> list[str]:
        """Return what went wrong, given the newest version of each group."""
        groups: dict[int, list[Delivery]] = defaultdict(list)
        for delivery in sorted(self.deliveries, key=lambda d: d.received):
            groups[delivery.group].append(delivery)
        found: list[str] = []
        for group in versions.keys() | groups.keys():
            found += _faults(group, groups[group], versions.get(group, 0), ack_wait)
        return found


def _faults(group: int, deliveries: Sequence[Delivery], last: int, ack_wait: float) -> list[str]:
    found: list[str] = []
    acked: dict[int, float] = {}
    ack_sent: dict[int, float] = {}
    for each in deliveries:
        if each.fate == "ack" and each.accepted is not False:
            ack_sent[each.version] = min(each.settled, ack_sent.get(each.version, inf))
            if each.accepted:
                acked[each.version] = min(each.answered, acked.get(each.version, inf))
    found += [f"version {v} of {group} was lost" for v in range(1, last + 1) if v not in acked]
    once = Counter(
        each.version
        for each in deliveries
        if each.fate == "ack" and each.accepted and each.in_time(ack_wait)
    )
    found += [f"version {v} of {group} was acked {n} times" for v, n in once.items() if n > 1]
    held_until, holder = -inf, None
    for each in deliveries:
        if not 1 <= each.version <= last:
            found.append(f"{each} was never committed")
        if acked.get(each.version, inf) < each.sent:
            found.append(f"{each} came again after its ack")
        if each.version > 1 and ack_sent.get(each.version - 1, inf) > each.received:
            found.append(f"{each} came before the version before it was acked")
        if each.received < min(held_until, each.end(ack_wait)):
            found.append(f"{each} came while another worker held {holder}")
        if each.end(ack_wait) > held_until:
            held_until, holder = each.end(ack_wait), each
        if each.accepted is False and each.in_time(ack_wait):
            found.append(f"{each}: its {each.fate} in time was refused")
        if each.accepted and any(
            other is not each
            and other.version == each.version
            and other.received < each.asked
            and each.answered < other.end(ack_wait)
            for other in deliveries
        ):
            found.append(f"{each}: its late {each.fate} was accepted while another worker held it")
    return found


def _identity(message: dict[str, Any]) -> tuple[int, int, str]:
    record, metadata = message["record"], message["metadata"]
    return record["id"], record["version"], f"{metadata['commit_lsn']}/{metadata['commit_idx']}"


class Worker(threading.Thread):
    """Receives from a consumer at any of several addresses until it is stopped.

    Args:
        ledger: Where it notes what it sees.
        addresses: Of the APIs, `host:port`.
        token: Its bearer token.
        consumer: The consumer's name.
        ack_wait: The consumer's, in seconds.
        seed: Of its choices.
    """

    def __init__(
        self,
        ledger: Ledger,
        addresses: Sequence[str],
        token: str,
        consumer: str,
        ack_wait: float,
        seed: int,
    ) -> None:
        super().__init__(name=f"worker-{seed}", daemon=True)
        self._ledger = ledger
        self._ack_wait = ack_wait
        self._random = random.Random(seed)
        self._late: list[Delivery] = []
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        path = f"/v1/http-consumers/{consumer}"
        self._clients = [
            httpx.Client(
                base_url=f"http://{address}{path}", timeout=20, trust_env=False, verify=NO_TLS,
                headers={"Authorization": f"Bearer {token}"},
            )
            for address in addresses
        ]  # fmt: skip

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._work()
        except BaseException as error:
            self._error = error
        finally:
            for client in self._clients:
                client.close()

    def _work(self) -> None:
        taken = self._receive()
        self._stopping.wait(self._random.uniform(0, 0.03))
        ack: list[Delivery] = []
        nack: list[Delivery] = []
        for delivery in taken:
            chance = self._random.random()
            if chance < 0.90:
                ack.append(delivery)
            elif chance < 0.96:
                nack.append(delivery)
            elif chance < 0.98:
                self._late.append(delivery)
        self._answer("ack", ack)
        self._answer("nack", nack)
        overdue = time.monotonic() - self._ack_wait
        late = [delivery for delivery in self._late if delivery.received < overdue]
        if late:
            self._late = [delivery for delivery in self._late if delivery.received >= overdue]
            self._answer("ack", late)

    def _receive(self) -> list[Delivery]:
        sent = time.monotonic()
        size = self._random.choice((1, 5, 20))
        answer = self._ask("GET", "/next", params={"batch_size": size, "wait_for_ms": _WAIT_MS})
        if answer is None:
            return []
        received = time.monotonic()
        assert answer.status_code == 200, answer.text
        taken = [
            Delivery(*_identity(message), message["ack_token"], sent, received)
            for message in orjson.loads(answer.content)["data"]
        ]
        self._ledger.deliveries += taken
        return taken

    def _answer(self, fate: Literal["ack", "nack"], deliveries: Sequence[Delivery]) -> None:
        """Ack or nack, again and again until there is an answer."""
        if not deliveries:
            return
        body: dict[str, Any] = {"ack_tokens": [delivery.token for delivery in deliveries]}
        if fate == "nack":
            body["delay_ms"] = self._random.choice((0, 200))
        first = time.monotonic()
        for delivery in deliveries:
            delivery.fate, delivery.settled = fate, first
        answer, attempts = None, 0
        while answer is None:
            assert time.monotonic() < first + _GIVEN_UP, f"no {fate} was answered"
            asked, attempts = time.monotonic(), attempts + 1
            answer = self._ask("POST", f"/{fate}", json=body)
        answered = time.monotonic()
        assert answer.status_code in (200, 409), answer.text
        refused = {each["ack_token"] for each in answer.json().get("refused", ())}
        for delivery in deliveries:
            delivery.attempts, delivery.asked, delivery.answered = attempts, asked, answered
            delivery.accepted = delivery.token not in refused
            if fate == "ack" and delivery.accepted:
                self._ledger.acked.add((delivery.group, delivery.version))

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        try:
            answer = self._random.choice(self._clients).request(method, path, **options)
        except httpx.TransportError:
            answer = None
        if answer is None or answer.status_code == 503:
            self._ledger.broken += 1
            threading.Event().wait(0.05)
            return None
        return answer

    def stop(self) -> None:
        """Have it end what it does and end; raises what ended it before."""
        self._stopping.set()
        self.join(_GIVEN_UP)
        assert not self.is_alive(), "it does not end"
        if self._error is not None:
            raise self._error


class Workers:
    """Several workers that share a consumer; a context manager that stops them."""

    def __init__(
        self, count: int, addresses: Sequence[str], token: str, consumer: str, ack_wait: float
    ) -> None:
        self.ledger = Ledger()
        self._workers = [
            Worker(self.ledger, addresses, token, consumer, ack_wait, seed) for seed in range(count)
        ]

    def stop(self) -> None:
        """Stop all; raises what ended one of them."""
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> Self:
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
